#pragma once

#include <torch/nn/modules/batchnorm.h>

#include <cstddef>
#include <ostream>
#include <string>
#include <vector>

#include "fulgur/distributed/collective.h"

namespace fulgur::nn {

// The connection of a SyncBatchNorm, of any dimension, to the other ranks: the part that strategies use.
class SyncBatchNormBase {
 public:
  // `collective` is borrowed until another one, or null (one rank), replaces it; the graph of a forward pass needs it
  // until the backward pass is done. It must take tensors of the input's device, and no other operation may be in
  // progress on it while forward or backward runs.
  void attach(Collective* collective) { collective_ = collective; }

 protected:
  SyncBatchNormBase() = default;
  virtual ~SyncBatchNormBase() = default;
  // A clone is not attached: it may outlive the collective, and no strategy would detach it.
  SyncBatchNormBase(const SyncBatchNormBase& /*other*/) {}
  SyncBatchNormBase& operator=(const SyncBatchNormBase& /*other*/) { return *this; }

  bool alone() const { return collective_ == nullptr || collective_->world_size() == 1; }
  Collective& collective() const { return *collective_; }

 private:
  Collective* collective_ = nullptr;
};

// The common part of the modules below: forward and the checks of the input, for D spatial dimensions.
template <size_t D, class Derived>
class SyncBatchNormImplBase : public torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions>,
                              public SyncBatchNormBase {
  using Norm = torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions>;

 public:
  using Norm::bias, Norm::num_batches_tracked, Norm::options, Norm::running_mean, Norm::running_var, Norm::weight;
  using Norm::Norm;

  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  double count_batch();
};

class SyncBatchNorm1dImpl : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>::SyncBatchNormImplBase;
};
class SyncBatchNorm2dImpl : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>::SyncBatchNormImplBase;
};
class SyncBatchNorm3dImpl : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>::SyncBatchNormImplBase;
};

// torch::nn::BatchNorm1d, 2d and 3d whose statistics, in training, are those of the batches of all ranks together:
//   torch::nn::Sequential(torch::nn::Conv2d(3, 64, 3), fulgur::nn::SyncBatchNorm2d(64), torch::nn::ReLU())
// Options, parameters, buffers and the entries of checkpoints are torch's. The strategy attaches the modules to its
// ranks; until then, in eval mode, and with one rank, they equal BatchNorm bit for bit.
// Ranks: all run forward and backward of their modules in the same order. Batches may differ in size, and may be empty
// on some ranks. Gradients of weight and bias are those of this rank's part; the strategy adds them up.
// Dtypes: statistics are fp32, or fp64 for an fp64 input; ranks exchange them in fp64. 16-bit inputs go with fp32 or
// 16-bit weights.
// In checkpoint() the second call exchanges statistics again, and updates the running statistics again, as in Python.
// Errors: c10::Error for an input of the wrong shape, on that rank; for fewer than two values per channel over all
// ranks, on all ranks; and for a backward with create_graph, which only BatchNorm supports. DistributedError from
// forward and backward.
// Source: torch.nn.SyncBatchNorm; Chan et al. 1979 for variances of parts.
TORCH_MODULE(SyncBatchNorm1d);
TORCH_MODULE(SyncBatchNorm2d);
TORCH_MODULE(SyncBatchNorm3d);

bool has_sync_batch_norm(const torch::nn::Module& module);  // in `module`, or `module` itself

// Attaches every SyncBatchNorm in `module`, itself included.
void attach_sync_batch_norm(torch::nn::Module& module, Collective* collective);

// The names of torch's own BatchNorm1d, 2d and 3d in `module` ("encoder.norm"; "" for itself), and of the batch norms
// of each BatchNormOwner, in order.
std::vector<std::string> plain_batch_norm_names(const torch::nn::Module& module);

}  // namespace fulgur::nn
