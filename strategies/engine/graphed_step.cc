#include "fulgur/strategies/engine/graphed_step.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/core/module.h"
#include "fulgur/core/ready_gradients.h"
#include "fulgur/core/step_recording.h"
#include "fulgur/device/cuda_graph.h"

namespace fulgur {
namespace {

constexpr int64_t kStepsBefore = 3;  // libraries choose algorithms and allocate memory in the first steps

GraphedStep::Record cuda_graph_on(c10::Device device) {
  return [device](const std::function<void()>& body) {
    return [graph = std::make_shared<CudaGraph>(device, body)] { graph->replay(); };
  };
}

// The first line of what an error says.
std::string reason_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string text = of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

// What a recorded step depends on, beside the sizes of a batch.
class ModuleState {
 public:
  explicit ModuleState(const Module& module) : modules_(module.modules()) {
    for (const at::Tensor& parameter : module.parameters()) add(parameter);
    for (const at::Tensor& buffer : module.buffers()) add(buffer);
    for (const auto& submodule : modules_) is_training_.push_back(submodule->is_training());
  }

  // Whether all of it has stayed as it was; what has been added is not looked for.
  bool holds() const {
    for (size_t i = 0; i < modules_.size(); ++i) {
      if (modules_[i]->is_training() != is_training_[i]) return false;
    }
    return std::ranges::all_of(tensors_, [](const Known& known) { return known == Known(known.tensor); });
  }

  bool operator==(const ModuleState&) const = default;

 private:
  struct Known {
    at::Tensor tensor;
    const void* memory;
    bool requires_grad;

    explicit Known(const at::Tensor& of) : tensor(of), memory(of.const_data_ptr()), requires_grad(of.requires_grad()) {}
    bool operator==(const Known& other) const {
      return tensor.is_same(other.tensor) && memory == other.memory && requires_grad == other.requires_grad;
    }
  };

  void add(const at::Tensor& tensor) {
    if (tensor.defined()) tensors_.emplace_back(tensor);
  }

  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<bool> is_training_{};
  std::vector<Known> tensors_{};
};

// Refuses steps whose backward cannot be recorded.
void check_backward(const Module& module, const at::Tensor& loss) {
  if (!loss.defined()) return StepRecording::refuse([] { return "training_step skips the batch"; });
  if (loss.numel() != 1 || !loss.requires_grad()) StepRecording::refuse([] { return "the loss has no gradient"; });
  for (const at::Tensor& parameter : module.parameters()) {
    const bool has_hook = parameter.requires_grad() && !torch::autograd::impl::hooks(parameter).empty();
    if (has_hook) StepRecording::refuse([] { return "a parameter has a hook"; });
  }
}

}  // namespace

struct GraphedStep::Recorded {
  explicit Recorded(const Module& module) : state(module), epoch(module.current_epoch()) {}

