#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "fulgur/optim/update_rules.h"

namespace fulgur::testing {

struct UpdateRule {
  std::string name;
  optim::Rule rule;
  size_t num_states;  // states of an element with these settings
};

// Every update rule, with each setting that takes another way through its arithmetic.
inline std::vector<UpdateRule> update_rules() {
  using namespace optim;
  return {
      {"Adam", AdamRule{.step_size = 0.01, .inv_root_bias_correction2 = 3.0, .l2 = 0.1}, 2},
      {"AdamW", AdamRule{.step_size = 0.01, .inv_root_bias_correction2 = 3.0, .decay = 1e-3}, 2},
      {"SGD", SGDRule{.lr = 0.1, .l2 = 0.1}, 0},
      {"Momentum", SGDRule{.lr = 0.1, .momentum = 0.9}, 1},
      {"Nesterov", SGDRule{.lr = 0.1, .momentum = 0.9, .nesterov = true}, 1},
      {"Adagrad", AdagradRule{.lr = 0.1, .l2 = 0.1}, 1},
      {"RMSprop", RMSpropRule{.lr = 0.01, .l2 = 0.1}, 1},
      {"RMSpropWithMomentum", RMSpropRule{.lr = 0.01, .momentum = 0.9}, 2},
      {"CenteredRMSprop", RMSpropRule{.lr = 0.01, .momentum = 0.9}, 3},
      {"Lion", LionRule{.lr = 0.01, .decay = 1e-3}, 1},
  };
}

}  // namespace fulgur::testing
