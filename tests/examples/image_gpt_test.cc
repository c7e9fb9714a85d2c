#include "examples/image_gpt/image_gpt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <png.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "examples/image_gpt/pixels.h"
#include "examples/linear_probe/linear_probe.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace image_gpt {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<ImageGpt> fresh_model() {
  fulgur::seed_everything(1);
  return fulgur::make_module<ImageGpt>(ImageGptOptions{}, uint64_t{1});
}

// A model far from uniform, so that a leak would show.
std::shared_ptr<ImageGpt> peaked_model() {
  const auto model = fresh_model();
  const at::NoGradGuard no_grad;
  for (const auto& parameter : model->named_parameters()) {
    if (parameter.key() == "head.weight") {
      parameter.value().normal_(0.0, 0.3);
    } else if (parameter.value().dim() == 2) {
      parameter.value().mul_(8.0);
    }
  }
  return model;
}

at::Tensor random_pixels(int64_t count) { return torch::randint(kNumLevels, {count, kNumPixels}, at::kLong); }

TEST(ImageGpt, APixelIsPredictedFromThePixelsBeforeItAlone) {
  const auto model = peaked_model();
  const at::NoGradGuard no_grad;
  const at::Tensor pixels = random_pixels(2);
  const at::Tensor whole = model->forward(pixels.slice(1, 0, 63));
  ASSERT_EQ(whole.sizes(), (std::vector<int64_t>{2, 64, kNumLevels}));
  EXPECT_TRUE(whole[0][0].allclose(whole[1][0], 1e-5, 1e-5));  // the first follows from the start token
  for (const int64_t length : {0, 1, 17, 62}) {
    const at::Tensor prefix = model->forward(pixels.slice(1, 0, length));
    EXPECT_TRUE(prefix.allclose(whole.slice(1, 0, length + 1), 1e-4, 1e-4)) << length;
    at::Tensor other = pixels.slice(1, 0, 63).clone();
    other.select(1, length).add_(1).remainder_(kNumLevels);
    EXPECT_FALSE(model->forward(other).select(1, length + 1).allclose(whole.select(1, length + 1))) << length;
  }
}

TEST(ImageGpt, BitsPerDimensionAreTheMeanCostOfEachPixelAfterTheOnesBefore) {
  const auto model = peaked_model();
  const at::NoGradGuard no_grad;
  const at::Tensor pixels = random_pixels(2);
  double bits = 0.0;
  for (int64_t image = 0; image < 2; ++image) {
    for (int64_t place = 0; place < kNumPixels; ++place) {
      const auto logits = model->forward(pixels.slice(0, image, image + 1).slice(1, 0, place))[0][place];
      const double of_pixel = logits[pixels[image][place].item<int64_t>()].item<double>();
      bits -= std::log2(std::exp(of_pixel) / logits.to(at::kDouble).exp().sum().item<double>());
    }
  }
  EXPECT_NEAR(bits_per_dimension(*model, pixels).item<double>(), bits / (2 * kNumPixels), 1e-4);
}

TEST(ImageGpt, BeginsWithUniformPredictions) {
  EXPECT_NEAR(bits_per_dimension(*fresh_model(), random_pixels(2)).item<double>(), std::log2(17.0), 1e-5);
}

TEST(ImageGpt, MiddleFeaturesComeFromTheFirstHalfOfTheBlocks) {
  const auto model = peaked_model();
  const at::NoGradGuard no_grad;
  const at::Tensor pixels = random_pixels(3);
  const at::Tensor features = model->middle_features(pixels);
  ASSERT_EQ(features.sizes(), (std::vector<int64_t>{3, 64}));
  EXPECT_LT(features.mean(1).abs().max().item<double>(), 1e-5);  // each pixel's features are normalised
  const auto zero = [&](const std::string& prefix) {
    for (const auto& parameter : model->named_parameters()) {
      if (parameter.key().starts_with(prefix)) parameter.value().zero_();
    }
  };
  for (const char* late : {"blocks.3.", "blocks.4.", "blocks.5.", "norm.", "head."}) zero(late);
  EXPECT_TRUE(model->middle_features(pixels).equal(features));
  zero("blocks.2.");
  EXPECT_FALSE(model->middle_features(pixels).allclose(features));
}

TEST(ImageGpt, TheArticlesSizeHasItsNumberOfParameters) {
  const ImageGpt model({.size = "article"}, 1);
  int64_t count = 0;
  for (const at::Tensor& parameter : model.parameters()) count += parameter.numel();
  // The article has 1024 pixels and 512 colours where this data has 64 and 17, and says 76 M.
  const int64_t of_article = count + 512 * ((1024 - 64) + 2 * (512 - 17));
  EXPECT_NEAR(static_cast<double>(of_article), 76e6, 1e6);
  EXPECT_EQ(model.n_layer(), 24);
}

TEST(ImageGpt, OptionsThatCannotBeUsedAreRefused) {
  const auto refusal = [](const ImageGptOptions& options) {
    return fulgur::testing::message_of<fulgur::UsageError>([&] { ImageGpt(options, 1); });
  };
  EXPECT_THAT(refusal({.size = "large"}), HasSubstr("article"));
  EXPECT_THAT(refusal({.num_samples = -1}), HasSubstr("num_samples must be at least 0; got -1"));
}