  const ModuleState state;
  int64_t epoch;                                   // the last one in which `state` was compared with the whole module
  Batch inputs{};                                  // each replay reads these
  at::Tensor loss{};                               // each replay writes this, and the gradients
  std::vector<at::Tensor> trained{}, gradients{};  // parameters that have a gradient
  std::vector<std::function<void()>> after_replay{};
  std::function<void()> replay{};
};

GraphedStep::GraphedStep(Module& module, const Precision& precision, c10::Device device, Record record)
    : module_(module),
      precision_(precision),
      device_(device),
      record_(record ? std::move(record) : cuda_graph_on(device)) {}

GraphedStep::~GraphedStep() = default;

at::Tensor GraphedStep::run(const Batch& batch, int64_t batch_idx, bool keeps_gradients) {
  if (recorded_ && !is_as_recorded()) {
    recorded_.reset();
    num_steps_ = kStepsBefore - 1;
  }
  if (!recorded_ && !has_given_up_ && num_steps_ >= kStepsBefore) record(batch, batch_idx);
  if (recorded_ && has_recorded_sizes(batch)) return replay(batch, keeps_gradients);
  if (recorded_ && !std::exchange(has_told_of_sizes_, true)) {
    log_info("cuda_graph: batches of other sizes than the recorded one, as in epoch {}, batch {}, run without a graph",
             module_.current_epoch(), batch_idx);
  }
  if (++num_steps_ == kStepsBefore && !has_given_up_) return rehearse(batch, batch_idx);
  return module_.training_step(batch, batch_idx);
}

// Runs the last step before the recording, and sees whether it does what cannot be recorded. A recording that fails
// halfway would leave tensors that the step keeps in members without values, as nothing was computed.
at::Tensor GraphedStep::rehearse(const Batch& batch, int64_t batch_idx) {
  const StepRecording rehearsal(device_, StepRecording::Kind::rehearsal);
  at::Tensor loss = module_.training_step(batch, batch_idx);
  check_backward(module_, loss);
  if (!rehearsal.refusal().empty()) give_up(rehearsal.refusal());
  return loss;
}

void GraphedStep::record(const Batch& batch, int64_t batch_idx) {
  auto recorded = std::make_unique<Recorded>(module_);
  std::vector<Batch::Entry> inputs;
  for (const auto& [name, tensor] : batch) {
    if (tensor.device() != device_) {
      return give_up(fmt::format("'{}' of the batch is on {}", name, tensor.device().str()));
    }
    if (tensor.layout() != at::kStrided || tensor.is_nested()) {
      return give_up(fmt::format("'{}' of the batch is sparse or nested", name));
    }
    inputs.emplace_back(name, tensor.clone());
  }
  recorded->inputs = Batch(std::move(inputs));
  try {
    recorded->replay = record_([this, to = recorded.get(), batch_idx] { forward_and_backward(*to, batch_idx); });
  } catch (const std::exception& error) {  // if it is of the step itself, the step throws it again without a graph
    at::autocast::clear_cache();           // the casts of weights in it were recorded, not computed
    return give_up(reason_of(error));
  }
  log_info("cuda_graph: {}::training_step was recorded, and is replayed from epoch {}, batch {} on", module_.name(),
           module_.current_epoch(), batch_idx);
  recorded_ = std::move(recorded);
}

// The work that a graph holds.
void GraphedStep::forward_and_backward(Recorded& recorded, int64_t batch_idx) const {
  StepRecording recording(device_);
  const std::vector<at::Tensor> all = module_.parameters();
  std::vector<int64_t> versions;
  for (const at::Tensor& parameter : all) versions.push_back(parameter._version());
  const at::Tensor loss = module_.training_step(recorded.inputs, batch_idx);
  check_backward(module_, loss);
  std::vector<at::Tensor> parameters = all;
  std::erase_if(parameters, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
  const ScopedFullPrecision outside(precision_, device_.type());
  std::vector<at::Tensor> gradients = torch::autograd::grad({loss}, parameters, {}, /*retain_graph=*/std::nullopt,
                                                            /*create_graph=*/false, /*allow_unused=*/true);
  recorded.loss = loss.detach();
  recorded.trained.clear();
  recorded.gradients.clear();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    recorded.trained.push_back(parameters[i]);
    recorded.gradients.push_back(fit_for_parameter(gradients[i], parameters[i]));
    gradients[i].reset();
  }
  recorded.after_replay = recording.take_actions();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i]._version() == versions[i]) continue;
    recorded.after_replay.emplace_back([written = all[i]] { torch::autograd::impl::bump_version(written); });
  }
}

void GraphedStep::give_up(const std::string& reason) {
  has_given_up_ = true;
  log_warning("cuda_graph: {}::training_step cannot be recorded, and runs without a graph: {}", module_.name(), reason);
}

bool GraphedStep::is_as_recorded() {
  const int64_t epoch = module_.current_epoch();
  const bool is_new_epoch = std::exchange(recorded_->epoch, epoch) != epoch;
  return is_new_epoch ? recorded_->state == ModuleState(module_) : recorded_->state.holds();
}

bool GraphedStep::has_recorded_sizes(const Batch& batch) const {
  return std::ranges::equal(batch, recorded_->inputs, [](const Batch::Entry& one, const Batch::Entry& other) {
    return one.first == other.first && one.second.sizes() == other.second.sizes() &&
           one.second.scalar_type() == other.second.scalar_type() && one.second.device() == other.second.device();
  });
}

at::Tensor GraphedStep::replay(const Batch& batch, bool keeps_gradients) {
  if (keeps_gradients) {  // what is at the parameters may lie where the replay writes
    for (size_t i = 0; i < recorded_->trained.size(); ++i) {
      at::Tensor& sum = recorded_->trained[i].mutable_grad();
      if (sum.defined() && sum.is_alias_of(recorded_->gradients[i])) sum = sum.clone();
    }
  }
  {
    const c10::NoGradGuard no_grad;
    auto input = recorded_->inputs.begin();
    for (const auto& [name, tensor] : batch) at::Tensor((input++)->second).copy_(tensor, /*non_blocking=*/true);
  }
  recorded_->replay();
  for (const auto& action : recorded_->after_replay) action();
  at::Tensor loss = recorded_->loss.clone();
  std::vector<at::Tensor> gradients;  // handles of their own, which autograd takes as they are
  for (const at::Tensor& gradient : recorded_->gradients) gradients.push_back(gradient.detach());
  set_ready_gradients(loss, recorded_->trained, std::move(gradients));
  return loss;
}

}  // namespace fulgur
