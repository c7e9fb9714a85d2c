// Runs a program of torch.export, or a package of AOTInductor, on a batch:
//   bazel run //tools:predict -- net.pt2 inputs.safetensors outputs.safetensors
//   --weights=runs/version_0/checkpoints/best --device=cuda
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/version.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/device/devices.h"
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

// Throws UsageError unless it is here.
c10::Device device_of(const std::string& text) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return resolve_devices(text, 1).front();
  const std::vector<c10::Device> devices = resolve_devices(text.substr(0, colon), text.substr(colon + 1) + ",");
  if (devices.size() == 1) return devices.front();
  throw UsageError(
      fmt::format("--device={}: a batch runs on one device; write --device={}", text, devices.front().str()));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs a program of torch.export, or a package of AOTInductor, on a batch.");
  app.set_version_flag("--version", "fulgur " FULGUR_VERSION);
  std::string program, inputs, outputs, weights, device = "cpu";
  app.add_option("program", program, "a .pt2 file")->required();
  app.add_option("inputs", inputs, "a safetensors file with the inputs by name")->required();
  app.add_option("outputs", outputs, "a new safetensors file for the outputs")->required();
  app.add_option("--weights", weights, "a checkpoint to take the weights from");
  app.add_option("--device", device, "where it runs: cpu, cuda, or one GPU of several, such as cuda:1; default: cpu");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return exit_code_of([&] {
    enter_working_directory();
    const Predictor predictor(std::filesystem::path(program), {.weights = weights, .device = device_of(device)});
    const Batch results = predictor.run(read_batch(inputs));
    const Batch on_host = results.to(c10::kCPU);
    write_safetensors(outputs, {on_host.begin(), on_host.end()});
    for (const auto& [name, tensor] : on_host) {
      fmt::print("{}: {} of sizes {}\n", name, toString(tensor.scalar_type()), tensor.sizes());
    }
  });
}
