#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct DivergenceGuardOptions {
  // What to do if the loss or gradient norm of an update is an outlier. warn: log it; skip: leave the update out;
  // rollback: skip it and go back to the last checkpoint, with smaller learning rates; stop: skip it and end fit.
  std::string action = "skip";
  double max_loss_z = 6.0;     // standard deviations of a loss above the mean; infinity: it only has to be finite
  double max_norm_z = 6.0;     // standard deviations of a gradient norm above the mean; infinity: as above
  int64_t window_size = 128;   // updates in the window; until it is full, only values that are not finite are outliers
  double lr_factor = 0.5;      // factor of all learning rates at each rollback; above 0, at most 1
  int64_t most_in_a_row = 20;  // consecutive updates that are left out before fit ends; with "rollback", updates with
                               // fewer than window_size others in between count as consecutive

  void describe(FieldVisitor& visit);
};

// Looks at the loss and the gradient norm of each step before the update, and finds values that lie far above the last
// ones: value > mean + z * deviation. A value that is not finite always counts as such. If the update is left out, a
// spike, from a bad batch or a learning rate at the edge, does not reach the weights and the moments. An update that is
// left out does not enter the window. With "warn" an update enters the window, and only the first of several found in a
// row is logged.
//   A "rollback" is TrainerControl::roll_back: the batches since the checkpoint count as left out, as in Chowdhery et
// al. 2022 (PaLM, arXiv:2204.02311, section 5.1). The windows start over, so that the next window_size updates are
// judged only by whether they are finite. If there is no checkpoint yet, only the learning rates change.
//   The values are those of all ranks, so that every rank decides the same. Checkpoints have the window. Costs the norm
// of the gradients, which clipping computes anyway, and on a GPU a wait for norm and loss. Throws UsageError for
// options out of range; fit throws SetupError in manual optimisation and for LBFGS.
// Source: llm.c (outlier_detector.h, skip_update_lossz and skip_update_gradz).
class DivergenceGuard final : public Callback {
 public:
  using Options = DivergenceGuardOptions;

  explicit DivergenceGuard(Options options = {});
  static std::shared_ptr<DivergenceGuard> make(Options options = {});

  bool judges_updates() const override { return true; }
  std::string state_key() const override { return changed_fields(options_); }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  bool accepts_update(TrainerControl& trainer, double loss, double grad_norm) override;

  State state() const override;
  void load_state(const State& state) override;

  int64_t num_found() const { return num_found_; }  // updates in this run and those that it resumed from

 private:
  // The last values. Once the window is full, the value at `next` is the oldest, and is replaced next.
  struct Window {
    std::vector<double> values{};
    size_t next = 0;

    // How far the value is above the mean, in deviations; nullopt if there are too few values. Infinity for a value
    // that is not finite.
    std::optional<double> z_of(double value, size_t size) const;
    void add(double value, size_t size);
    State state() const;
    void load_state(const State& state, int64_t size);  // throws CheckpointError if the state fits no such window
  };
  std::optional<std::string> reason_against(double loss, double grad_norm) const;
  std::string go_back(TrainerControl& trainer);  // returns what was done

  Options options_;
  Window losses_{}, norms_{};
  int64_t num_found_ = 0, in_a_row_ = 0;
};

}  // namespace fulgur
