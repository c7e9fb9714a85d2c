#include "checkpoint/checkpoint_writer.h"

#include "checkpoint/file_system.h"

namespace fulgur {

void write_checkpoint(const std::filesystem::path& folder, const NamedTensors& module_state) {
  create_folder_atomically(folder, [&](const std::filesystem::path& temporary) {
    write_safetensors(temporary / "model.safetensors", module_state, {{"format", "pt"}});
  });
}

}  // namespace fulgur
