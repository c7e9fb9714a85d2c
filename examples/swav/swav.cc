#include "examples/swav/swav.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "examples/swav/losses.h"

namespace swav {
namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

constexpr double kWarmupRatio = 0.1;

// What follows from SwavOptions::size.
struct Sizes {
  resnet::ResNetConfig encoder;
  int64_t hidden;      // width of the projection's middle
  int64_t projection;  // width of what is compared
  int64_t num_prototypes;
};

Sizes sizes_of(const SwavOptions& options) {
  check_fields("Swav", options);
  Sizes sizes{.encoder = resnet::ResNetConfig::resnet50(), .hidden = 2048, .projection = 128, .num_prototypes = 3000};
  if (options.size == "small") {
    sizes = {.encoder = {.width = 16, .has_small_stem = true}, .hidden = 128, .projection = 64, .num_prototypes = 100};
  }
  sizes.encoder.in_channels = options.in_channels;
  sizes.encoder.num_classes = 0;
  return sizes;
}

// [batch_size, num_crops, ...] as [num_crops * batch_size, ...], crop by crop.
at::Tensor by_crop(const at::Tensor& crops) { return crops.transpose(0, 1).flatten(0, 1); }

at::Tensor unit_length(const at::Tensor& rows) { return F::normalize(rows, F::NormalizeFuncOptions().dim(1)); }

}  // namespace

void SwavOptions::describe(FieldVisitor& visit) {
  visit({.name = "objective",
         .help = "predict the codes of other crops, or tell images apart",
         .choices = {"swav", "simclr"}},
        &objective);
  visit({.name = "size",
         .help = "which network: a narrow ResNet-18 with 100 prototypes, or ResNet-50 with 3000",
         .choices = {"small", "article"}},
        &size);
  visit({.name = "in_channels", .help = "channels of an image", .min = 1}, &in_channels);
  visit({.name = "temperature", .help = "softmax temperature", .min = 0.001}, &temperature);
  visit({.name = "sinkhorn", .help = "how swav assigns samples to prototypes"}, &sinkhorn);
  visit({.name = "freeze_prototypes_steps", .help = "steps of swav before its prototypes are trained", .min = 0},
        &freeze_prototypes_steps);
  visit({.name = "lr", .help = "learning rate at its peak", .min = 0}, &lr);
  visit({.name = "weight_decay", .help = "weight decay of all parameters", .min = 0}, &weight_decay);
}

void link_options(SwavOptions& model, CropsDataOptions& data) {
  MultiCropOptions& crops = data.crops;
  if (model.objective == "simclr") {
    if (crops.num_small.value_or(0) > 0) {
      throw UsageError(
          fmt::format("--data.crops.num_small is {}, but simclr compares the two large crops alone: leave it "
                      "out, or set it to 0",
                      *crops.num_small));
    }
    crops.num_small = 0;
  }
  if (model.size != "article") return;
  crops.num_small = crops.num_small.value_or(6);
  crops.large_size = crops.large_size.value_or(224);
  crops.small_size = crops.small_size.value_or(96);
}

Swav::Swav(Options options) : options_(std::move(options)) {
  using namespace torch::nn;
  const Sizes sizes = sizes_of(options_);
  encoder_ = register_module("encoder", resnet::ResNet(sizes.encoder));
  projection_ = register_module("projection", Sequential{Linear(sizes.encoder.num_features(), sizes.hidden),
                                                         fulgur::nn::SyncBatchNorm1d(sizes.hidden), ReLU(),
                                                         Linear(sizes.hidden, sizes.projection)});
  if (options_.objective != "swav") return;
  prototypes_ =
      register_module("prototypes", Linear(LinearOptions(sizes.projection, sizes.num_prototypes).bias(false)));
}

BatchAction Swav::on_train_batch_start(const Batch&, int64_t) {
  if (prototypes_) prototypes_->weight.set_requires_grad(global_step() >= options_.freeze_prototypes_steps);
  return BatchAction::run;
}

at::Tensor Swav::training_step(const Batch& batch, int64_t) {
  const auto projections = project(batch).unflatten(0, {-1, batch.batch_size()});
  const auto loss = prototypes_ ? swav_loss(projections) : simclr_loss(projections);
  log("train_loss", loss, {.prog_bar = true});
  return loss;
}

// Returns the projections of all crops, the large ones first, crop by crop: [num_crops * batch_size, projection].
at::Tensor Swav::project(const Batch& batch) {
  std::vector<at::Tensor> features{encoder_->forward(by_crop(batch["large"]))};
  if (batch.contains("small")) features.push_back(encoder_->forward(by_crop(batch["small"])));
  return unit_length(projection_->forward(at::cat(features)));
}

at::Tensor Swav::swav_loss(const at::Tensor& projections) {
  const auto scores = projections.matmul(unit_length(prototypes_->weight).t());
  std::vector<at::Tensor> codes;
  for (int64_t crop = 0; crop < 2; ++crop) {
    codes.push_back(
        sinkhorn(scores[crop], options_.sinkhorn, [this](const auto& sums) { return sum_over_ranks(sums); }));
  }
  return swapped_prediction_loss(at::stack(codes), scores, options_.temperature);
}

at::Tensor Swav::simclr_loss(const at::Tensor& projections) {
  return nt_xent_loss(rows_of_all_ranks(projections[0]), rows_of_all_ranks(projections[1]), options_.temperature);
}

at::Tensor Swav::sum_over_ranks(const at::Tensor& tensor) {
  return world_size() == 1 ? tensor : all_gather(tensor).sum(0);
}

// Gathered rows have no graph, so that this rank's own ones are put in their place. Every rank computes the loss of all
// rows, and has the part of its gradient that goes through its own; the strategy takes the mean of these parts, so that
// they must count world_size times to become the gradient.
at::Tensor Swav::rows_of_all_ranks(const at::Tensor& rows) {
  if (world_size() == 1) return rows;
  auto all = all_gather(rows.detach()).unbind(0);
  all[static_cast<size_t>(global_rank())] = rows.detach() + world_size() * (rows - rows.detach());
  return at::cat(all);
}

Optimizers Swav::configure_optimizers() {
  const int64_t total_steps = estimated_stepping_batches();
  const auto warmup_steps = static_cast<int64_t>(kWarmupRatio * static_cast<double>(total_steps));
  return {optim::AdamW(parameters(), {.lr = options_.lr, .weight_decay = options_.weight_decay}),
          {.scheduler = optim::WarmupCosineLR::make({.warmup_steps = warmup_steps, .total_steps = total_steps}),
           .interval = "step"}};
}

}  // namespace swav
