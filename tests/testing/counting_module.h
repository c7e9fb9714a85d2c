#pragma once

#include <cstdint>
#include <vector>

#include "tests/testing/tiny.h"

namespace fulgur::testing {

// Counts the batches that fit, validate, test and predict run. The sanity check is counted by itself.
struct CountingModule : TinyModule {
  int64_t trained = 0, validated = 0, tested = 0, predicted = 0, sanity_checked = 0;  // batches
  std::vector<int64_t> validations;  // number of training batches before each validation

  at::Tensor training_step(const Batch& batch, int64_t i) override {
    ++trained;
    return TinyModule::training_step(batch, i);
  }
  void on_validation_start() override {
    if (!run_state().sanity_checking) validations.push_back(trained);
  }
  void validation_step(const Batch& batch, int64_t i) override {
    ++(run_state().sanity_checking ? sanity_checked : validated);
    TinyModule::validation_step(batch, i);
  }
  void test_step(const Batch& batch, int64_t i) override {
    ++tested;
    TinyModule::test_step(batch, i);
  }
  Batch predict_step(const Batch& batch, int64_t i) override {
    ++predicted;
    return TinyModule::predict_step(batch, i);
  }
};

}  // namespace fulgur::testing
