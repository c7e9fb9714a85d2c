#include "fulgur/metrics/auroc.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <limits>

#include "fulgur/base/error.h"
#include "tests/metrics/golden.h"
#include "tests/testing/errors.h"

namespace fulgur::metrics {
namespace {

using ::testing::HasSubstr;

AUROCOptions auroc_options(const nlohmann::json& json) {
  AUROCOptions options;
  if (json.value("task", "") == "binary") options.task = Task::binary;
  options.num_classes = json.value("num_classes", 0);
  const std::string average = json.value("average", "macro");
  options.average = average == "none" ? Average::none : average == "weighted" ? Average::weighted : Average::macro;
  if (json.contains("ignore_index")) options.ignore_index = json.at("ignore_index");
  return options;
}

TEST(AUROC, IsThatOfTorchmetrics) {
  const testing::Golden golden;
  for (const auto& expected : golden.cases("AUROC")) {
    testing::expect_golden(golden, expected, AUROC(auroc_options(expected.options)),
                           [](AUROC& metric, const std::vector<at::Tensor>& batch, const Valid& valid) {
                             metric.update(batch[0], batch[1], valid);
                           });
  }
}

TEST(AUROC, CountsPairs) {  // the definition, over all pairs of a positive and a negative sample
  torch::manual_seed(3);
  const auto scores = torch::randint(20, {200}).to(torch::kFloat) / 20, target = torch::randint(2, {200});
  const auto positive = scores.masked_select(target.eq(1)).unsqueeze(1), negative = scores.masked_select(target.eq(0));
  const auto won = positive.gt(negative).to(torch::kDouble) + 0.5 * positive.eq(negative).to(torch::kDouble);
  EXPECT_DOUBLE_EQ(auroc(scores, target, {.task = Task::binary}).item<double>(), won.mean().item<double>());
}

TEST(AUROC, OneKindOfSamplesOrNoneIsZero) {
  const auto scores = torch::tensor({0.1, 0.9});
  EXPECT_EQ(auroc(scores, torch::tensor({1, 1}), {.task = Task::binary}).item<double>(), 0.0);
  EXPECT_EQ(auroc(scores, torch::tensor({0, 0}), {.task = Task::binary}).item<double>(), 0.0);
  EXPECT_EQ(AUROC({.num_classes = 3}).compute().item<double>(), 0.0);
}

TEST(AUROC, DoesNotDependOnHowSamplesAreBatched) {  // the first batch of logits alone could be probabilities
  const auto logits = torch::tensor({{0.9, 0.8}, {0.1, 0.7}, {-3.0, 4.0}, {2.0, 1.5}}),
             target = torch::tensor({0, 1, 1, 0});
  AUROC metric({.num_classes = 2, .average = Average::none});
  for (int i = 0; i < 4; ++i) metric.update(logits.narrow(0, i, 1), target.narrow(0, i, 1));
  EXPECT_TRUE(metric.compute().equal(auroc(logits, target, {.num_classes = 2, .average = Average::none})));
}

TEST(AUROC, ANaNStaysVisibleUnlessItDoesNotCount) {
  const auto scores = torch::tensor({0.2, std::numeric_limits<double>::quiet_NaN(), 0.8});
  const auto target = torch::tensor({0, 0, 1});
  EXPECT_TRUE(std::isnan(auroc(scores, target, {.task = Task::binary}).item<double>()));
  AUROC masked({.task = Task::binary});
  masked.update(scores, target, torch::tensor({true, false, true}));
  EXPECT_EQ(masked.compute().item<double>(), 1.0);
}

TEST(AUROC, RefusesBadInput) {
  EXPECT_THROW(AUROC(AUROCOptions{}), UsageError);
  EXPECT_THROW(AUROC({.num_classes = 3, .average = Average::micro}), UsageError);
  EXPECT_THROW(AUROC({.task = Task::binary, .average = Average::none}), UsageError);
  AUROC binary({.task = Task::binary}), multiclass({.num_classes = 3});
  const auto target = torch::tensor({0, 1});
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { binary.update(target, target); }),
              HasSubstr("preds must be floating-point scores"));
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { multiclass.update(torch::zeros({2, 2}), target); }),
              HasSubstr("of shape [2, 3]"));
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { binary.update(torch::zeros({2}), target + 1); }),
              HasSubstr("target holds the label 2 (element 1)"));
}

}  // namespace
}  // namespace fulgur::metrics
