#include "fulgur/trainer/memory_advice.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "fulgur/strategies/estimate_memory.h"

namespace fulgur {
namespace {

bool is_out_of_memory(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

std::string memory_advice(const std::exception_ptr& failure, const Module& module, const Optimizers& optimizers,
                          const TrainerOptions& options, int64_t num_devices, c10::DeviceType device_type,
                          int64_t accumulate_grad_batches) {
  if (!is_out_of_memory(failure) || optimizers.empty()) return "";
  return fmt::format(
      "the device is out of memory. This table has the MB that each strategy keeps from step to step with {} device{} "
      "and precision {}; the part on the host takes no device memory, and activations are extra:\n{}A smaller batch "
      "with accumulate_grad_batches, checkpoint() around layers and precision bf16-true need less, too",
      num_devices, num_devices == 1 ? "" : "s", options.precision,
      estimate_memory_table(module, num_devices, options.precision, optimizers, device_type, accumulate_grad_batches));
}

}  // namespace fulgur
