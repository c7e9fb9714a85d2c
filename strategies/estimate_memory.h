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
// Activations come on top; with accumulate_grad_batches > 1 ddp on several devices also keeps the gradients of a
// window, in fp32 if parameters have 16 bits, until its last micro-batch. Throws UsageError for an unknown strategy or
// precision, and if the strategy cannot tell.
ModelMemory estimate_memory(const Module& module, const StrategyChoice& strategy, int64_t world_size,
                            std::string_view precision, const Optimizers& optimizers,
                            c10::DeviceType device_type = c10::kCPU);

// A table of all registered strategies, for reading.
std::string estimate_memory_table(const Module& module, int64_t world_size, std::string_view precision,
                                  const Optimizers& optimizers, c10::DeviceType device_type = c10::kCPU);

}  // namespace fulgur
