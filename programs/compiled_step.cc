#include "fulgur/programs/compiled_step.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <variant>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/core/ready_gradients.h"
#include "fulgur/programs/compiled_code.h"

namespace fulgur::program {
namespace {

using c10::IValue;
using AutogradNode = torch::autograd::Node;
using torch::autograd::variable_list;
using Json = nlohmann::json;

constexpr const char* kModel = "step";
constexpr const char* kDescription = "extra/step.json";
constexpr int64_t kVersion = 1;

// The backward of an output that is not the loss.
class NoBackward final : public AutogradNode {
 public:
  explicit NoBackward(std::string output) : output_(std::move(output)) {}
  variable_list apply(variable_list&&) override {
    TORCH_CHECK(false, "a compiled step has the gradients of its output 'loss' alone, but those of '", output_,
                "' are asked for; set ProgramOptions::compiled to false, or detach it");
  }
  std::string name() const override { return "NoCompiledBackward"; }

 private:
  const std::string output_;
};

std::shared_ptr<AutogradNode> owned(AutogradNode* node) { return {node, torch::autograd::deleteNode}; }

Json description_of(const std::filesystem::path& file, const ProgramArchive& archive) {
  const std::string where = fmt::format("{}: {}", file.string(), kDescription);
  return parse_json(archive.entry(kDescription).value(), where, {.max_depth = 4, .max_values = 1'000'000});
}

// The names of the user's outputs, and the place of the loss among them.
size_t place_of_loss(const std::vector<std::string>& names, const std::filesystem::path& file) {
  const auto found = std::ranges::find(names, "loss");
  if (found == names.end()) {
    throw CheckpointError(fmt::format("{}: has a compiled step, but no output 'loss'", file.string()));
  }
  return static_cast<size_t>(found - names.begin());
}

}  // namespace

bool CompiledStep::is_in(const ProgramArchive& archive) { return archive.entry(kDescription).has_value(); }

std::string CompiledStep::why_not_here(const std::filesystem::path& file, const ProgramArchive& archive,
                                       c10::Device device) {
  try {
    const Json description = description_of(file, archive);
    if (const int64_t version = description.at("version").get<int64_t>(); version != kVersion) {
      return fmt::format("it has version {}, but version {} is read", version, kVersion);
    }
    if (const auto torch = description.at("torch_version").get<std::string>(); torch != TORCH_VERSION) {
      return fmt::format("it was compiled for torch {}, but this is torch {}", torch, TORCH_VERSION);
    }
  } catch (const Json::exception& error) {
    throw CheckpointError(fmt::format("{}: {}: {}", file.string(), kDescription, error.what()));
  }
  const std::string reason = why_code_does_not_run(file, kModel, device);
  return reason.empty() ? "" : "it " + reason;
}

CompiledStep::CompiledStep(const std::filesystem::path& file, const ProgramArchive& archive, c10::Device device,
                           const std::function<const torch::nn::Module*(std::string_view path)>& submodule)
    : program_(archive.program()),
      device_(device),
      loss_(place_of_loss(program_.output_names(), file)),
      output_names_(program_.output_names()) {
  std::map<std::string, size_t> weights, users;  // the places of inputs, by name
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    const Input& input = program_.inputs[i];
    if (input.kind == Input::Kind::fixed || (input.kind == Input::Kind::user && !input.dtype)) {
      throw CheckpointError(
          fmt::format("{}: has a compiled step, but takes a number, '{}'", file.string(), input.name));
    }
    if (input.kind == Input::Kind::user) users[input.name] = i;
    if (!input.is_weight()) continue;
    weights[input.name] = i;
    const ProgramArchive::Tensor stored = archive.weight(input.name);
    weights_.push_back({.input = i,
                        .name = input.name,
                        .sizes = stored.tensor.sizes().vec(),
                        .strides = stored.tensor.strides().vec(),
                        .dtype = stored.tensor.scalar_type(),
                        .is_frozen = !stored.requires_grad});
  }
  const Json description = description_of(file, archive);
  try {
    for (const Json& name : description.at("gradients")) trained_.push_back(weights.at(name.get<std::string>()));
    for (const auto& [name, sizes] : description.at("sizes").items()) {
      sizes_[users.at(name)] = sizes.get<std::vector<int64_t>>();
    }
    for (const auto& [path, is_training] : description.at("modes").items()) {
      (is_training.get<bool>() ? in_train_mode_ : in_eval_mode_).emplace_back(submodule(path), path);
    }
  } catch (const std::exception& error) {
    throw CheckpointError(
        fmt::format("{}: {} does not fit the program: {}", file.string(), kDescription, error.what()));
  }
  try {
    loader_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(file.string(), kModel,
                                                                        /*run_single_threaded=*/true);
  } catch (const std::exception&) {  // the loader throws types of its own
    throw CheckpointError(
        fmt::format("{}: its compiled step cannot be loaded: {}", file.string(), text_of(std::current_exception())));
  }
}

