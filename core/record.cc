#include "fulgur/core/record.h"

#include <ATen/ops/bincount.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace fulgur {
namespace {

std::vector<double> make_limits() {
  std::vector<double> limits{0.0};
  for (double limit = 1e-12; limit < 1e20; limit *= 1.1) {
    limits.push_back(limit);
    limits.push_back(-limit);
  }
  limits.push_back(std::numeric_limits<double>::max());
  std::ranges::sort(limits);
  return limits;
}

const std::vector<double>& all_limits() {
  static const std::vector<double> limits = make_limits();
  return limits;
}

}  // namespace

Histogram histogram_of(const at::Tensor& values) {
  TORCH_CHECK_VALUE(values.defined() && !values.is_complex(), "a histogram needs a tensor of real numbers; got ",
                    values.defined() ? "a complex one" : "an undefined one");
  at::Tensor x = values.detach().to(at::kDouble).flatten();
  x = x.masked_select(x.isfinite());
  Histogram histogram{.count = x.numel()};
  if (histogram.count == 0) return histogram;
  histogram.min = x.min().item<double>();
  histogram.max = x.max().item<double>();
  histogram.sum = x.sum().item<double>();
  histogram.sum_of_squares = x.square().sum().item<double>();
  const std::vector<double>& limits = all_limits();
  const at::Tensor bucket = at::bucketize(x, at::tensor(limits, x.options()), /*out_int32=*/false, /*right=*/true)
                                .clamp_max_(static_cast<int64_t>(limits.size()) - 1);
  const at::Tensor counts = at::bincount(bucket).to(at::kCPU);
  const auto* begin = counts.const_data_ptr<int64_t>();
  const auto* first = std::find_if(begin, begin + counts.numel(), [](int64_t count) { return count > 0; });
  histogram.counts.assign(first, begin + counts.numel());  // bincount ends with the last that is not empty
  histogram.limits.assign(limits.begin() + (first - begin), limits.begin() + counts.numel());
  return histogram;
}

Image image_of(std::string_view name, const at::Tensor& pixels) {
  const auto refuse = [&](const auto&... found) {
    TORCH_CHECK_VALUE(false, "log_image('", name,
                      "') takes [height, width] or [channels, height, width] with 1, 3 or 4 channels, of type uint8 or "
                      "floating point; got ",
                      found...);
  };
  if (!pixels.defined()) refuse("an undefined tensor");
  const bool is_number = pixels.scalar_type() == at::kByte || pixels.is_floating_point();
  const at::Tensor image = pixels.dim() == 2 ? pixels.unsqueeze(0) : pixels;
  const bool is_image =
      image.dim() == 3 && (image.size(0) == 1 || image.size(0) == 3 || image.size(0) == 4) && image.numel() > 0;
  if (!is_number || !is_image) refuse("a tensor of shape ", pixels.sizes(), " and type ", pixels.scalar_type());
  const at::Tensor bytes =
      image.is_floating_point()
          ? image.detach().to(at::kFloat).nan_to_num(0.0).clamp(0.0, 1.0).mul(255.0).round().to(at::kByte)
          : image;
  return {.pixels = bytes.to(at::kCPU).contiguous()};
}

}  // namespace fulgur
