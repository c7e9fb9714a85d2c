// Trains an exported program for training.py by plain libtorch:
//   zoo_program <program.pt2> <batches.safetensors> <settings in JSON>
// The tensors of the batches are "0/<input>", "0/target", "1/<input>", ... Prints a record in JSON after each step,
// after each evaluation and at the end. A tensor is told by dtype, shape and CRC-32: "Float[2, 3] 1a2b3c4d".
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fulgur/base/crc32.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/core/batch.h"
#include "fulgur/programs/program.h"

namespace {

using namespace fulgur;
using Json = nlohmann::ordered_json;

std::string figure(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const at::Tensor flat = tensor.detach().contiguous();
  const uint32_t check = crc32({static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()});
  return fmt::format("{}[{}] {:08x}", c10::toString(flat.scalar_type()), fmt::join(flat.sizes(), ", "), check);
}

template <class NamedTensors>
Json figures(const NamedTensors& tensors) {
  Json result = Json::object();
  for (const auto& [name, tensor] : tensors) result[name] = figure(tensor);
  return result;
}

Json figures(const torch::OrderedDict<std::string, at::Tensor>& tensors) { return figures(tensors.pairs()); }

Json gradients(const torch::nn::Module& net) {
  Json result = Json::object();
  for (const auto& [name, parameter] : net.named_parameters().pairs()) result[name] = figure(parameter.grad());
  return result;
}

// The parameters that an optimizer updates: tied ones are one.
std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& net) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::vector<at::Tensor> distinct;
  for (const at::Tensor& parameter : net.parameters()) {
    if (known.insert(parameter.unsafeGetTensorImpl()).second) distinct.push_back(parameter);
  }
  return distinct;
}

// torch.optim.AdamW of Python with foreach=False. torch::optim::AdamW rounds the first moment differently.
class AdamW {
 public:
  AdamW(std::vector<at::Tensor> parameters, double lr) : parameters_(std::move(parameters)), lr_(lr) {
    for (const at::Tensor& parameter : parameters_) {
      means_.push_back(at::zeros_like(parameter));
      squares_.push_back(at::zeros_like(parameter));
    }
  }

  void step() {
    const c10::NoGradGuard no_grad;
    ++step_;
    const double step_size = lr_ / (1 - std::pow(kBeta1, step_)), root = std::sqrt(1 - std::pow(kBeta2, step_));
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& gradient = parameters_[i].grad();
      if (!gradient.defined()) continue;
      parameters_[i].mul_(1 - lr_ * kWeightDecay);
      means_[i].lerp_(gradient, 1 - kBeta1);
      squares_[i].mul_(kBeta2).addcmul_(gradient, gradient, 1 - kBeta2);
      parameters_[i].addcdiv_(means_[i], squares_[i].sqrt().div(root).add_(kEpsilon), -step_size);
    }
  }

 private:
  static constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8, kWeightDecay = 0.01;

  std::vector<at::Tensor> parameters_, means_, squares_;
  double lr_;
  double step_ = 0;
};

struct Step {
  Batch inputs;
  at::Tensor target;  // undefined: the loss needs none
};

// The i-th batch of the file; the inputs are empty after the last.
Step read_step(const SafetensorsFile& file, size_t i) {
  const std::string prefix = fmt::format("{}/", i);
  std::vector<Batch::Entry> inputs;
  Step step;
  for (const SafetensorsEntry& entry : file.entries()) {
    if (!entry.name.starts_with(prefix)) continue;
    const std::string name = entry.name.substr(prefix.size());
    if (name == "target") {
      step.target = file.tensor(entry.name).clone();  // aligned, as in Python: the last bit can depend on it
    } else {
      inputs.emplace_back(name, file.tensor(entry.name).clone());
    }
  }
  step.inputs = Batch(std::move(inputs));
  return step;
}

at::Tensor sum_of_mean_squares(const Batch& outputs) {
  at::Tensor sum;
  for (const auto& [name, output] : outputs) {
    if (!output.requires_grad()) continue;
    const at::Tensor mean = output.to(at::kFloat).square().mean();
    sum = sum.defined() ? sum + mean : 0 + mean;  // Python's sum begins with 0
  }
  return sum;
}

at::Tensor loss_of(const std::string& kind, const Batch& outputs, const at::Tensor& target) {
  if (kind == "squares") return sum_of_mean_squares(outputs);
  const at::Tensor& output = outputs.begin()->second;
  if (kind == "mse") return at::mse_loss(output, target);
  return at::cross_entropy_loss(output.flatten(0, -2), target.flatten());
}

class Training {
 public:
  Training(const std::string& program, const Json& settings)
      : net_(program, nn::ProgramOptions{.checkpoint = settings["checkpoint"]}), loss_(settings["loss"]) {
    const double lr = settings["lr"];
    if (settings["optimizer"] == "adamw") {
      adamw_ = std::make_unique<AdamW>(distinct_parameters(*net_), lr);
    } else {
      const auto options = torch::optim::SGDOptions(lr).momentum(0.9).weight_decay(1e-4);
      sgd_ = std::make_unique<torch::optim::SGD>(distinct_parameters(*net_), options);
    }
  }

  Json take_step(const Step& step) {
    for (const at::Tensor& parameter : net_->parameters()) parameter.mutable_grad().reset();
    const Batch outputs = net_->forward(step.inputs);
    const at::Tensor loss = loss_of(loss_, outputs, step.target);
    loss.backward();
    Json record{{"loss", loss.item<double>()},
                {"outputs", figures(outputs)},
                {"gradients", gradients(*net_)},
                {"buffers", figures(net_->named_buffers())}};
    adamw_ ? adamw_->step() : void(sgd_->step());
    return record;
  }

  Json evaluate(const Batch& inputs) {
    net_->eval();
    Json record{{"outputs", figures(net_->forward(inputs))}, {"buffers", figures(net_->named_buffers())}};
    net_->train();
    return record;
  }

  Json parameters() { return figures(net_->named_parameters()); }

 private:
  nn::Program net_;
  std::string loss_;
  std::unique_ptr<AdamW> adamw_;
  std::unique_ptr<torch::optim::SGD> sgd_;
};

void print(const std::string& key, const Json& value, const Json& record) {
  Json line{{key, value}};
  line.update(record);
  std::cout << line << '\n';
}

void run(const std::string& program, const SafetensorsFile& batches, const Json& settings) {
  Training training(program, settings);
  torch::manual_seed(settings["seed"]);
  const size_t evaluate_every = settings["evaluate_every"];
  for (size_t i = 0;; ++i) {
    const Step step = read_step(batches, i);
    if (step.inputs.empty()) break;
    print("step", i + 1, training.take_step(step));
    if (evaluate_every == 0 || (i + 1) % evaluate_every != 0) continue;
    print("evaluated after", i + 1, training.evaluate(step.inputs));
  }
  print("parameters", training.parameters(), Json::object());
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) return 2;
  run(argv[1], SafetensorsFile(argv[2]), Json::parse(argv[3]));
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