TEST(Sample, PixelsAreAsLikelyAsTheModelSays) {
  const auto model = peaked_model();
  const at::NoGradGuard no_grad;
  const at::Tensor drawn = sample(*model, 256, 1);
  ASSERT_EQ(drawn.sizes(), (std::vector<int64_t>{256, kNumPixels}));
  const auto log_probability = model->forward(drawn.slice(1, 0, 63)).log_softmax(2);
  const auto entropy = -(log_probability.exp() * log_probability).sum(2).mean();
  const auto cost = -log_probability.gather(2, drawn.unsqueeze(2)).mean();
  EXPECT_NEAR(cost.item<double>(), entropy.item<double>(), 0.05);  // 16,384 draws; a standard error is below 0.01
  EXPECT_LT(entropy.item<double>(), std::log(17.0) - 0.5);         // it matters what is drawn
}

TEST(Sample, TheSameSeedDrawsTheSame) {
  const auto model = fresh_model();
  const at::Tensor drawn = sample(*model, 3, 1);
  EXPECT_TRUE(sample(*model, 3, 1).equal(drawn));
  EXPECT_FALSE(sample(*model, 3, 2).equal(drawn));
}

TEST(Pixels, LevelsAreSixteenthsInRasterOrder) {
  const at::Tensor levels = at::arange(64, at::kLong).remainder(kNumLevels).unsqueeze(0);
  EXPECT_TRUE(levels_of(levels.view({1, 1, 8, 8}).to(at::kFloat) / 16).equal(levels));
}

TEST(Pixels, AnIndependentPixelCostsTheFrequencyOfItsLevelAtItsPlace) {
  at::Tensor train = at::zeros({3, kNumPixels}, at::kLong);  // with one more of each: 4/20 for level 0, 1/20 for others
  EXPECT_NEAR(independent_pixels_bpd(train, at::zeros({2, kNumPixels}, at::kLong)), std::log2(20.0 / 4), 1e-9);
  train.select(1, 5).fill_(16);
  at::Tensor held_out = at::zeros({1, kNumPixels}, at::kLong);
  held_out[0][6] = 16;
  const double expected = (62 * std::log2(20.0 / 4) + 2 * std::log2(20.0)) / 64;  // places 5 and 6 are surprises
  EXPECT_NEAR(independent_pixels_bpd(train, held_out), expected, 1e-9);
}

TEST(Pixels, ASheetHasEightDigitsToARow) {
  const fulgur::testing::TempDir dir;
  at::Tensor levels = at::zeros({9, kNumPixels}, at::kLong);
  levels[1][0] = 16;         // top left
  levels[8][7 * 8 + 7] = 8;  // bottom right
  const auto file = dir.path() / "sheet.png";
  write_sheet(levels, file);

  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  ASSERT_NE(png_image_begin_read_from_file(&image, file.c_str()), 0) << image.message;
  ASSERT_EQ(image.format, static_cast<png_uint_32>(PNG_FORMAT_GRAY));
  ASSERT_EQ(image.width, 8u * 34);  // 8 pixels of 4, and a margin of 2
  ASSERT_EQ(image.height, 2u * 34);
  std::vector<uint8_t> shades(PNG_IMAGE_SIZE(image));
  ASSERT_NE(png_image_finish_read(&image, nullptr, shades.data(), 0, nullptr), 0) << image.message;
  const auto at = [&](size_t x, size_t y) { return static_cast<int>(shades[y * 8 * 34 + x]); };
  EXPECT_EQ(at(34, 0), 255);
  EXPECT_EQ(at(34 + 3, 3), 255);
  EXPECT_EQ(at(34 + 4, 0), 0);
  EXPECT_EQ(at(28, 34 + 28), 127);
  EXPECT_EQ(at(27, 34 + 28), 0);
  const int margin = at(33, 0);
  EXPECT_GT(margin, 0);
  EXPECT_EQ(at(271, 67), margin);
  EXPECT_EQ(at(34 + 10, 34 + 10), margin);  // there is no tenth digit
}

TEST(Pixels, ASheetThatCannotBeWrittenIsNamed) {
  EXPECT_THAT(fulgur::testing::message_of<std::runtime_error>(
                  [] { write_sheet(at::zeros({1, kNumPixels}, at::kLong), "/nowhere/sheet.png"); }),
              HasSubstr("cannot write '/nowhere/sheet.png'"));
}

// Two classes at -1 and +1 in the second of two features, with deviation 1: no classifier is right more often than
// the normal distribution is below 1, which is 0.8413.
linear_probe::LabelledFeatures two_gaussians(int64_t count) {
  const at::Tensor labels = torch::randint(2, {count}, at::kLong);
  at::Tensor features = torch::randn({count, 2});
  features.select(1, 1).add_(2 * labels - 1);
  return {.features = features * 1000 + 5000, .labels = labels};  // any scale will do
}

TEST(LinearProbe, IsAsGoodAsTheBestClassifierOfTwoGaussians) {
  fulgur::seed_everything(1);
  EXPECT_NEAR(linear_probe::probe(two_gaussians(4000), two_gaussians(20000)), 0.8413, 0.01);
}

TEST(LinearProbe, LearnsTheLabelsOfTheFirstSetAndCountsOnTheSecond) {
  fulgur::seed_everything(1);
  const at::Tensor features = at::cat({at::eye(3), at::zeros({3, 1})}, 1);  // a constant feature does no harm
  const at::Tensor labels = at::arange(3, at::kLong);
  EXPECT_EQ(linear_probe::probe({features, labels}, {features, labels}), 1.0);
  EXPECT_NEAR(linear_probe::probe({features, labels}, {features, torch::tensor({0, 2, 1}, at::kLong)}), 1.0 / 3, 1e-9);
}

}  // namespace
}  // namespace image_gpt
