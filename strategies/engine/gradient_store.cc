#include "fulgur/strategies/engine/gradient_store.h"

#include <cstdint>
#include <vector>

namespace fulgur {

AccumulationWindow finish_window(GradientReducer& reducer, const AccumulationWindow& mine) {
  std::vector<double> message{static_cast<double>(mine.micro_batches), mine.wants_stop ? 1.0 : 0.0,
                              mine.ends_epoch ? 1.0 : 0.0, mine.loss_sum, mine.skips_epoch ? 1.0 : 0.0};
  reducer.finish(message);
  return {.micro_batches = static_cast<int64_t>(message[0]),
          .loss_sum = message[3],
          .wants_stop = message[1] > 0,
          .ends_epoch = message[2] > 0,
          .skips_epoch = message[4] > 0};
}

}  // namespace fulgur
