#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct BackboneFinetuningOptions {
  std::string group = "backbone";  // name of the optimizer's parameter group that is frozen at first
  int64_t unfreeze_at_epoch = 10;  // the first epoch, counted from 0, in which the group is trained
  double initial_lr_ratio = 0.1;   // learning rate of the group in that epoch, relative to its own
  double lr_growth = 2.0;          // factor from each epoch to the next, until the group has its own learning rate

  void describe(FieldVisitor& visit);
};

// Trains a head on a pretrained backbone. The backbone is frozen at first, and is then trained too, with a learning
// rate that grows from epoch to epoch. The backbone is a parameter group with a name:
//   return optim::AdamW({{.params = backbone->parameters(), .lr = 1e-5, .name = "backbone"},
//                        {.params = head->parameters()}}, {.lr = 1e-3});
// initial_lr_ratio and lr_growth lead up to the learning rate of the group, with its schedule. All parameters of the
// group are frozen when fit starts, and are unfrozen together; a fit that ends before leaves them frozen. The modes of
// layers do not change: a frozen backbone stays in training mode, so that Dropout acts and running statistics of
// BatchNorm move.
//   Throws UsageError for options out of range. fit throws UsageError if no group has the name, or if the group has all
// parameters.
// Checkpoints have the progress. Source: Lightning's BackboneFinetuning.
class BackboneFinetuning final : public Callback {
 public:
  using Options = BackboneFinetuningOptions;

  explicit BackboneFinetuning(Options options = {});
  static std::shared_ptr<BackboneFinetuning> make(Options options = {});

  std::string state_key() const override { return "group=" + options_.group; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_fit_start(TrainerControl& trainer) override;
  void on_train_epoch_start(TrainerControl& trainer) override;

  State state() const override;
  void load_state(const State& state) override;

 private:
  void check_groups(const Optimizers& optimizers) const;
  void set_trained(const Optimizers& optimizers, bool is_trained) const;

  Options options_;
  bool is_unfrozen_ = false;
  double lr_ratio_ = 1.0;  // factor that the group's learning rate has now
};

}  // namespace fulgur
