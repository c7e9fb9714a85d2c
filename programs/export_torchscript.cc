#include "fulgur/programs/export_torchscript.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/tensor_difference.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/core/scoped_modes.h"

namespace fulgur {
namespace {

using torch::jit::Stack;

// A TorchScript module with the tensors of a module, under the same names and in the same tree.
torch::jit::Module mirror(const torch::nn::Module& module, const std::string& type,
                          const std::shared_ptr<torch::jit::CompilationUnit>& unit) {
  torch::jit::Module scripted(c10::QualifiedName(type), unit, /*shouldMangle=*/true);
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    scripted.register_parameter(parameter.key(), parameter.value(), /*is_buffer=*/false);
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    scripted.register_buffer(buffer.key(), buffer.value());
  }
  for (const auto& child : module.named_children()) {
    scripted.register_module(child.key(), mirror(*child.value(), type + "_" + child.key(), unit));
  }
  return scripted;
}

Stack tensors_of(const Batch& batch) {
  Stack tensors;
  for (const auto& [name, tensor] : batch) tensors.emplace_back(tensor);
  return tensors;
}

Batch with_tensors(const Batch& batch, const Stack& tensors) {
  std::vector<Batch::Entry> entries;
  size_t next = 0;
  for (const auto& [name, tensor] : batch) entries.emplace_back(name, tensors[next++].toTensor());
  return Batch(std::move(entries));
}

c10::IValue to_result(const Batch& outputs) {
  if (outputs.size() == 1) return outputs.begin()->second;
  return c10::ivalue::Tuple::create(tensors_of(outputs));
}

torch::jit::Module trace(torch::nn::Module& module, const std::function<Batch(const Batch&)>& predict,
                         const Batch& example) {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  torch::jit::Module scripted = mirror(module, "__torch__.Exported", unit);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : example) names.push_back(name);
  const auto traced = [&](const Stack& inputs) -> Stack { return {to_result(predict(with_tensors(example, inputs)))}; };
  const auto name_of = [](const at::Tensor&) { return std::string(); };
  const auto state = torch::jit::tracer::trace(tensors_of(example), traced, name_of, /*strict=*/true,
                                               /*force_outplace=*/false, &scripted, names)
                         .first;
  scripted.type()->addMethod(
      unit->create_function(c10::QualifiedName(*scripted.type()->name(), "forward"), state->graph));
  return scripted;
}

// The batch and the answer to it, as torch.load() of Python reads them: a tuple of names and tensors in turn, such as
// ("inputs/image", image, "outputs/logits", logits).
std::string pickled(const Batch& batch, const Batch& answer) {
  Stack items;
  const auto add = [&](const std::string& folder, const Batch& tensors) {
    for (const auto& [name, tensor] : tensors) {
      items.emplace_back(folder + name);
      items.emplace_back(tensor.detach().cpu());
    }
  };
  add("inputs/", batch);
  add("outputs/", answer);
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(items)));
  return {bytes.begin(), bytes.end()};
}

// The reason in a message of the TorchScript interpreter, which has the code before it.
std::string last_line(std::string text) {
  text.erase(text.find_last_not_of('\n') + 1);
  return text.substr(text.rfind('\n') + 1);
}

c10::IValue run(torch::jit::Module& scripted, const Batch& batch, const std::filesystem::path& file) {
  try {
    return scripted.forward(tensors_of(batch));
  } catch (const std::exception& error) {  // the interpreter throws types of its own
    throw SetupError(
        fmt::format("{} is not written: it fails on a batch of {}, where the module does not; the code reads "
                    "a size: write view({{-1, ...}}) or flatten(1). {}",
                    file.string(), batch.batch_size(), last_line(error.what())));
  }
}

// Throws if an output differs from the module's by more than rounding.
void expect_same(const Batch& expected, const c10::IValue& result, const std::filesystem::path& file,
                 int64_t batch_size) {
  constexpr double kMost = 1e-5;
  const Stack found = result.isTuple() ? Stack(result.toTupleRef().elements().vec()) : Stack{result};
  size_t next = 0;
  for (const auto& [name, tensor] : expected) {
    const at::Tensor other = found.at(next++).toTensor();
    const std::string where =
        fmt::format("{} is not written: output '{}' on a batch of {}", file.string(), name, batch_size);
    if (other.sizes() != tensor.sizes()) {
      throw SetupError(
          fmt::format("{} has sizes {}, but the module's has {}; the code reads a size or branches: write "
                      "view({{-1, ...}}) or flatten(1)",
                      where, other.sizes(), tensor.sizes()));
    }
    if (tensor.numel() == 0) continue;
    const double difference = largest_difference(other.to(at::kDouble), tensor.to(at::kDouble));
    const double scale = tensor.to(at::kDouble).abs().nan_to_num(0, 0).max().item<double>();
    if (!(difference <= kMost * std::max(1.0, scale))) {
      throw SetupError(
          fmt::format("{} differs from the module's by up to {:.3g}; does the code branch on values, or draw "
                      "random numbers?",
                      where, difference));
    }
  }
}

}  // namespace

void export_torchscript(torch::nn::Module& module, const std::function<Batch(const Batch&)>& predict,
                        const Batch& example, const std::filesystem::path& file) {
  if (example.batch_size() < 2)
    throw SetupError("export_torchscript() needs a batch of at least 2 samples, to try half of it");
  const ScopedModes modes(module);
  module.eval();
  const c10::NoGradGuard no_gradient;
  std::stringstream bytes;
  trace(module, predict, example).save(bytes, {{"example.pt", pickled(example, predict(example))}});
  torch::jit::Module scripted = torch::jit::load(bytes);
  for (const Batch& batch : {example, example.split(2).front()}) {
    expect_same(predict(batch), run(scripted, batch, file), file, batch.batch_size());
  }
  const std::string text = bytes.str();
  TemporaryFile target(file);
  target.writer().write(text.data(), text.size());
  target.commit();
}

void export_torchscript(Module& module, const Batch& example, const std::filesystem::path& file) {
  export_torchscript(module, [&module](const Batch& batch) { return module.predict_step(batch, 0); }, example, file);
}

}  // namespace fulgur
