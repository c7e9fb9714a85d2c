#include "fulgur/optim/optimizer_registry.h"

#include "fulgur/optim/adagrad.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/lamb.h"
#include "fulgur/optim/lars.h"
#include "fulgur/optim/lion.h"
#include "fulgur/optim/rmsprop.h"
#include "fulgur/optim/sgd.h"

namespace fulgur::optim {

OptimizerRegistry& optimizer_registry() {
  static OptimizerRegistry registry = [] {
    OptimizerRegistry built_in("optimizer");
    built_in.add<AdamW>();
    built_in.add<Adam>();
    built_in.add<SGD>();
    built_in.add<Adagrad>();
    built_in.add<LAMB>();
    built_in.add<LARS>();
    built_in.add<Lion>();
    built_in.add<RMSprop>();
    return built_in;
  }();
  return registry;
}

}  // namespace fulgur::optim
