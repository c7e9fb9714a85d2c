#include "examples/resnet/image_classifier.h"

#include <utility>

namespace resnet {
namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

constexpr int64_t kSmallWidth = 16;
constexpr double kWarmupRatio = 0.1;

ResNetConfig config_of(const ImageClassifierOptions& options) {
  check_fields("ImageClassifier", options);
  ResNetConfig config = options.size == "article" ? ResNetConfig::resnet50() : ResNetConfig::resnet18();
  config.in_channels = options.in_channels;
  config.num_classes = options.num_classes;
  if (options.size == "small") {
    config.width = kSmallWidth;
    config.has_small_stem = true;
  }
  return config;
}

int64_t image_size_of(const std::string& model_size, bool is_digit) {
  if (model_size == "small") return is_digit ? 8 : 32;
  return model_size == "resnet18" && is_digit ? 32 : 224;
}

}  // namespace

void ImageClassifierOptions::describe(FieldVisitor& visit) {
  visit({.name = "size",
         .help = "which network: a narrow ResNet-18 for small images, ResNet-18, or ResNet-50",
         .choices = {"small", "resnet18", "article"}},
        &size);
  visit({.name = "num_classes", .help = "classes of the images; follows from the data", .min = 2}, &num_classes);
  visit({.name = "in_channels", .help = "channels of an image; follows from the data", .min = 1}, &in_channels);
  visit({.name = "lr", .help = "learning rate at its peak", .min = 0}, &lr);
  visit({.name = "momentum", .help = "decay of the running sum of gradients", .min = 0, .max = 1}, &momentum);
  visit({.name = "weight_decay", .help = "L2 penalty of all parameters", .min = 0}, &weight_decay);
}

void link_options(ImageClassifierOptions& model, ImageDataOptions& data) {
  model.num_classes = data.num_classes();
  model.in_channels = data.num_channels();
  if (!data.image_size) data.image_size = image_size_of(model.size, /*is_digit=*/data.path.empty());
}

ImageClassifier::ImageClassifier(Options options) : options_(std::move(options)) {
  net_ = register_module("net", ResNet(config_of(options_)));
}

at::Tensor ImageClassifier::training_step(const Batch& batch, int64_t) {
  const auto loss = F::cross_entropy(forward(batch["image"]), batch["label"]);
  log("train_loss", loss, {.prog_bar = true});
  return loss;
}

void ImageClassifier::validation_step(const Batch& batch, int64_t) {
  const auto logits = forward(batch["image"]);
  log("val_loss", F::cross_entropy(logits, batch["label"]), {.prog_bar = true});
  log("val_acc", logits.argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
}

Optimizers ImageClassifier::configure_optimizers() {
  const int64_t total_steps = estimated_stepping_batches();
  const auto warmup_steps = static_cast<int64_t>(kWarmupRatio * static_cast<double>(total_steps));
  return {optim::SGD(parameters(),
                     {.lr = options_.lr, .momentum = options_.momentum, .weight_decay = options_.weight_decay}),
          {.scheduler = optim::WarmupCosineLR::make({.warmup_steps = warmup_steps, .total_steps = total_steps}),
           .interval = "step"}};
}

}  // namespace resnet
