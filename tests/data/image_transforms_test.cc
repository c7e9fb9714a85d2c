#include "fulgur/data/images/image_transforms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/testing/errors.h"

namespace fulgur {
namespace {

constexpr std::pair<double, double> kScale{0.08, 1.0}, kRatio{3.0 / 4.0, 4.0 / 3.0};

TEST(ImageTransforms, RandomCropsLieWithinThePictureAndItsRanges) {
  constexpr int64_t kHeight = 400, kWidth = 600;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const Crop crop = random_resized_crop(kHeight, kWidth, kScale, kRatio, random);
    EXPECT_GE(crop.top, 0);
    EXPECT_GE(crop.left, 0);
    EXPECT_LE(crop.top + crop.height, kHeight);
    EXPECT_LE(crop.left + crop.width, kWidth);
    const double area = static_cast<double>(crop.height * crop.width) / (kHeight * kWidth);
    EXPECT_GT(area, 0.079);
    EXPECT_LE(area, 1.0);
    const double ratio = static_cast<double>(crop.width) / static_cast<double>(crop.height);
    EXPECT_GT(ratio, 0.74);
    EXPECT_LT(ratio, 1.35);
  }
}

// A crop of a quarter of the area fits a square whatever its ratio, so that none is rejected.
TEST(ImageTransforms, AreasAreUniformAndRatiosUniformOnALogScale) {
  constexpr int64_t kSide = 10000, kSamples = 4000;
  double sum_of_areas = 0, sum_of_logs = 0, sum_of_squares = 0;
  for (int64_t seed = 0; seed < kSamples; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const Crop crop = random_resized_crop(kSide, kSide, {0.05, 0.25}, kRatio, random);
    sum_of_areas += static_cast<double>(crop.height * crop.width) / (kSide * kSide);
    const double log_ratio = std::log(static_cast<double>(crop.width) / static_cast<double>(crop.height));
    sum_of_logs += log_ratio;
    sum_of_squares += log_ratio * log_ratio;
  }
  EXPECT_NEAR(sum_of_areas / kSamples, 0.15, 0.003);
  EXPECT_NEAR(sum_of_logs / kSamples, 0, 0.01);
  EXPECT_NEAR(sum_of_squares / kSamples, std::pow(std::log(4.0 / 3.0), 2) / 3, 0.001);
}

TEST(ImageTransforms, APictureThatNoCropFitsIsCutInTheMiddle) {
  Random random(1);
  const Crop wide = random_resized_crop(10, 1000, {1.0, 1.0}, kRatio, random);
  EXPECT_EQ(wide.height, 10);
  EXPECT_EQ(wide.width, 13);
  EXPECT_EQ(wide.top, 0);
  EXPECT_EQ(wide.left, (1000 - 13) / 2);
  const Crop high = random_resized_crop(1000, 10, {1.0, 1.0}, kRatio, random);
  EXPECT_EQ(high.height, 13);
  EXPECT_EQ(high.width, 10);
  EXPECT_EQ(high.top, (1000 - 13) / 2);
}

TEST(ImageTransforms, TheShorterSideIsAsAskedAndTheLongerIsRoundedDown) {
  EXPECT_EQ(size_with_shorter_side(427, 640, 256), std::pair(int64_t{256}, int64_t{383}));
  EXPECT_EQ(size_with_shorter_side(640, 427, 256), std::pair(int64_t{383}, int64_t{256}));
  EXPECT_EQ(size_with_shorter_side(7, 7, 3), std::pair(int64_t{3}, int64_t{3}));
}

TEST(ImageTransforms, TheMiddleIsRoundedToEvenAsInPython) {
  EXPECT_EQ(center_crop(5, 7, 4).top, 0);   // 0.5
  EXPECT_EQ(center_crop(5, 7, 4).left, 2);  // 1.5
}

TEST(ImageTransforms, NormalizingIsTheFormulaForAnyLayout) {
  const at::Tensor levels = at::arange(2 * 3 * 256).remainder(256).to(at::kByte).view({3, 2, 256});
  for (const at::Tensor& image : {levels, levels.permute({1, 2, 0}).contiguous().permute({2, 0, 1}), levels.flip(2)}) {
    const at::Tensor out = at::empty({3, 2, 256}, at::kFloat);
    normalize_into(out, image, {0.1, 0.2, 0.3}, {0.5, 1, 2});
    const at::Tensor parts = image.to(at::kDouble) / 255;
    EXPECT_TRUE(out[0].allclose(((parts[0] - 0.1) / 0.5).to(at::kFloat), 0, 1e-6));
    EXPECT_TRUE(out[2].allclose(((parts[2] - 0.3) / 2).to(at::kFloat), 0, 1e-6));
    normalize_into(out, image, {}, {});
    EXPECT_TRUE(out.allclose(parts.to(at::kFloat), 0, 1e-7));
  }
}

TEST(ImageTransforms, NormalizingRefusesAPlaceOfAnotherSize) {
  const at::Tensor image = at::empty({3, 2, 2}, at::kByte), out = at::empty({3, 2, 3}, at::kFloat);
  EXPECT_EQ(testing::message_of<c10::ValueError>([&] { normalize_into(out, image, {}, {}); }).substr(0, 75),
            "normalize_into writes to a contiguous float tensor of the image's sizes");
}

}  // namespace
}  // namespace fulgur
