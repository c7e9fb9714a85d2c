// The one header that a user of fulgur includes. Everything is in namespace fulgur.
#pragma once

#if __cplusplus < 202002L
#error "fulgur needs C++20: compile with -std=c++20 (Bazel: build --cxxopt=-std=c++20)"
#endif

#include <torch/nn.h>

#include "callbacks/csv_logger.h"
#include "callbacks/evaluation_table.h"
#include "callbacks/gradient_accumulation_scheduler.h"
#include "callbacks/model_checkpoint.h"
#include "callbacks/model_summary.h"
#include "callbacks/progress_bar.h"
#include "cli/command_line.h"
#include "core/activation_checkpoint.h"
#include "core/batch.h"
#include "core/callback.h"
#include "core/error.h"
#include "core/make_module.h"
#include "core/module.h"
#include "core/seed.h"
#include "data/data_loader.h"
#include "data/data_module.h"
#include "data/tensor_dataset.h"
#include "metrics/aggregation.h"
#include "metrics/auroc.h"
#include "metrics/classification.h"
#include "metrics/regression.h"
#include "metrics/text.h"
#include "optim/adam.h"
#include "optim/loss_scaler.h"
#include "optim/lr_schedulers.h"
#include "optim/sgd.h"
#include "optim/torch_optimizer.h"
#include "strategies/precision.h"
#include "strategies/presets.h"
#include "strategies/strategy.h"
#include "trainer/trainer.h"
