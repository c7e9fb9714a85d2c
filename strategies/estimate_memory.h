#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "fulgur/core/model_memory.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/strategies/strategy_choice.h"

namespace fulgur {

// The memory that each rank would keep for a model from step to step, computed without allocating it:
//   estimate_memory(*module, "ddp_sharded", 8, "bf16-mixed", optim::AdamW(module->parameters(), {.lr = 1e-3}))
// world_size is the number of devices, on num_nodes machines together; for dp the result is that of the first device.
// `precision` is named as in TrainerOptions. With accumulate_grad_batches > 1 the result includes gradients that wait
// for the end of their accumulation window. It does not include activations. Throws UsageError for an unknown strategy
// or precision, and if the strategy does not implement model_memory().
ModelMemory estimate_memory(const Module& module, const StrategyChoice& strategy, int64_t world_size,
                            std::string_view precision, const Optimizers& optimizers,
                            c10::DeviceType device_type = c10::kCPU, int64_t accumulate_grad_batches = 1,
                            int64_t num_nodes = 1);

// A table for people to read: all registered strategies that implement model_memory().
std::string estimate_memory_table(const Module& module, int64_t world_size, std::string_view precision,
                                  const Optimizers& optimizers, c10::DeviceType device_type = c10::kCPU,
                                  int64_t accumulate_grad_batches = 1);

}  // namespace fulgur
