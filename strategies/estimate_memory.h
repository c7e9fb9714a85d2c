#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "core/model_memory.h"
#include "core/module.h"
#include "core/optimizer.h"
#include "strategies/strategy_choice.h"

namespace fulgur {

// What each rank would keep of a model from step to step, before anything of it is made:
//   estimate_memory(*module, "ddp_sharded", 8, "bf16-mixed", optim::AdamW(module->parameters(), {.lr = 1e-3}))
// world_size is the number of devices; of dp the answer is about the first. `precision` as in TrainerOptions.
// With accumulate_grad_batches > 1 the gradients that wait for the end of their window are counted. Activations come on
// top. Throws UsageError for an unknown strategy or precision, and if the strategy cannot tell.
ModelMemory estimate_memory(const Module& module, const StrategyChoice& strategy, int64_t world_size,
                            std::string_view precision, const Optimizers& optimizers,
                            c10::DeviceType device_type = c10::kCPU, int64_t accumulate_grad_batches = 1);

// A table of all registered strategies, for reading.
std::string estimate_memory_table(const Module& module, int64_t world_size, std::string_view precision,
                                  const Optimizers& optimizers, c10::DeviceType device_type = c10::kCPU,
                                  int64_t accumulate_grad_batches = 1);

}  // namespace fulgur
