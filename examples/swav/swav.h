#pragma once

#include <cstdint>
#include <string>

#include "examples/resnet/resnet.h"
#include "examples/swav/crops_data.h"
#include "examples/swav/sinkhorn.h"
#include "fulgur.h"

namespace swav {

struct SwavOptions {
  std::string objective = "swav";  // "swav": predict codes; "simclr": tell images apart
  std::string size = "small";  // "small": a narrow ResNet-18 for small images; "article": ResNet-50, 3000 prototypes
  int64_t in_channels = 1;
  double temperature = 0.1;              // both objectives divide similarities by it
  SinkhornOptions sinkhorn{};            // swav
  int64_t freeze_prototypes_steps = 20;  // swav: steps before the prototypes are trained; the article's: 313
  double lr = 3e-3;                      // the peak of the schedule
  double weight_decay = 1e-6;
  void describe(fulgur::FieldVisitor& visit);
};

// Sets the crops that are not given: the article's for its network, and no small ones for simclr, which does not
// compare them. Throws UsageError if simclr is given small ones.
void link_options(SwavOptions& model, CropsDataOptions& data);

// Learns features of images without labels, by one of two objectives:
//   swav    The large crops of an image are assigned to prototypes, all prototypes alike over the batches of all ranks
//           (sinkhorn.h), and each crop predicts the assignment of the others.
//   simclr  Each of two large crops is to be recognised among those of all images, over the batches of all ranks.
// A ResNet, then a projection: linear, batch norm, ReLU, linear, made unit length. AdamW; the learning rate rises
// during a tenth of the steps, then falls by half a cosine to 0. The articles use LARS, which strategies that shard
// parameters refuse.
//   Prototypes have unit length where they are used, instead of being rescaled after each step: some strategies write
// updates while the next step runs, and a write of ours would be lost. The queue of earlier samples that SwAV adds for
// small batches is left out: the batches of all ranks should have more samples than there are prototypes.
// Batches: as multi_crop() returns them, with batch_size in front; the same size on each rank. Logs train_loss.
// Ranks: with `dp` each replica counts as alone: it compares the samples of its own part of the batch.
// Throws UsageError for options that cannot be used.
// Source: Caron et al. 2020, arXiv:2006.09882; Chen et al. 2020, arXiv:2002.05709.
class Swav final : public fulgur::Module {
 public:
  using Options = SwavOptions;
  explicit Swav(Options options);

  fulgur::BatchAction on_train_batch_start(const fulgur::Batch& batch, int64_t batch_idx) override;
  at::Tensor training_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  fulgur::Optimizers configure_optimizers() override;

  const Options& options() const { return options_; }
  const resnet::ResNet& encoder() const { return encoder_; }  // the part whose features are used afterwards

 private:
  at::Tensor project(const fulgur::Batch& batch);
  at::Tensor swav_loss(const at::Tensor& projections);
  at::Tensor simclr_loss(const at::Tensor& projections);
  at::Tensor sum_over_ranks(const at::Tensor& tensor);
  at::Tensor rows_of_all_ranks(const at::Tensor& rows);

  Options options_;
  resnet::ResNet encoder_{nullptr};
  torch::nn::Sequential projection_{nullptr};
  torch::nn::Linear prototypes_{nullptr};  // null unless the objective is swav
};

}  // namespace swav
