#include "trainer/default_callbacks.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "callbacks/csv_logger.h"
#include "callbacks/evaluation_table.h"
#include "callbacks/model_checkpoint.h"
#include "callbacks/model_summary.h"
#include "callbacks/progress_bar.h"
#include "core/error.h"

namespace fulgur {
namespace {

template <class Kind>
bool contains(const TrainerOptions& options) {
  return std::ranges::any_of(options.callbacks,
                             [](const auto& callback) { return dynamic_cast<const Kind*>(callback.get()) != nullptr; });
}

template <class Kind>
void add_default(TrainerOptions& options, bool enabled, std::string_view option, std::string_view kind) {
  const bool given = contains<Kind>(options);
  if (given && !enabled) {
    throw UsageError(fmt::format("Trainer: {} is false, but callbacks has a {}; leave one of them out", option, kind));
  }
  if (enabled && !given) options.callbacks.push_back(Kind::make());
}

}  // namespace

void add_default_callbacks(TrainerOptions& options) {
  if (std::ranges::count(options.callbacks, nullptr) > 0) throw UsageError("Trainer: one of the callbacks is null");
  add_default<ModelSummary>(options, options.enable_model_summary, "enable_model_summary", "ModelSummary");
  add_default<ProgressBar>(options, options.enable_progress_bar, "enable_progress_bar", "ProgressBar");
  add_default<EvaluationTable>(options, options.enable_progress_bar, "enable_progress_bar", "EvaluationTable");
  add_default<CSVLogger>(options, options.logger, "logger", "CSVLogger");
  add_default<ModelCheckpoint>(options, options.enable_checkpointing, "enable_checkpointing", "ModelCheckpoint");
  std::ranges::stable_partition(options.callbacks, [](const auto& callback) { return !callback->runs_last(); });
}

}  // namespace fulgur
