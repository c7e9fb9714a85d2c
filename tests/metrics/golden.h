#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fulgur/core/metric.h"

namespace fulgur::testing {

// The inputs and torchmetrics' results in metrics_golden.json, which tools/golden/metrics.py writes.
class Golden {
 public:
  struct Case {
    std::string description;
    nlohmann::json options;
    std::vector<std::string> inputs;  // names, in the order of update()'s arguments
    at::Tensor value;                 // float64, flat
  };

  Golden() { std::ifstream("tests/metrics/metrics_golden.json") >> json_; }

  std::vector<Case> cases(const std::string& metric) const {
    std::vector<Case> cases;
    for (const auto& entry : json_.at("values")) {
      if (entry.at("metric") != metric) continue;
      cases.push_back({entry.dump(), entry.at("options"), entry.at("inputs"),
                       torch::tensor(entry.at("value").get<std::vector<double>>(), torch::kDouble)});
    }
    EXPECT_FALSE(cases.empty()) << metric;
    return cases;
  }

  // Returns int64, or float64 if there is a decimal point.
  at::Tensor tensor(const std::string& input) const {
    const nlohmann::json& value = json_.at("inputs").at(input);
    std::vector<int64_t> shape;
    const nlohmann::json* inner = &value;
    for (; inner->is_array(); inner = &inner->front()) shape.push_back(static_cast<int64_t>(inner->size()));
    std::vector<double> flat;
    append(value, flat);
    return torch::tensor(flat, torch::kDouble).view(shape).to(inner->is_number_integer() ? at::kLong : at::kDouble);
  }

  std::vector<std::string> texts(const std::string& input) const { return json_.at("inputs").at(input); }
  std::vector<int64_t> batch_sizes() const { return json_.at("batch_sizes"); }

 private:
  static void append(const nlohmann::json& value, std::vector<double>& flat) {
    if (value.is_number()) return flat.push_back(value.get<double>());
    for (const auto& item : value) append(item, flat);
  }

  nlohmann::json json_;
};

inline void expect_near(const at::Tensor& value, const at::Tensor& expected) {
  EXPECT_TRUE(torch::allclose(value.flatten().to(at::kDouble), expected, 1e-6, 1e-6)) << value << "\n" << expected;
}

// Expects torchmetrics' value from batches of unequal sizes, also after reset(), on two ranks, and with repeated
// samples that are not valid. `update(metric, batch, valid)` passes the tensors of a batch on.
template <class MetricType, class Update>
void expect_golden(const Golden& golden, const Golden::Case& expected, const MetricType& empty, const Update& update) {
  SCOPED_TRACE(expected.description);
  MetricType whole = empty, again = empty, padded = empty;
  std::vector<MetricType> ranks(2, empty);
  int64_t begin = 0, batch_idx = 0;
  for (const int64_t size : golden.batch_sizes()) {
    std::vector<at::Tensor> batch, longer;
    for (const std::string& input : expected.inputs) {
      batch.push_back(golden.tensor(input).narrow(0, begin, size));
      longer.push_back(torch::cat({batch.back(), batch.back().narrow(0, 0, 1), batch.back()}));
    }
    update(whole, batch, metrics::Valid());
    update(ranks[static_cast<size_t>(batch_idx++ % 2)], batch, metrics::Valid());
    update(padded, longer, torch::arange(2 * size + 1) < size);
    if (begin == 0) {
      update(again, batch, metrics::Valid());
      again.reset();
    }
    update(again, batch, metrics::Valid());
    begin += size;
  }
  expect_near(whole.compute(), expected.value);
  expect_near(again.compute(), expected.value);
  expect_near(padded.compute(), expected.value);
  const at::Tensor own = ranks[0].compute();
  const std::vector<MetricStates> states{ranks[0].states(), ranks[1].states()};
  expect_near(ranks[0].compute(combined(states)), expected.value);
  EXPECT_TRUE(ranks[0].compute().equal(own));
}

}  // namespace fulgur::testing
