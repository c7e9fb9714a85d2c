#include "fulgur/optim/lr_scheduler_registry.h"

#include "fulgur/optim/lr_schedulers.h"

namespace fulgur::optim {

LRSchedulerRegistry& lr_scheduler_registry() {
  static LRSchedulerRegistry registry = [] {
    LRSchedulerRegistry built_in("scheduler");
    built_in.add<ConstantLR>();
    built_in.add<CosineAnnealingLR>();
    built_in.add<CosineAnnealingWarmRestarts>();
    built_in.add<ExponentialLR>();
    built_in.add<LinearLR>();
    built_in.add<MultiStepLR>();
    built_in.add<OneCycleLR>();
    built_in.add<PolynomialLR>();
    built_in.add<ReduceLROnPlateau>();
    built_in.add<StepLR>();
    built_in.add<WarmupCosineLR>();
    built_in.add<WarmupLinearLR>();
    return built_in;
  }();
  return registry;
}

}  // namespace fulgur::optim
