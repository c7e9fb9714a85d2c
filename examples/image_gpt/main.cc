// Trains a GPT on the pixels of the UCI digits, then says what its middle layer knows of them, and draws digits.
//   ./bazelw run //examples/image_gpt
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <vector>

#include "examples/digits/digits_data.h"
#include "examples/image_gpt/image_gpt.h"
#include "examples/image_gpt/pixels.h"
#include "examples/linear_probe/linear_probe.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using namespace image_gpt;

constexpr int64_t kProbeBatchSize = 128;  // images whose features are computed at once

struct Digits {
  at::Tensor pixels;  // int64 [count, 64]
  at::Tensor labels;  // int64 [count]
};

Digits read_all(Loader& loader) {
  std::vector<at::Tensor> pixels, labels;
  loader.begin_epoch(0);
  while (const auto batch = loader.next()) {
    pixels.push_back(levels_of((*batch)["image"]));
    labels.push_back((*batch)["label"]);
  }
  return {.pixels = at::cat(pixels), .labels = at::cat(labels)};
}

linear_probe::LabelledFeatures features_of(ImageGpt& model, const Digits& digits) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> features;
  for (const at::Tensor& pixels : digits.pixels.split(kProbeBatchSize)) {
    features.push_back(model.middle_features(pixels));
  }
  return {.features = at::cat(features), .labels = digits.labels};
}

void print_probe(ImageGpt& model, const Digits& train, const Digits& held_out) {
  seed_everything(model.seed());
  ImageGpt untrained(model.options(), model.seed());
  const auto features = [&](ImageGpt& net) -> linear_probe::DigitFeatures {
    return {.train = features_of(net, train), .held_out = features_of(net, held_out)};
  };
  linear_probe::print_margin(fmt::format("linear probe of block {} of {}", model.n_layer() / 2, model.n_layer()),
                             features(model), features(untrained));
}

void report(Trainer& trainer, const std::shared_ptr<ImageGpt>& model, digits::DigitsData& data) {
  const bool has_best = trainer.options().enable_checkpointing.value();
  trainer.test(model, data, has_best ? "best" : "");
  if (!trainer.is_global_zero()) return;
  const Digits train = read_all(*data.train_dataloader()), held_out = read_all(*data.test_dataloader()[0]);
  fmt::print("uniform: {:.3f} bits per dimension; each pixel alone: {:.3f}\n", std::log2(kNumLevels),
             independent_pixels_bpd(train.pixels, held_out.pixels));
  print_probe(*model, train, held_out);
  if (model->options().num_samples == 0) return;
  const auto file = trainer.run_dir() / "samples.png";
  write_sheet(sample(*model, model->options().num_samples, model->seed()), file);
  fmt::print("samples: {}\n", file.string());
}

}  // namespace

int main(int argc, char** argv) {
  return cli::run<ImageGpt, digits::DigitsData>(
      argc, argv,
      {.trainer = {.max_epochs = 15, .gradient_clip_val = 1.0, .checkpoint = {.monitor = "val_bpd"}},
       .after_fit = report});
}