CompiledStep::~CompiledStep() = default;

std::string CompiledStep::why_not(const std::vector<IValue>& inputs) const {
  for (const auto& [module, path] : in_train_mode_) {
    if (!module->is_training()) return fmt::format("module '{}' is in eval mode", path);
  }
  for (const auto& [module, path] : in_eval_mode_) {
    if (module->is_training()) return fmt::format("module '{}' is in train mode", path);
  }
  for (const Weight& weight : weights_) {
    const at::Tensor& tensor = inputs[weight.input].toTensor();
    if (tensor.device() != device_) return fmt::format("'{}' is on {}", weight.name, tensor.device().str());
    if (tensor.scalar_type() != weight.dtype) {
      return fmt::format("'{}' is {}, but was {}", weight.name, toString(tensor.scalar_type()), toString(weight.dtype));
    }
    if (tensor.sizes() != weight.sizes || tensor.strides() != weight.strides) {
      return fmt::format("'{}' has sizes {} and strides {}, but had {} and {}", weight.name, tensor.sizes(),
                         tensor.strides(), weight.sizes, weight.strides);
    }
    if (tensor.scalar_type() == at::kHalf && tensor.requires_grad()) {
      return fmt::format("'{}' is Half, and the loss would be scaled after its gradient is computed", weight.name);
    }
    if (weight.is_frozen && tensor.requires_grad()) return fmt::format("'{}' needs a gradient", weight.name);
  }
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    const Input& input = program_.inputs[i];
    if (input.kind != Input::Kind::user) continue;
    const at::Tensor& tensor = inputs[i].toTensor();
    if (tensor.device() != device_) return fmt::format("input '{}' is on {}", input.name, tensor.device().str());
    if (tensor.scalar_type() != input.dtype) {
      return fmt::format("input '{}' is {}, but was {}", input.name, toString(tensor.scalar_type()),
                         toString(*input.dtype));
    }
    if (tensor.requires_grad()) return fmt::format("input '{}' needs a gradient", input.name);
    if (const auto only = sizes_.find(i); only != sizes_.end()) {
      if (tensor.sizes() == only->second) continue;
      return fmt::format("input '{}' has sizes {}, and the step is for {} alone", input.name, tensor.sizes(),
                         only->second);
    }
    for (size_t dim = 0; dim < input.sizes.size(); ++dim) {
      const bool may_vary = !std::holds_alternative<int64_t>(input.sizes[dim]);
      if (may_vary && tensor.sizes()[dim] < 2) {
        return fmt::format("input '{}' has a size of {}", input.name, tensor.sizes()[dim]);
      }
    }
  }
  if (at::autocast::is_autocast_enabled(device_.type())) return "autocast is on";
  if (torch::autograd::AnomalyMode::is_enabled()) return "detect_anomaly is on, which names operators";
  return "";
}

std::vector<at::Tensor> CompiledStep::run(const std::vector<IValue>& inputs) {
  std::vector<at::Tensor> tensors, parameters, gradients, outputs;
  tensors.reserve(inputs.size() + trained_.size());
  {
    const c10::NoGradGuard no_gradient;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor& tensor = inputs[i].toTensor();
      tensors.push_back(program_.inputs[i].kind == Input::Kind::user ? tensor.contiguous() : tensor);
    }
    for (const size_t i : trained_) gradients.push_back(at::empty_like(inputs[i].toTensor()));
    tensors.insert(tensors.end(), gradients.begin(), gradients.end());
    outputs = loader_->boxed_run(std::move(tensors));
  }
  TORCH_CHECK(outputs.size() == output_names_.size(), "the compiled step gives ", outputs.size(),
              " outputs instead of ", output_names_.size());
  for (const size_t i : trained_) parameters.push_back(inputs[i].toTensor());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (i == loss_ || !torch::autograd::isDifferentiableType(outputs[i].scalar_type())) continue;
    outputs[i] = outputs[i].detach();  // it may be an input itself
    torch::autograd::set_history(outputs[i], owned(new NoBackward(output_names_[i])));
  }
  set_ready_gradients(outputs[loss_], parameters, std::move(gradients));
  return outputs;
}

}  // namespace fulgur::program
