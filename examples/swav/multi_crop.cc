#include "examples/swav/multi_crop.h"

#include <cmath>
#include <numbers>
#include <vector>

namespace swav {
namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

constexpr int64_t kNumLarge = 2;

// The map from places in a crop to places in the image, both from -1 to 1: float [2, 3].
at::Tensor random_crop(const std::pair<double, double>& area, double max_rotation, Random& random) {
  const double scale = std::sqrt(random.uniform(area.first, area.second));
  const double angle = random.uniform(-max_rotation, max_rotation) * std::numbers::pi / 180;
  const double x = random.uniform(scale - 1, 1 - scale), y = random.uniform(scale - 1, 1 - scale);
  const double cosine = scale * std::cos(angle), sine = scale * std::sin(angle);
  return torch::tensor({{cosine, -sine, x}, {sine, cosine, y}}, at::kFloat);
}

at::Tensor crops(const at::Tensor& image, int64_t count, int64_t size, const std::pair<double, double>& area,
                 const MultiCropOptions& options, Random& random) {
  std::vector<at::Tensor> places;
  for (int64_t i = 0; i < count; ++i) places.push_back(random_crop(area, options.max_rotation, random));
  const auto grid = F::affine_grid(at::stack(places), {count, image.size(0), size, size}, /*align_corners=*/false);
  const auto images = image.expand({count, -1, -1, -1});
  const auto views = F::grid_sample(images, grid, F::GridSampleFuncOptions().align_corners(false));
  return views + options.noise * at::randn(views.sizes(), random.generator());
}

}  // namespace

void MultiCropOptions::describe(FieldVisitor& visit) {
  visit({.name = "num_small",
         .help = "small crops, in addition to the two large ones; none: 2, 6 or 0, as suits the model",
         .min = 0},
        &num_small);
  visit({.name = "large_size",
         .help = "side of a large crop; none: 8 or 224, as suits the model",
         .unit = "pixels",
         .min = 1},
        &large_size);
  visit({.name = "small_size",
         .help = "side of a small crop; none: 8 or 96, as suits the model",
         .unit = "pixels",
         .min = 1},
        &small_size);
  visit({.name = "large_area",
         .help = "range of a large crop's share of the image, the smaller first",
         .min = 0.01,
         .max = 1},
        &large_area);
  visit({.name = "small_area",
         .help = "range of a small crop's share of the image, the smaller first",
         .min = 0.01,
         .max = 1},
        &small_area);
  visit({.name = "max_rotation", .help = "largest angle of a crop", .unit = "degrees", .min = 0, .max = 180},
        &max_rotation);
  visit({.name = "noise", .help = "standard deviation of what is added to each pixel", .min = 0}, &noise);
}

Batch multi_crop(const at::Tensor& image, const MultiCropOptions& options, Random& random) {
  const int64_t large_size = options.large_size.value_or(MultiCropOptions::kDefaultSize);
  const int64_t small_size = options.small_size.value_or(MultiCropOptions::kDefaultSize);
  const int64_t num_small = options.num_small.value_or(MultiCropOptions::kDefaultNumSmall);
  Batch views{{"large", crops(image, kNumLarge, large_size, options.large_area, options, random)}};
  if (num_small == 0) return views;
  return views.with("small", crops(image, num_small, small_size, options.small_area, options, random));
}

}  // namespace swav
