#include "fulgur/optim/torch_optimizer.h"

#include <ATen/ops/empty_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/optim/gradient_divisor.h"

namespace fulgur::optim {
namespace {

// The classes of torch::optim. visit() passes the state that the class keeps of a parameter to `fields`, a Saver or a
// Loader, under torch's names, and says which tensors must exist.
template <class TorchClass, class TorchOptions, class TorchParamState>
struct AdamKind {
  using Class = TorchClass;
  using Options = TorchOptions;
  using ParamState = TorchParamState;
  template <class Fields>
  static void visit(const Options& options, ParamState& state, Fields& fields) {
    fields.count("step", state.step());
    fields.like_parameter("exp_avg", state.exp_avg(), true);
    fields.like_parameter("exp_avg_sq", state.exp_avg_sq(), true);
    fields.like_parameter("max_exp_avg_sq", state.max_exp_avg_sq(), options.amsgrad());
  }
};

struct Adam : AdamKind<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState> {
  static constexpr const char* kName = "torch::optim::Adam";
};

struct AdamW : AdamKind<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState> {
  static constexpr const char* kName = "torch::optim::AdamW";
};

struct SGD {
  static constexpr const char* kName = "torch::optim::SGD";
  using Class = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using ParamState = torch::optim::SGDParamState;
  template <class Fields>
  static void visit(const Options&, ParamState& state, Fields& fields) {
    fields.like_gradient("momentum_buffer", state.momentum_buffer(), true);
  }
};

struct RMSprop {
  static constexpr const char* kName = "torch::optim::RMSprop";
  using Class = torch::optim::RMSprop;
  using Options = torch::optim::RMSpropOptions;
  using ParamState = torch::optim::RMSpropParamState;
  template <class Fields>
  static void visit(const Options& options, ParamState& state, Fields& fields) {
    fields.count("step", state.step());
    fields.like_parameter("square_avg", state.square_avg(), true);
    fields.like_parameter("momentum_buffer", state.momentum_buffer(), options.momentum() > 0);
    fields.like_parameter("grad_avg", state.grad_avg(), options.centered());
  }
};

struct Adagrad {
  static constexpr const char* kName = "torch::optim::Adagrad";
  using Class = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using ParamState = torch::optim::AdagradParamState;
  template <class Fields>
  static void visit(const Options&, ParamState& state, Fields& fields) {
    fields.count("step", state.step());
    fields.like_parameter("sum", state.sum(), true);
  }
};

// Keeps one state, under the first parameter, for all parameters as one row. Leaves out `al`, which every iteration
// computes before it is read.
struct LBFGS {
  static constexpr const char* kName = "torch::optim::LBFGS";
  using Class = torch::optim::LBFGS;
  using Options = torch::optim::LBFGSOptions;
  using ParamState = torch::optim::LBFGSParamState;
  template <class Fields>
  static void visit(const Options& options, ParamState& state, Fields& fields) {
    fields.count("func_evals", state.func_evals());
    fields.count("n_iter", state.n_iter());
    fields.real("t", state.t());
    fields.real("prev_loss", state.prev_loss());
    const bool has_moved = state.n_iter() > 0;
    fields.row("d", state.d(), has_moved);
    fields.scalar("H_diag", state.H_diag(), has_moved);
    fields.row("prev_flat_grad", state.prev_flat_grad(), has_moved);
    auto saved_size = static_cast<int64_t>(state.ro().size());
    fields.count("history_size", saved_size);
    const int64_t kept_size =
        std::min(saved_size, options.history_size());  // the newest; torch never drops more than one
    for (auto* history : {&state.old_dirs(), &state.old_stps(), &state.ro()}) {
      history->resize(static_cast<size_t>(kept_size));
    }
    for (int64_t i = 0; i < kept_size; ++i) {
      const int64_t saved_i = saved_size - kept_size + i;
      fields.row(fmt::format("old_dirs/{}", saved_i), state.old_dirs()[static_cast<size_t>(i)], true);
      fields.row(fmt::format("old_stps/{}", saved_i), state.old_stps()[static_cast<size_t>(i)], true);
      fields.scalar(fmt::format("ro/{}", saved_i), state.ro()[static_cast<size_t>(i)], true);
    }
  }
};

// Calls `use` with the kind of the optimizer; returns false for an unknown class.
template <class Use>
bool with_kind(const torch::optim::Optimizer& optimizer, const Use& use) {
  const auto is_done = [&](auto kind) {
    if (dynamic_cast<const typename decltype(kind)::Class*>(&optimizer) == nullptr) return false;
    use(kind);
    return true;
  };
  return is_done(Adam{}) || is_done(AdamW{}) || is_done(SGD{}) || is_done(RMSprop{}) || is_done(Adagrad{}) ||
         is_done(LBFGS{});
}

class Saver {
 public:
  explicit Saver(State& state) : state_(state) {}

