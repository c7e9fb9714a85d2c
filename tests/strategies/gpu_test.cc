// Every strategy of one process on a GPU, beside the CPU. Without a GPU the error says so.
#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "optim/adam.h"
#include "strategies/presets.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::Net;

struct Training {
  StrategyChoice strategy = "single_device";
  std::string precision = "32";
  double clip = 0.0;
  int64_t accumulate = 1;
};

at::Tensor weights_after(const Training& training, const char* accelerator) {
  const auto module = make_module<Net<optim::AdamW>>();
  TrainerOptions options = testing::quiet({.strategy = training.strategy,
                                           .max_epochs = 3,
                                           .precision = training.precision,
                                           .accumulate_grad_batches = training.accumulate,
                                           .gradient_clip_val = training.clip});
  options.accelerator = accelerator;
  options.devices = 1;
  Trainer(options).fit(
      module, {.train = DataLoader::make(testing::tiny_dataset(48), {.batch_size = 4, .shuffle = true, .seed = 3})});
  return testing::flat_weights(*module);
}

TEST(Gpu, EveryStrategyTrainsAsOnTheCpu) {
  if (!at::hasCUDA()) {
    EXPECT_THAT(testing::message_of<UsageError>([] { weights_after({}, "cuda"); }), HasSubstr("write 'cpu'"));
    return;
  }
  const std::vector<StrategyChoice> strategies{"single_device",
                                               "ddp",
                                               "ddp_sharded",
                                               "zero_offload",
                                               ZeroOffload{.ratio = 0.5},
                                               "delayed_update",
                                               DelayedUpdate{.base = "single_device"},
                                               DelayedUpdate{.base = "ddp_sharded"}};
  for (const StrategyChoice& strategy : strategies) {
    for (const Training& training :
         {Training{strategy}, Training{strategy, "32", 0.05, 2}, Training{strategy, "bf16-true", 0.05, 2}}) {
      SCOPED_TRACE(c10::str(strategy.name(), " ", training.precision, " ", training.clip));
      const at::Tensor on_gpu = weights_after(training, "cuda"), on_cpu = weights_after(training, "cpu");
      const double tolerance = training.precision == "32" ? 1e-4 : 2e-2;
      EXPECT_LT(((on_gpu - on_cpu).norm() / on_cpu.norm()).item<double>(), tolerance);
    }
  }
}

}  // namespace
}  // namespace fulgur
