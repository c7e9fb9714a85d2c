#include "fulgur/metrics/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "tests/metrics/golden.h"
#include "tests/testing/errors.h"

namespace fulgur::metrics {
namespace {

using ::testing::HasSubstr;
using Texts = std::vector<std::string>;

TEST(Perplexity, IsThatOfTorchmetrics) {
  const testing::Golden golden;
  for (const auto& expected : golden.cases("Perplexity")) {
    PerplexityOptions options;
    if (expected.options.contains("ignore_index")) options.ignore_index = expected.options.at("ignore_index");
    testing::expect_golden(golden, expected, Perplexity(options),
                           [](Perplexity& metric, const std::vector<at::Tensor>& batch, const Valid& valid) {
                             metric.update(batch[0], batch[1], valid);
                           });
  }
}

TEST(Perplexity, AVeryImprobableTokenHasAFiniteCost) {
  const auto logits = torch::tensor({{{0.0, 200.0}}});
  EXPECT_NEAR(std::log(perplexity(logits, torch::tensor({{0}})).item<double>()), 200.0, 1e-6);
}

TEST(Perplexity, RefusesBadInput) {
  Perplexity metric;
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { metric.update(torch::zeros({2, 3}), torch::zeros({2})); }),
              HasSubstr("must be floating-point logits [batch_size, seq_len, vocab_size]"));
  EXPECT_THAT(
      testing::message_of<c10::ValueError>([&] { metric.update(torch::zeros({1, 2, 5}), torch::tensor({{0, -100}})); }),
      HasSubstr("set ignore_index to -100"));
}

template <class ErrorRate>
void expect_that_of_torchmetrics(const std::string& name) {
  const testing::Golden golden;
  const Texts heard = golden.texts("heard"), sentences = golden.texts("sentences");
  ErrorRate whole;
  std::vector<ErrorRate> ranks(2);
  size_t begin = 0, batch_idx = 0;
  for (const int64_t batch_size : golden.batch_sizes()) {
    const size_t size = static_cast<size_t>(batch_size);
    const Texts preds(heard.begin() + begin, heard.begin() + begin + size);
    const Texts target(sentences.begin() + begin, sentences.begin() + begin + size);
    whole.update(preds, target);
    ranks[batch_idx++ % 2].update(preds, target);
    begin += size;
  }
  const at::Tensor expected = golden.cases(name).front().value;
  testing::expect_near(whole.compute(), expected);
  testing::expect_near(whole.compute(combined(std::vector{ranks[0].states(), ranks[1].states()})), expected);
}

TEST(WordErrorRate, IsThatOfTorchmetrics) { expect_that_of_torchmetrics<WordErrorRate>("WordErrorRate"); }
TEST(CharErrorRate, IsThatOfTorchmetrics) { expect_that_of_torchmetrics<CharErrorRate>("CharErrorRate"); }

TEST(CharErrorRate, CountsCharactersOfUtf8AndSpaces) {
  EXPECT_EQ(char_error_rate({"a b"}, {"ab"}).item<double>(), 0.5);
  EXPECT_EQ(char_error_rate({"na\u00efve"}, {"naive"}).item<double>(), 0.2);
  EXPECT_EQ(char_error_rate({"\u65e5\u672c"}, {"\u65e5\u672c\u8a9e\U0001f600"}).item<double>(), 0.5);
  EXPECT_EQ(char_error_rate({""}, {"ab"}).item<double>(), 1.0);
}

TEST(WordErrorRate, CountsEdits) {
  EXPECT_EQ(word_error_rate({"a b c"}, {" a  b\tc\n"}).item<double>(), 0.0);
  EXPECT_EQ(word_error_rate({"a x c"}, {"a b c d"}).item<double>(), 0.5);
  EXPECT_EQ(word_error_rate({"b c a"}, {"a b c"}).item<double>(), 2.0 / 3.0);
  EXPECT_EQ(word_error_rate({"a b c d"}, {"a"}).item<double>(), 3.0);
  EXPECT_EQ(word_error_rate({""}, {"a b"}).item<double>(), 1.0);
  EXPECT_TRUE(std::isnan(WordErrorRate().compute().item<double>()));
}

TEST(WordErrorRate, TextsThatAreNotValidDoNotCount) {
  WordErrorRate metric;
  metric.update({"a", "a"}, {"a", "b"}, torch::tensor({true, false}));
  EXPECT_EQ(metric.compute().item<double>(), 0.0);
  metric.reset();
  metric.update({"a"}, {"b"});
  EXPECT_EQ(metric.compute().item<double>(), 1.0);
}

TEST(WordErrorRate, RefusesDifferentNumbersOfTexts) {
  WordErrorRate metric;
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { metric.update({"a", "b"}, {"a"}); }),
              HasSubstr("one text per sample each; got 2 and 1"));
}

}  // namespace
}  // namespace fulgur::metrics
