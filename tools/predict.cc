// Runs a program of torch.export, or a package of AOTInductor, on a batch:
//   bazel run //tools:predict -- net.pt2 inputs.safetensors outputs.safetensors
//   --weights=runs/version_0/checkpoints/best
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/version.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/programs/predictor.h"

namespace {

using namespace fulgur;

Batch read_batch(const std::string& path) {
  const SafetensorsFile file(path);
  std::vector<Batch::Entry> tensors;
  for (const SafetensorsEntry& entry : file.entries())
    tensors.emplace_back(entry.name, file.tensor(entry.name).clone());
  return Batch(std::move(tensors));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs a program of torch.export, or a package of AOTInductor, on a batch.");
  app.set_version_flag("--version", "fulgur " FULGUR_VERSION);
  std::string program, inputs, outputs, weights;
  app.add_option("program", program, "a .pt2 file")->required();
  app.add_option("inputs", inputs, "a safetensors file with the inputs by name")->required();
  app.add_option("outputs", outputs, "a new safetensors file for the outputs")->required();
  app.add_option("--weights", weights, "a checkpoint to take the weights from");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return exit_code_of([&] {
    enter_working_directory();
    const Predictor predictor(std::filesystem::path(program), {.weights = weights});
    const Batch results = predictor.run(read_batch(inputs));
    write_safetensors(outputs, {results.begin(), results.end()});
    for (const auto& [name, tensor] : results) {
      fmt::print("{}: {} of sizes {}\n", name, toString(tensor.scalar_type()), tensor.sizes());
    }
  });
}
