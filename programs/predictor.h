#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <memory>

#include "fulgur/core/batch.h"
#include "fulgur/core/module_fwd.h"

namespace fulgur {

struct PredictorOptions {
  std::filesystem::path weights{};  // a checkpoint; empty: those of the file
  c10::Device device = c10::kCPU;
};

// Runs a trained model, whose weights may be exchanged at the same time:
//   Predictor predictor("net.pt2", {.weights = "runs/version_0/checkpoints/best"});
//   at::Tensor logits = predictor.run({{"input_ids", ids}})["logits"];
//   predictor.set_weights("runs/version_1/checkpoints/best");
// The model is in eval mode, and no gradients are kept.
// Threading: any, if predict_step of a Module changes nothing. A program that changes a buffer of its own in eval mode
// (a cache) is for one thread at a time.
class Predictor {
 public:
  // Loads a program of torch.export.save(), or an AOTInductor package. Loading a package runs its native code, so load
  // it only if you trust its source. Inputs and outputs are named as by nn::Program. Throws CheckpointError for any
  // other file, or for a package that was compiled for another kind of machine, and UsageError if the checkpoint does
  // not have the program's weights.
  explicit Predictor(const std::filesystem::path& file, PredictorOptions options = {});

  // Runs predict_step of a Module that make_module has made, on a copy of the module with the weights of a checkpoint.
  // Throws UsageError without options.weights, and as load_weights() does.
  explicit Predictor(std::shared_ptr<const Module> module, PredictorOptions options);
  ~Predictor();
  Predictor(const Predictor&) = delete;
  Predictor& operator=(const Predictor&) = delete;

  // Outputs are on options.device. Throws c10::ValueError for inputs that the program was not exported for.
  Batch run(const Batch& inputs) const;

  // The file of a program is read again. Calls of run() that have begun finish with the weights that they began with;
  // every later one has the new ones. If this throws, the weights are what they were.
  void set_weights(const std::filesystem::path& checkpoint);

  class Model;  // defined in predictor.cc

 private:
  std::unique_ptr<Model> model_;
};

}  // namespace fulgur
