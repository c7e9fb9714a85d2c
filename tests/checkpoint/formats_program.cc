// Converts files for formats_test.py: formats_program <what> <from> <to>; prints the digest of <to>.
#include <fmt/format.h>

#include <cstdio>
#include <string_view>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/huggingface.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/checkpoint/formats/torch_archive.h"

namespace {

using namespace fulgur;

State hyper_parameters() {
  State state;
  state.set("width", int64_t{3});
  state.set("lr", 0.125);
  state.set("name", std::string("tiny \u00e9"));
  state.set("bias", true);
  return state;
}

FileDigest convert(std::string_view what, const char* from, const char* to) {
  if (what == "torch_to_safetensors") return write_safetensors(to, read_torch_file(from));
  const NamedTensors tensors = read_huggingface(from);
  if (what == "safetensors") return write_safetensors(to, tensors, {{"format", "pt"}});
  if (what == "torch") return write_torch_file(to, tensors);
  if (what == "lightning") {
    return write_lightning_checkpoint(
        to, {.epoch = 2, .global_step = 8, .state_dict = tensors, .hyper_parameters = hyper_parameters()});
  }
  throw UsageError(fmt::format("unknown: {}", what));
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) throw UsageError("three arguments are needed");
  fmt::print("{:016x}\n", convert(argv[1], argv[2], argv[3]).xxh3);
} catch (const CheckpointError& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 3;
}