  void count(std::string_view name, int64_t value) { state_.set(name, value); }
  void real(std::string_view name, double value) { state_.set(name, value); }
  void like_parameter(std::string_view name, const at::Tensor& tensor, bool) { set(name, tensor); }
  void like_gradient(std::string_view name, const at::Tensor& tensor, bool) { set(name, tensor); }
  void row(std::string_view name, const at::Tensor& tensor, bool) { set(name, tensor); }
  void scalar(std::string_view name, const at::Tensor& tensor, bool) { set(name, tensor); }

 private:
  void set(std::string_view name, const at::Tensor& tensor) {
    if (tensor.defined()) state_.set(name, tensor);
  }

  State& state_;
};

// Copies a parameter's state from a checkpoint, and checks all of it, because the file may come from anywhere.
class Loader {
 public:
  // `num_elements` is the total of all parameters; `owner` begins the error messages.
  Loader(const State& saved, const at::Tensor& param, int64_t num_elements, std::string owner)
      : saved_(saved), param_(param), num_elements_(num_elements), owner_(std::move(owner)) {}

  void count(std::string_view name, int64_t& value) {
    value = get<int64_t>(name);
    if (value < 0) fail(name, fmt::format("is {}", value));
  }

  void real(std::string_view name, double& value) { value = get<double>(name); }

  void like_parameter(std::string_view name, at::Tensor& tensor, bool is_needed) {
    if (is_absent(name, is_needed)) return;
    tensor = at::empty_like(param_).copy_(floating(name, param_.sizes()));
  }

  // The gradient of a 16-bit parameter, of which torch makes this tensor, is fp32 where it was summed or clipped.
  void like_gradient(std::string_view name, at::Tensor& tensor, bool is_needed) {
    if (is_absent(name, is_needed)) return;
    const at::Tensor& saved = floating(name, param_.sizes());
    const bool is_wide = saved.scalar_type() == widened(param_.scalar_type());
    tensor = at::empty_like(param_, param_.options().dtype(is_wide ? saved.scalar_type() : param_.scalar_type()))
                 .copy_(saved);
  }

  void row(std::string_view name, at::Tensor& tensor, bool is_needed) {
    if (is_absent(name, is_needed)) return;
    tensor = floating(name, {num_elements_}).to(gradient_options(), /*non_blocking=*/false, /*copy=*/true);
  }

  // The saved tensor has no dimension or one. The first H_diag of LBFGS is an integer.
  void scalar(std::string_view name, at::Tensor& tensor, bool is_needed) {
    if (is_absent(name, is_needed)) return;
    const at::Tensor& saved = get<at::Tensor>(name);
    const bool is_integer = saved.scalar_type() == at::kLong && saved.numel() == 1;
    const at::Tensor& checked = is_integer ? saved : saved.dim() == 1 ? floating(name, {1}) : floating(name, {});
    const at::TensorOptions options = is_integer ? gradient_options().dtype(at::kLong) : gradient_options();
    tensor = checked.to(options, /*non_blocking=*/false, /*copy=*/true);
  }

 private:
  // For LBFGS, which always gets widened gradients.
  at::TensorOptions gradient_options() const { return param_.options().dtype(widened(param_.scalar_type())); }

  template <class T>
  const T& get(std::string_view name) const {
    if (const T* value = saved_.find<T>(name)) return *value;
    fail(name, "is missing");
  }

  bool is_absent(std::string_view name, bool is_needed) const {
    return !is_needed && saved_.find<at::Tensor>(name) == nullptr;
  }

  const at::Tensor& floating(std::string_view name, c10::IntArrayRef shape) const {
    const at::Tensor& saved = get<at::Tensor>(name);
    if (saved.sizes() != shape) {
      fail(name,
           fmt::format("has shape [{}], but must have [{}]", fmt::join(saved.sizes(), ", "), fmt::join(shape, ", ")));
    }
    if (!at::isFloatingType(saved.scalar_type())) {
      fail(name, fmt::format("has dtype {}, but must be floating", c10::toString(saved.scalar_type())));
    }
    return saved;
  }

  [[noreturn]] void fail(std::string_view name, std::string_view reason) const {
    throw CheckpointError(fmt::format("{}: '{}' {}", owner_, name, reason));
  }

  const State& saved_;
  const at::Tensor& param_;
  int64_t num_elements_;
  std::string owner_;
};

template <class Kind>
typename Kind::Options& options_of(torch::optim::OptimizerParamGroup& group) {
  return static_cast<typename Kind::Options&>(group.options());
}

// Returns the groups of the optimizer. Also leaves out the second mention of a tied parameter, which torch would
// update twice.
std::vector<ParamGroup> groups_of(torch::optim::Optimizer& optimizer) {
  std::vector<ParamGroup> groups;
  const bool is_known = with_kind(optimizer, [&]<class Kind>(Kind) {
    for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      std::unordered_set<const c10::TensorImpl*> seen;
      std::erase_if(group.params(),
                    [&](const at::Tensor& param) { return !seen.insert(param.unsafeGetTensorImpl()).second; });
      groups.push_back({.params = group.params(), .lr = group.options().get_lr()});
      if constexpr (requires(typename Kind::Options options) { options.weight_decay(); }) {
        groups.back().weight_decay = options_of<Kind>(group).weight_decay();
      }
    }
  });
  if (is_known) return groups;
  throw UsageError(
      "TorchOptimizer takes Adam, AdamW, SGD, RMSprop, Adagrad and LBFGS of torch::optim, and classes derived "
      "from them: a checkpoint can hold the state of no other; derive yours from fulgur::Optimizer");
}

// Calls `use(kind, group, key, param)` for every parameter, where the key is "<group>/<index>".
template <class Use>
void for_each_param(torch::optim::Optimizer& optimizer, const Use& use) {
  with_kind(optimizer, [&](auto kind) {
    auto& groups = optimizer.param_groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].params().size(); ++i) {
        use(kind, groups[g], fmt::format("{}/{}", g, i), groups[g].params()[i]);
      }
    }
  });
}

