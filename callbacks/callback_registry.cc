#include "fulgur/callbacks/callback_registry.h"

#include "fulgur/callbacks/backbone_finetuning.h"
#include "fulgur/callbacks/csv_logger.h"
#include "fulgur/callbacks/device_stats_monitor.h"
#include "fulgur/callbacks/divergence_guard.h"
#include "fulgur/callbacks/early_stopping.h"
#include "fulgur/callbacks/evaluation_table.h"
#include "fulgur/callbacks/gradient_norm_monitor.h"
#include "fulgur/callbacks/json_lines_logger.h"
#include "fulgur/callbacks/kineto_profiler.h"
#include "fulgur/callbacks/learning_rate_monitor.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/model_summary.h"
#include "fulgur/callbacks/on_exception_checkpoint.h"
#include "fulgur/callbacks/prediction_writer.h"
#include "fulgur/callbacks/progress_bar.h"
#include "fulgur/callbacks/tensorboard_logger.h"
#include "fulgur/callbacks/throughput_monitor.h"
#include "fulgur/callbacks/weight_averaging.h"

namespace fulgur {

OptionsRegistry<std::shared_ptr<Callback>>& callback_registry() {
  static OptionsRegistry<std::shared_ptr<Callback>> registry = [] {
    OptionsRegistry<std::shared_ptr<Callback>> built_in("callback");
    built_in.add<BackboneFinetuning>();
    built_in.add<CSVLogger>();
    built_in.add<DeviceStatsMonitor>();
    built_in.add<DivergenceGuard>();
    built_in.add<EarlyStopping>();
    built_in.add<EvaluationTable>();
    built_in.add<GradientNormMonitor>();
    built_in.add<JsonLinesLogger>();
    built_in.add<KinetoProfiler>();
    built_in.add<LearningRateMonitor>();
    built_in.add<ModelCheckpoint>();
    built_in.add<ModelSummary>();
    built_in.add<OnExceptionCheckpoint>();
    built_in.add<PredictionWriter>();
    built_in.add<ProgressBar>();
    built_in.add<TensorBoardLogger>();
    built_in.add<ThroughputMonitor>();
    built_in.add<WeightAveraging>();
    return built_in;
  }();
  return registry;
}

}  // namespace fulgur
