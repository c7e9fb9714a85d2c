#include "fulgur/metrics/classification.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <map>

#include "fulgur/base/error.h"
#include "tests/metrics/golden.h"
#include "tests/testing/errors.h"

namespace fulgur::metrics {
namespace {

using ::testing::HasSubstr;

template <class Options>
Options common_options(const nlohmann::json& json) {
  Options options;
  if (json.value("task", "") == "binary") options.task = Task::binary;
  options.num_classes = json.value("num_classes", 0);
  options.threshold = json.value("threshold", 0.5);
  if (json.contains("ignore_index")) options.ignore_index = json.at("ignore_index");
  return options;
}

ClassificationOptions classification_options(const nlohmann::json& json) {
  const std::map<std::string, Average> averages{
      {"micro", Average::micro}, {"macro", Average::macro}, {"weighted", Average::weighted}, {"none", Average::none}};
  auto options = common_options<ClassificationOptions>(json);
  options.top_k = json.value("top_k", 1);
  options.average = averages.at(json.value("average", "micro"));
  return options;
}

ConfusionMatrixOptions confusion_matrix_options(const nlohmann::json& json) {
  const std::map<std::string, Normalize> normalize{{"none", Normalize::none},
                                                   {"true", Normalize::by_true},
                                                   {"pred", Normalize::by_pred},
                                                   {"all", Normalize::by_all}};
  auto options = common_options<ConfusionMatrixOptions>(json);
  options.normalize = normalize.at(json.at("normalize"));
  return options;
}

constexpr auto kUpdate = [](auto& metric, const std::vector<at::Tensor>& batch, const Valid& valid) {
  metric.update(batch[0], batch[1], valid);
};

template <class Score>
void expect_golden_scores(const std::string& name) {
  const testing::Golden golden;
  for (const auto& expected : golden.cases(name)) {
    testing::expect_golden(golden, expected, Score(classification_options(expected.options)), kUpdate);
  }
}

TEST(Accuracy, IsThatOfTorchmetrics) { expect_golden_scores<Accuracy>("Accuracy"); }
TEST(Precision, IsThatOfTorchmetrics) { expect_golden_scores<Precision>("Precision"); }
TEST(Recall, IsThatOfTorchmetrics) { expect_golden_scores<Recall>("Recall"); }
TEST(F1Score, IsThatOfTorchmetrics) { expect_golden_scores<F1Score>("F1Score"); }

TEST(ConfusionMatrix, IsThatOfTorchmetrics) {
  const testing::Golden golden;
  for (const auto& expected : golden.cases("ConfusionMatrix")) {
    testing::expect_golden(golden, expected, ConfusionMatrix(confusion_matrix_options(expected.options)), kUpdate);
  }
}

TEST(Classification, FunctionsGiveTheValueOfOneBatch) {
  const auto preds = torch::tensor({0, 1, 1, 2}), target = torch::tensor({0, 1, 2, 2});
  EXPECT_EQ(accuracy(preds, target, {.num_classes = 3}).item<double>(), 0.75);
  EXPECT_TRUE(precision(preds, target, {.num_classes = 3, .average = Average::none})
                  .equal(torch::tensor({1.0, 0.5, 1.0}, torch::kDouble)));
  EXPECT_TRUE(recall(preds, target, {.num_classes = 3, .average = Average::none})
                  .equal(torch::tensor({1.0, 1.0, 0.5}, torch::kDouble)));
  EXPECT_DOUBLE_EQ(f1_score(preds, target, {.num_classes = 3, .average = Average::macro}).item<double>(), 7.0 / 9.0);
  EXPECT_TRUE(
      confusion_matrix(preds, target, {.num_classes = 3}).equal(torch::tensor({{1, 0, 0}, {0, 1, 0}, {0, 1, 1}})));
}

// torchmetrics removes ignored elements before it looks for logits in ConfusionMatrix, and after it in the others. The
// sigmoid of every score is above 0.5.
TEST(Classification, AnIgnoredScoreMakesOthersLogitsExceptInAConfusionMatrix) {
  const auto preds = torch::tensor({0.8, 0.3, 5.0}), target = torch::tensor({1, 0, -1});
  EXPECT_TRUE(confusion_matrix(preds, target, {.task = Task::binary, .ignore_index = -1})
                  .equal(torch::tensor({{1, 0}, {0, 1}})));
  EXPECT_EQ(accuracy(preds, target, {.task = Task::binary, .ignore_index = -1}).item<double>(), 0.5);
  ConfusionMatrix images({.task = Task::binary, .ignore_index = -1});
  images.update(preds.view({1, 3, 1}), target.view({1, 3, 1}));
  EXPECT_TRUE(images.compute().equal(torch::tensor({{1, 0}, {0, 1}})));
}

TEST(Classification, WithoutSamplesIsZero) {
  EXPECT_EQ(Accuracy({.num_classes = 3}).compute().item<double>(), 0.0);
  EXPECT_EQ(F1Score({.num_classes = 3, .average = Average::macro}).compute().item<double>(), 0.0);
}

TEST(Classification, SamplesThatAreNotValidAreNotChecked) {
  Accuracy accuracy({.num_classes = 3});
  accuracy.update(torch::tensor({0, 9}), torch::tensor({0, -7}), torch::tensor({true, false}));
  EXPECT_EQ(accuracy.compute().item<double>(), 1.0);
}

TEST(Classification, LabelsMayHaveAnyIntegerDtype) {
  for (const auto dtype : {torch::kBool, torch::kUInt8, torch::kInt}) {
    Accuracy accuracy({.num_classes = 2, .ignore_index = -100});
    accuracy.update(torch::tensor({0, 1}), torch::tensor({1, 1}).to(dtype));
    EXPECT_EQ(accuracy.compute().item<double>(), 0.5) << dtype;
  }
}

TEST(Classification, AFailedUpdateChangesNothing) {
  Accuracy accuracy({.num_classes = 3});
  accuracy.update(torch::tensor({0}), torch::tensor({0}));
  EXPECT_THROW(accuracy.update(torch::tensor({1, 3}), torch::tensor({0, 0})), c10::ValueError);
  EXPECT_EQ(accuracy.compute().item<double>(), 1.0);
}

// On an accelerator update() cannot throw without waiting for the device, so it counts bad labels; setting the count
// in the states stands for that here.
TEST(Classification, AnOutOfRangeLabelThatWasOnlyCountedMakesTheValueNaN) {
  const auto spoiled = [](const Metric& metric) {
    MetricStates states = metric.states();
    states[1].value.fill_(1);
    return metric.compute(states);
  };
  EXPECT_TRUE(std::isnan(spoiled(Accuracy({.num_classes = 3})).item<double>()));
  EXPECT_TRUE(spoiled(Recall({.num_classes = 3, .average = Average::none})).isnan().all().item<bool>());
  EXPECT_TRUE(spoiled(ConfusionMatrix({.num_classes = 3})).eq(-1).all().item<bool>());
  EXPECT_TRUE(spoiled(ConfusionMatrix({.num_classes = 3, .normalize = Normalize::by_all})).isnan().all().item<bool>());
}

TEST(Classification, RefusesOptionsThatCannotBe) {
  const auto message = [](const ClassificationOptions& options) {
    return testing::message_of<UsageError>([&] { Accuracy accuracy(options); });
  };
  EXPECT_THAT(message({}), HasSubstr("Accuracy: num_classes is 0; multiclass needs the number of classes, at least 2"));
  EXPECT_THAT(message({.num_classes = 1}), HasSubstr("write {.task = Task::binary}"));
  EXPECT_THAT(message({.task = Task::binary, .num_classes = 3}), HasSubstr("leave num_classes out"));
  EXPECT_THAT(message({.num_classes = 3, .top_k = 4}), HasSubstr("between 1 and num_classes (3)"));
  EXPECT_THAT(message({.num_classes = 3, .top_k = 0}), HasSubstr("top_k is 0"));
  EXPECT_THAT(message({.task = Task::binary, .average = Average::macro}), HasSubstr("are for multiclass"));
  EXPECT_THAT(message({.task = Task::binary, .threshold = 1.5}), HasSubstr("threshold is 1.5"));
  EXPECT_THROW(ConfusionMatrix({.num_classes = 1}), UsageError);
}

TEST(Classification, RefusesDataThatDoesNotFit) {
  const auto message = [](const at::Tensor& preds, const at::Tensor& target, int64_t top_k = 1) {
    Accuracy accuracy({.num_classes = 3, .top_k = top_k});
    return testing::message_of<c10::ValueError>([&] { accuracy.update(preds, target); });
  };
  const auto labels = torch::tensor({0, 1});
  EXPECT_THAT(message(torch::zeros({2, 4}), labels), HasSubstr("floating-point scores of shape [2, 3]; got"));
  EXPECT_THAT(message(torch::zeros({2}), labels), HasSubstr("floating-point scores of shape [2, 3]; got"));
  EXPECT_THAT(message(torch::zeros({}), torch::zeros({}, torch::kLong)), HasSubstr("preds must be"));
  EXPECT_THAT(message(labels, torch::tensor({0.0, 1.0})), HasSubstr("target must hold integer labels; got Float [2]"));
  EXPECT_THAT(
      message(labels, torch::tensor({0, -100})),
      HasSubstr("target holds the label -100 (element 1); of 3 classes the labels are 0 to 2. Correct the label, "
                "set ignore_index to -100 or raise num_classes"));
  EXPECT_THAT(message(torch::tensor({3, 0}), labels), HasSubstr("preds holds the label 3 (element 0)"));
  EXPECT_THAT(message(labels, labels, 2), HasSubstr("top_k is 2 but preds of shape [2] holds labels"));

  Precision binary({.task = Task::binary});
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { binary.update(torch::zeros({2, 2}), labels); }),
              HasSubstr("Precision: preds and target must have the same shape; got [2, 2] and [2]"));
}

}  // namespace
}  // namespace fulgur::metrics
