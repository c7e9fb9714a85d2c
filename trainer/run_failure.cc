#include <c10/util/ScopeExit.h>

#include <stdexcept>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/base/first_error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/working_directory.h"
#include "fulgur/loops/hooks.h"
#include "fulgur/trainer/memory_advice.h"
#include "fulgur/trainer/post_mortem.h"
#include "fulgur/trainer/run.h"

// What a run does when it has failed.
namespace fulgur {
namespace {

// Whether the error message alone explains the failure: a mistake in a setting or in the program, or a signal.
bool is_explained(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const UsageError&) {
    return true;
  } catch (const SetupError&) {
    return true;
  } catch (const InterruptedError&) {
    return true;
  } catch (...) {
    return false;
  }
}

bool is_of_ranks(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const DistributedError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

// Runs once per run; later calls return at once. The post-mortem and on_exception see the state that the exception was
// thrown in, and not what unwinding has restored: the stage and the batch of a validation.
void Run::handle_failure(const std::exception_ptr& failure) {
  if (checkpoints_.has_failed()) return;
  const RunState after = results_.state;
  const auto is_over = c10::make_scope_exit([&] { results_.state = after; });
  if (context_.failed_state) results_.state = *context_.failed_state;
  checkpoints_.abort(text_of(failure));
  world_.abort(text_of(failure));
  if (request_.entry_point == EntryPoint::fit && !request_.is_trial) give_memory_advice(failure);
  if (deserves_post_mortem(failure)) {
    FirstError error;
    error.run([&] { leave_post_mortem(failure); });
    error.warn("no post-mortem is written");
  }
  call_on_exception(failure);
}

void Run::give_memory_advice(const std::exception_ptr& failure) {
  const auto num_devices = static_cast<int64_t>(resources_.devices.size()) * resources_.options.num_nodes;
  FirstError error;
  error.run([&] {
    const std::string advice = memory_advice(failure, module(), resources_.strategy->optimizers(), resources_.options,
                                             num_devices, context_.device_type, context_.accumulate_grad_batches);
    if (!advice.empty()) log_warning("{}", advice);
  });
  error.warn("what other strategies need is not known");
}

// Before the first batch the message says all that is known, such as which file is missing. A rank that does not know
// the run's folder yet has nowhere to write.
bool Run::deserves_post_mortem(const std::exception_ptr& failure) const {
  const TrainerOptions& options = resources_.options;
  const bool has_folder = world_.rank() == 0 || !results_.run_dir.empty();
  const RunState& state = results_.state;
  const bool has_stepped = state.global_step > checkpoints_.first_step();
  const bool has_begun = !context_.failed_batch.empty() || state.batch_idx > 0 || has_stepped;
  return *options.enable_post_mortem && !request_.is_trial && options.fast_dev_run == 0 && has_folder &&
         (has_begun || is_of_ranks(failure)) && !is_explained(failure);
}

void Run::leave_post_mortem(const std::exception_ptr& failure) {
  PostMortem found{.error = text_of(failure),
                   .state = results_.state,
                   .rank = world_.rank(),
                   .world_size = world_.world_size(),
                   .strategy_and_devices = device_summary(),
                   .places = world_.world().places(),
                   .batch = std::move(context_.failed_batch),
                   .can_read_devices = context_.device_type == c10::DeviceType::CPU || !is_of_ranks(failure),
                   .metrics = results_.metrics.logged_metrics(),
                   .options = resources_.options};
  FirstError unread;  // a loss may be what failed on the device, so that reading it fails again
  unread.run([&] {
    if (!found.can_read_devices) return;
    Metrics newest = results_.metrics.callback_metrics();
    newest.merge(found.metrics);
    found.metrics = std::move(newest);
  });
  if (post_mortem_name_.empty()) post_mortem_name_ = free_post_mortem_name(run_dir());
  const std::filesystem::path folder = run_dir() / post_mortem_name_;
  write_post_mortem(found, run_dir(), folder);
  // The output of the other local ranks may never be shown.
  if (world_.local_rank() == 0)
    log_warning("an exception ended the run; what was known of it is in {}", short_path(folder).string());
}

void Run::call_on_exception(const std::exception_ptr& failure) {
  FirstError first;
  const auto call = [&](const auto& hook) { first.run([&] { context_.hooks.within(hooks::on_exception, hook); }); };
  const auto tell = [&](const std::exception& error) {
    for (const auto& callback : callbacks_) call([&] { callback->on_exception(*this, error); });
    call([&] { request_.data.on_exception(error); });
  };
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    tell(error);
  } catch (...) {
    tell(std::runtime_error(text_of(failure)));
  }
  first.warn("on_exception failed too");
}

}  // namespace fulgur
