#include "fulgur/core/record.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Histogram, CountsWhatLiesBetweenItsLimits) {
  const at::Tensor values = at::linspace(-3, 5, 1000, at::kDouble);
  const Histogram histogram = histogram_of(values);
  EXPECT_EQ(histogram.count, 1000);
  EXPECT_EQ(histogram.min, -3);
  EXPECT_EQ(histogram.max, 5);
  EXPECT_NEAR(histogram.sum, 1000, 1e-9);
  ASSERT_EQ(histogram.limits.size(), histogram.counts.size());
  EXPECT_GT(histogram.counts.front(), 0);
  EXPECT_GT(histogram.counts.back(), 0);
  double below = -kInf;
  for (size_t i = 0; i < histogram.limits.size(); ++i) {
    const double limit = histogram.limits[i];
    EXPECT_LT(below, limit);
    EXPECT_EQ(histogram.counts[i], values.ge(below).logical_and(values.lt(limit)).sum().item<int64_t>());
    below = limit;
  }
  EXPECT_EQ(std::accumulate(histogram.counts.begin(), histogram.counts.end(), int64_t{0}), 1000);
}

TEST(Histogram, TakesEveryTypeAndAllOfItsRange) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kByte}) {
    EXPECT_EQ(histogram_of(at::arange(10).to(type)).sum, 45) << type;
  }
  EXPECT_THAT(histogram_of(at::tensor({1, 0, 1}).to(at::kBool)).counts, ::testing::Contains(2));
  const Histogram wide =
      histogram_of(at::tensor({-1e300, 0.0, 1e-300, std::numeric_limits<double>::max()}, at::kDouble));
  EXPECT_EQ(std::accumulate(wide.counts.begin(), wide.counts.end(), int64_t{0}), 4);
}

TEST(Histogram, LeavesOutWhatIsNotFinite) {
  const Histogram histogram = histogram_of(at::tensor({1.0, std::nan(""), -kInf, kInf, 3.0}, at::kDouble));
  EXPECT_EQ(histogram.count, 2);
  EXPECT_EQ(histogram.sum_of_squares, 10);
  EXPECT_EQ(histogram_of(at::empty({0})).count, 0);
  EXPECT_THAT(message_of<c10::ValueError>([] { histogram_of({}); }), HasSubstr("got an undefined one"));
  EXPECT_THAT(message_of<c10::ValueError>([] { histogram_of(at::zeros({2}, at::kComplexFloat)); }),
              HasSubstr("got a complex one"));
}

TEST(Image, IsMadeOfBytesOrOfNumbersUpToOne) {
  const at::Tensor bytes = at::arange(24, at::kByte).view({3, 2, 4});
  EXPECT_TRUE(image_of("x", bytes).pixels.equal(bytes));
  EXPECT_TRUE(image_of("x", bytes[0]).pixels.equal(bytes.slice(0, 0, 1)));
  EXPECT_TRUE(image_of("x", bytes.transpose(1, 2)).pixels.is_contiguous());
  const at::Tensor numbers = at::tensor({-1.0, 0.0, 0.5, 1.0, 7.0, std::nan("")}, at::kFloat).view({1, 1, 6});
  EXPECT_TRUE(image_of("x", numbers).pixels.flatten().equal(at::tensor({0, 0, 128, 255, 255, 0}, at::kByte)));
}

TEST(Image, RefusesWhatIsNone) {
  const auto refusal = [](const at::Tensor& pixels) {
    return message_of<c10::ValueError>([&] { image_of("faces", pixels); });
  };
  EXPECT_THAT(refusal(at::zeros({8, 3, 4, 4})),
              ::testing::AllOf(HasSubstr("log_image('faces') takes [height, width] or"),
                               HasSubstr("got a tensor of shape [8, 3, 4, 4]")));
  EXPECT_THAT(refusal(at::zeros({2, 4, 4})), HasSubstr("shape [2, 4, 4]"));
  EXPECT_THAT(refusal(at::zeros({3, 0, 4})), HasSubstr("shape [3, 0, 4]"));
  EXPECT_THAT(refusal(at::zeros({4, 4}, at::kLong)), HasSubstr("type Long"));
  EXPECT_THAT(refusal({}), HasSubstr("an undefined tensor"));
}

}  // namespace
}  // namespace fulgur
