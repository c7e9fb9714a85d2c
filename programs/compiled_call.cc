#include "fulgur/programs/compiled_call.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/version.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/core/ready_gradients.h"
#include "fulgur/programs/loaded_code.h"
#include "fulgur/programs/packed_code.h"

namespace fulgur::program {
namespace {

using c10::IValue;
using AutogradNode = torch::autograd::Node;
using torch::autograd::variable_list;
using Json = nlohmann::json;

constexpr const char* kDescription = "extra/compiled.json";
constexpr int64_t kVersion = 1;
constexpr int64_t kNoLimit = int64_t{1} << 62;  // as the largest of a size

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

// What //tools:compile_step says of all the code that it has put into the archive.
Json read_description(const std::filesystem::path& file, const ProgramArchive& archive) {
  const auto found = archive.entries().find(kDescription);
  if (found == archive.entries().end()) return {};
  return parse_json(found->second, fmt::format("{}: {}", file.string(), kDescription),
                    {.max_depth = 6, .max_values = 1'000'000});
}

// The place of an input that the description names.
size_t place_of(const std::map<std::string, size_t>& places, std::string_view kind, const std::string& name) {
  if (const auto found = places.find(name); found != places.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [other, place] : places) known.push_back(other);
  const std::optional<std::string> nearest = nearest_name(name, known);
  throw UsageError(
      fmt::format("it has no {} '{}'{}", kind, name, nearest ? fmt::format(", but has '{}'", *nearest) : ""));
}

[[noreturn]] void fail_at_description(const std::filesystem::path& file, const std::exception& error) {
  throw CheckpointError(fmt::format("{}: {} does not fit the program: {}", file.string(), kDescription, error.what()));
}

}  // namespace

bool CompiledCall::is_in(const std::filesystem::path& file, const ProgramArchive& archive, const std::string& name) {
  const Json description = read_description(file, archive);
  return description.contains("calls") && description["calls"].contains(name);
}

std::string CompiledCall::why_not_here(const std::filesystem::path& file, const ProgramArchive& archive,
                                       const std::string& name, c10::Device device) {
  try {
    const Json description = read_description(file, archive);
    if (const int64_t version = description.at("version").get<int64_t>(); version != kVersion) {
      return fmt::format("it has version {}, but version {} is read", version, kVersion);
    }
    if (const auto torch = description.at("torch_version").get<std::string>(); torch != TORCH_VERSION) {
      return fmt::format("it was compiled for torch {}, but this is torch {}", torch, TORCH_VERSION);
    }
  } catch (const Json::exception& error) {
    fail_at_description(file, error);
  }
  const std::string reason = PackedCode(file, archive.entries(), name).why_not_on(device);
  return reason.empty() ? "" : "it " + reason;
}

CompiledCall::CompiledCall(const std::filesystem::path& file, const ProgramArchive& archive, const std::string& name,
                           const std::vector<size_t>& left_out, c10::Device device,
                           const std::function<const torch::nn::Module*(std::string_view path)>& submodule)
    : program_(archive.program()), name_(name), device_(device) {
  std::map<std::string, size_t> weights, users;  // the places of inputs, by name
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    const Input& input = program_.inputs[i];
    if (input.kind == Input::Kind::fixed || (input.kind == Input::Kind::user && !input.dtype)) {
      throw CheckpointError(fmt::format("{}: has compiled code, but takes a number, '{}'", file.string(), input.name));
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
  try {
    const Json description = read_description(file, archive).at("calls").at(name);
    std::set<size_t> without;
    for (const Json& input : description.at("without")) without.insert(place_of(users, "input", input));
    if (without != std::set<size_t>(left_out.begin(), left_out.end())) {
      throw UsageError(fmt::format("'{}' does without other inputs than the program does", name));
    }
    for (size_t i = 0; i < program_.inputs.size(); ++i) {
      if (!without.contains(i)) taken_.push_back(i);
    }
    for (const Json& weight : description.at("gradients")) trained_.push_back(place_of(weights, "weight", weight));
    for (const auto& [input, sizes] : description.at("sizes").items()) {
      sizes_[place_of(users, "input", input)] = sizes.get<std::vector<Range>>();
    }
    for (const auto& [path, is_training] : description.at("modes").items()) {
      (is_training.get<bool>() ? in_train_mode_ : in_eval_mode_).emplace_back(submodule(path), path);
    }
    const auto precision = description.at("precision").get<std::string>();
    if (precision == "bf16-mixed") autocast_ = at::kBFloat16;
    if (precision != "bf16-mixed" && precision != "32-true") {
      throw UsageError(fmt::format("the precision '{}' is not known", precision));
    }
    output_names_ = description.at("outputs").get<std::vector<std::string>>();
  } catch (const std::exception& error) {
    fail_at_description(file, error);
  }
  const auto has_sizes = [this](size_t place) {
    const auto found = sizes_.find(place);
    const Input& input = program_.inputs[place];
    return input.kind != Input::Kind::user || (found != sizes_.end() && found->second.size() == input.sizes.size());
  };
  if (!std::ranges::all_of(taken_, has_sizes)) {
    throw CheckpointError(fmt::format("{}: {} does not have the sizes of all inputs", file.string(), kDescription));
  }
  if (is_step() && (trained_.empty() || std::ranges::find(output_names_, "loss") == output_names_.end())) {
    throw CheckpointError(fmt::format("{}: has a compiled step, but no output 'loss' with gradients", file.string()));
  }
  const PackedCode packed(file, archive.entries(), name);
  code_ = is_step() ? packed.load_for_one_thread(device) : packed.load_for_any_thread(device);
}

CompiledCall::~CompiledCall() = default;

std::string CompiledCall::why_not(const std::vector<IValue>& inputs) const {
  for (const auto& [module, path] : in_train_mode_) {
    if (!module->is_training()) return fmt::format("module '{}' is in eval mode", path);
  }
  for (const auto& [module, path] : in_eval_mode_) {
    if (module->is_training()) return fmt::format("module '{}' is in train mode", path);
  }
  for (const Weight& weight : weights_) {
    if (std::string reason = why_not(inputs[weight.input].toTensor(), weight); !reason.empty()) return reason;
  }
  for (const size_t i : taken_) {
    if (program_.inputs[i].kind != Input::Kind::user) continue;
    if (std::string reason = why_not(inputs[i].toTensor(), i); !reason.empty()) return reason;
  }
  if (is_step() && torch::autograd::AnomalyMode::is_enabled()) return "detect_anomaly is on, which names operators";
  return why_not_in_this_precision();
}

std::string CompiledCall::why_not(const at::Tensor& tensor, const Weight& weight) const {
  if (tensor.device() != device_) return fmt::format("'{}' is on {}", weight.name, tensor.device().str());
  if (tensor.scalar_type() != weight.dtype) {
    return fmt::format("'{}' is {}, but was {}", weight.name, toString(tensor.scalar_type()), toString(weight.dtype));
  }
  if (tensor.sizes() != weight.sizes || tensor.strides() != weight.strides) {
    return fmt::format("'{}' has sizes {} and strides {}, but had {} and {}", weight.name, tensor.sizes(),
                       tensor.strides(), weight.sizes, weight.strides);
  }
  if (!is_step() || !tensor.requires_grad()) return "";
  if (tensor.scalar_type() == at::kHalf) {
    return fmt::format("'{}' is Half, and the loss would be scaled after its gradient is computed", weight.name);
  }
  return weight.is_frozen ? fmt::format("'{}' needs a gradient", weight.name) : "";
}

std::string CompiledCall::why_not(const at::Tensor& tensor, size_t place) const {
  const Input& input = program_.inputs[place];
  if (tensor.device() != device_) return fmt::format("input '{}' is on {}", input.name, tensor.device().str());
  if (tensor.scalar_type() != input.dtype) {
    return fmt::format("input '{}' is {}, but was {}", input.name, toString(tensor.scalar_type()),
                       toString(*input.dtype));
  }
  if (is_step() && tensor.requires_grad()) return fmt::format("input '{}' needs a gradient", input.name);
  const std::vector<Range>& ranges = sizes_.at(place);
  for (size_t dim = 0; dim < ranges.size(); ++dim) {
    const auto [least, most] = ranges[dim];
    if (least <= tensor.size(static_cast<int64_t>(dim)) && tensor.size(static_cast<int64_t>(dim)) <= most) continue;
    const std::string limit = most < kNoLimit ? fmt::format(" to {}", most) : " and more";
    return fmt::format("input '{}' has sizes {}, but in dimension {} it is for {}{}", input.name, tensor.sizes(), dim,
                       least, least == most ? " alone" : limit);
  }
  return "";
}

std::string CompiledCall::why_not_in_this_precision() const {
  std::optional<at::ScalarType> autocast;
  if (at::autocast::is_autocast_enabled(device_.type())) autocast = at::autocast::get_autocast_dtype(device_.type());
  if (autocast == autocast_) return "";
  const auto name = [](const auto& dtype) {
    return dtype ? fmt::format("autocast to {}", toString(*dtype)) : "no autocast";
  };
  return fmt::format("it was compiled with {}, but this call has {}", name(autocast_), name(autocast));
}

std::vector<at::Tensor> CompiledCall::run(const std::vector<IValue>& inputs) {
  const c10::DeviceGuard guard(device_);  // the code takes the current stream of the current GPU
  std::vector<at::Tensor> tensors, results;
  tensors.reserve(taken_.size());
  {
    const c10::NoGradGuard no_gradient;
    const c10::impl::ExcludeDispatchKeyGuard casts_are_compiled_in(c10::autocast_dispatch_keyset);
    for (const size_t i : taken_) {
      const at::Tensor& tensor = inputs[i].toTensor();
      tensors.push_back(program_.inputs[i].kind == Input::Kind::user ? tensor.contiguous() : tensor);
    }
    results = code_->run(std::move(tensors));
  }
  TORCH_CHECK(results.size() == output_names_.size() + trained_.size(), "the compiled code gives ", results.size(),
              " results instead of ", output_names_.size() + trained_.size());
  if (is_step()) add_backward(results, inputs);
  return results;
}

// Moves the gradients from the end of the results into a backward of the loss.
void CompiledCall::add_backward(std::vector<at::Tensor>& results, const std::vector<IValue>& inputs) {
  std::vector<at::Tensor> parameters, gradients(std::make_move_iterator(results.begin() + std::ssize(output_names_)),
                                                std::make_move_iterator(results.end()));
  results.resize(output_names_.size());
  parameters.reserve(trained_.size());
  for (const size_t i : trained_) {
    const at::Tensor& parameter = parameters.emplace_back(inputs[i].toTensor());
    at::Tensor& gradient = gradients[parameters.size() - 1];
    gradient = fit_for_parameter(gradient, parameter);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (output_names_[i] == "loss" || !torch::autograd::isDifferentiableType(results[i].scalar_type())) continue;
    results[i] = results[i].detach();  // it may be an input itself
    torch::autograd::set_history(results[i], owned(new NoBackward(output_names_[i])));
  }
  const auto loss = std::ranges::find(output_names_, "loss") - output_names_.begin();
  set_ready_gradients(results[static_cast<size_t>(loss)], parameters, std::move(gradients));
  const torch::autograd::edge_list& edges = results[static_cast<size_t>(loss)].grad_fn()->next_edges();
  accumulators_.resize(edges.size());
  for (size_t i = 0; i < edges.size(); ++i) {
    if (accumulators_[i] != edges[i].function) accumulators_[i] = edges[i].function;
  }
}

}  // namespace fulgur::program
