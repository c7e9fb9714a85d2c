#include "fulgur/programs/compiled_package.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/programs/archive_entries.h"
#include "fulgur/programs/checkpoint_weights.h"
#include "fulgur/programs/input_checker.h"
#include "fulgur/programs/loaded_code.h"
#include "fulgur/programs/packed_code.h"

namespace fulgur {
namespace {

using program::Input;

// Where //tools:export puts the program's model.json.
constexpr std::string_view kProgramEntry = "extra/program.json";

// "cuda" is the current GPU.
c10::Device with_index(c10::Device device) {
  if (device.is_cpu() || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

// A GPU goes on with a run after the function that began it has returned.
void wait_for(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace

CompiledPackage::CompiledPackage(const std::filesystem::path& file, c10::Device device)
    : file_(file), device_(with_index(device)) {
  const auto map = MemoryMap::open(file);
  const ArchiveEntries entries = read_archive_entries(*map);
  const std::set<std::string> models = compiled_models(entries);
  if (models.size() != 1) {
    fail(fmt::format("holds {} compiled models ({}); one is run", models.size(), fmt::join(models, ", ")));
  }
  if (const auto json = entries.find(std::string(kProgramEntry)); json != entries.end()) {
    program_ = program::parse_program(json->second, file.string());
    names_ = {.inputs = program_->input_names(), .outputs = program_->output_names()};
    for (const Input& input : program_->inputs) {
      if (input.kind == Input::Kind::user && !input.dtype) {
        fail(fmt::format("takes a number, '{}', which compiled code does not", input.name));
      }
    }
  }
  const PackedCode packed(file, entries, *models.begin());
  if (const std::string reason = packed.why_not_on(device_); !reason.empty()) fail(reason);
  code_ = packed.load_for_any_thread(device_);
  if (program_) return;
  const std::vector<std::string> specs = code_->runner().get_call_spec();
  if (specs.size() != 2) fail("has no record of its inputs and outputs");
  names_ = program::parse_call_names(specs[0], specs[1], file.string());
}

CompiledPackage::~CompiledPackage() = default;

// The tensors as the code reads them: in the order of the call, contiguous, on its device.
std::vector<at::Tensor> CompiledPackage::arguments(const Batch& batch) const {
  std::vector<at::Tensor> tensors;
  if (!program_) {
    for (const std::string& name : names_.inputs) tensors.push_back(batch[name].to(device_).contiguous());
    return tensors;
  }
  program::InputChecker checker(*program_, file_.string());
  for (const Input& input : program_->inputs) {
    if (input.kind != Input::Kind::user) continue;
    const at::Tensor tensor = checker.value_of(input, batch).toTensor();
    TORCH_CHECK_VALUE(tensor.scalar_type() == *input.dtype,
                      fmt::format("input '{}' of {} is {}, but it was compiled for {}; convert it by to()", input.name,
                                  file_.string(), toString(tensor.scalar_type()), toString(*input.dtype)));
    tensors.push_back(tensor.to(device_).contiguous());
  }
  checker.check_guards(batch);
  return tensors;
}

Batch CompiledPackage::run(const Batch& inputs) {
  const c10::NoGradGuard no_gradient;
  const c10::DeviceGuard guard(device_);
  const std::vector<at::Tensor> results = code_->run(arguments(inputs));
  if (results.size() != names_.outputs.size()) {
    fail(fmt::format("gives {} outputs, but its program has {}", results.size(), names_.outputs.size()));
  }
  std::vector<Batch::Entry> outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].defined()) outputs.emplace_back(names_.outputs[i], results[i]);
  }
  return Batch(std::move(outputs));
}

void CompiledPackage::set_weights(const std::filesystem::path& checkpoint) {
  if (!program_) {
    throw UsageError(
        fmt::format("{} cannot take other weights: AOTInductor writes small ones into the code; compile the program by "
                    "//tools:export, which keeps all of them apart",
                    file_.string()));
  }
  const std::lock_guard setting(setting_);
  const c10::DeviceGuard guard(device_);  // the code takes memory for the weights from the current GPU
  LoadedCode::Runner& runner = code_->runner();
  const std::unordered_map<std::string, at::Tensor> current = runner.extract_constants_map(/*use_inactive=*/false);
  std::map<std::string, std::vector<int64_t>> sizes;
  for (const Input& input : program_->inputs) {
    if (input.is_weight()) sizes[input.name] = input.fixed_sizes();
  }
  const CheckpointReader reader(checkpoint);
  std::unordered_map<std::string, std::string> names_in_code;
  for (const auto& [in_code, name] : runner.getConstantNamesToOriginalFQNs()) names_in_code[name] = in_code;
  std::unordered_map<std::string, at::Tensor> values;
  for (const auto& [name, weight] : weights_of_program(reader, sizes, file_.string())) {
    const auto found = current.find(name);
    if (found == current.end()) continue;  // the code does not use it
    // The runner copies the whole storage, so that it has to be laid out as the code's own.
    const at::Tensor& own = found->second;
    values[names_in_code.at(name)] = at::empty_strided(own.sizes(), own.strides(), own.options()).copy_(weight);
  }
  wait_for(device_);  // runs from before the last exchange may still read what is overwritten now
  const auto update = [&] {
    runner.update_constant_buffer(values, /*use_inactive=*/true, /*validate_full_updates=*/false);
  };
  // The first run of the code makes what the first update makes, too, so that they must not meet.
  std::exchange(has_set_weights_, true) ? update() : code_->between_runs(update);
  code_->between_runs([&] { runner.swap_constant_buffer(); });
}

void CompiledPackage::fail(std::string_view reason) const {
  throw CheckpointError(fmt::format("{}: {}", file_.string(), reason));
}

}  // namespace fulgur
