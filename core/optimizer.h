#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace fulgur {

// Parameters that share hyper-parameters. What is unset is the optimizer's own setting.
struct ParamGroup {
  std::vector<at::Tensor> params{};
  std::optional<double> lr{};
  std::optional<double> weight_decay{};
};

std::vector<ParamGroup> one_group(std::vector<at::Tensor> params);

// Updates parameters from their gradients. optim/ has the ones to use.
// Ownership: holds handles to the parameters, owns its state. Threading: one thread at a time.
class Optimizer {
 public:
  struct Group {
    std::vector<at::Tensor> params;
    double lr;  // the next step uses it; learning-rate schedules write it
    double weight_decay;
  };

  // `name` begins every message. A tied parameter, which torch lists twice, counts once. Throws UsageError if there is
  // no parameter, one is in two groups or undefined, or a group's lr or weight_decay is negative.
  Optimizer(std::string_view name, std::vector<ParamGroup> groups, double lr, double weight_decay);
  virtual ~Optimizer() = default;

  Optimizer(Optimizer&&) = default;
  Optimizer& operator=(Optimizer&&) = default;

  // One update from the gradients as they are. A parameter without a gradient is left alone: no decay, no step.
  virtual void step() = 0;

  // Drops every gradient, so that the next backward allocates it anew and an unused parameter has none.
  void zero_grad();

  std::string_view name() const { return name_; }
  std::vector<Group>& groups() { return groups_; }
  const std::vector<Group>& groups() const { return groups_; }

 private:
  std::string_view name_;
  std::vector<Group> groups_;
};

// What configure_optimizers returns: `return optim::AdamW(parameters(), {.lr = 1e-3});`
class Optimizers {
 public:
  Optimizers() = default;
  template <std::derived_from<Optimizer> T>
  Optimizers(T optimizer) {  // NOLINT: implicit, so that an optimizer can be returned as it stands
    list_.push_back(std::make_unique<T>(std::move(optimizer)));
  }

  bool empty() const { return list_.empty(); }
  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }

 private:
  std::vector<std::unique_ptr<Optimizer>> list_;
};

}  // namespace fulgur