std::string kind_name(const torch::optim::Optimizer& optimizer) {
  std::string name;
  with_kind(optimizer, [&](auto kind) { name = kind.kName; });
  return name;
}

// "TorchOptimizer(Adam)"
std::string name_of(const torch::optim::Optimizer& optimizer) {
  const std::string kind = kind_name(optimizer);
  return fmt::format("TorchOptimizer({})", std::string_view(kind).substr(kind.rfind(':') + 1));
}

// Older checkpoints have the archive that torch::optim writes itself, which is refused.
void check_origin(const torch::optim::Optimizer& optimizer, const State& state) {
  if (state.values().contains("torch")) {
    throw CheckpointError(
        "the checkpoint has the state of TorchOptimizer as an archive of TorchScript, which can run code when it is "
        "read, so this version does not read it; load the weights only");
  }
  const std::string name = kind_name(optimizer);
  const auto& saved = state.get<std::string>("class");
  if (saved == name) return;
  throw CheckpointError(
      fmt::format("the checkpoint has the state of {}, but configure_optimizers returns {} now; return the same, or "
                  "load the weights only",
                  saved, name));
}

}  // namespace

TorchOptimizer::TorchOptimizer(std::unique_ptr<torch::optim::Optimizer> optimizer)
    : Optimizer(name_of(*optimizer), groups_of(*optimizer), /*lr=*/0.0, /*weight_decay=*/0.0),
      optimizer_(std::move(optimizer)),
      needs_closure_(dynamic_cast<torch::optim::LBFGS*>(optimizer_.get()) != nullptr) {}

void TorchOptimizer::add_param_group(ParamGroup) {
  throw UsageError(fmt::format(
      "{} cannot be given a further group; make it with all groups, those to be trained later too", name()));
}

void TorchOptimizer::step(const GradientTransform& transform) {
  if (transform.factor.defined() || transform.clip_value) {
    const std::vector<at::Tensor> all = params();
    widen_gradients(all);  // without their loss scale, small ones are zero in 16 bits
    transform_gradients(transform, all);
  }
  take_settings_of_groups();
  optimizer_->step();
}

void TorchOptimizer::step(const Closure& closure) {
  take_settings_of_groups();
  optimizer_->step([&] {
    at::Tensor loss = closure();
    widen_gradients(params());  // some are already, after a sum over ranks, and LBFGS computes with all in one type
    return loss;
  });
}

State TorchOptimizer::state() const {
  State state;
  state.set("class", kind_name(*optimizer_));
  for_each_param(*optimizer_, [&]<class Kind>(Kind, auto& group, const std::string& key, const at::Tensor& param) {
    const auto own = optimizer_->state().find(param.unsafeGetTensorImpl());
    if (own == optimizer_->state().end()) return;
    State saved;
    Saver saver(saved);
    Kind::visit(options_of<Kind>(group), static_cast<typename Kind::ParamState&>(*own->second), saver);
    state.set_child(key, saved);
  });
  return state;
}

void TorchOptimizer::load_state(const State& state) {
  check_origin(*optimizer_, state);
  int64_t num_elements = 0;
  for (const at::Tensor& param : params()) num_elements += param.numel();
  for_each_param(*optimizer_, [&]<class Kind>(Kind, auto& group, const std::string& key, const at::Tensor& param) {
    auto& own = optimizer_->state();
    const State saved = state.child(key);
    if (saved.empty() && !std::is_same_v<Kind, Adagrad>) {  // only Adagrad has a state before the first gradient
      own.erase(param.unsafeGetTensorImpl());
      return;
    }
    auto loaded = std::make_unique<typename Kind::ParamState>();
    Loader loader(saved, param, num_elements, fmt::format("the state that {} has of parameter {}", Kind::kName, key));
    Kind::visit(options_of<Kind>(group), *loaded, loader);
    own[param.unsafeGetTensorImpl()] = std::move(loaded);
  });
}

void TorchOptimizer::take_settings_of_groups() {
  with_kind(*optimizer_, [&]<class Kind>(Kind) {
    for (size_t i = 0; i < groups().size(); ++i) {
      auto& options = options_of<Kind>(optimizer_->param_groups()[i]);
      options.lr(groups()[i].lr);
      if constexpr (requires { options.weight_decay(); }) options.weight_decay(groups()[i].weight_decay);
    }
  });
}

}  // namespace fulgur::optim
