#pragma once

#include <cstdint>
#include <string>

#include "examples/resnet/image_data.h"
#include "examples/resnet/resnet.h"
#include "fulgur.h"

namespace resnet {

struct ImageClassifierOptions {
  std::string size = "small";  // "small": a narrow ResNet-18 for small images; "resnet18"; "article": ResNet-50
  int64_t num_classes = 10;
  int64_t in_channels = 1;
  double lr = 0.05;            // the peak of the schedule; the article's is 0.1 for 256 images in a step
  double momentum = 0.9;       // decay of the running sum of gradients
  double weight_decay = 1e-4;  // L2, for all parameters
  void describe(fulgur::FieldVisitor& visit);
};

// Sets the classes and channels of the data, and the size of its images unless one is given. Pictures have 224 pixels a
// side, and 32 for the small network; digits have 8 for the small network, 32 for ResNet-18 and 224 for ResNet-50.
void link_options(ImageClassifierOptions& model, ImageDataOptions& data);

// A ResNet that classifies images. SGD with momentum; a linear warm-up of a tenth of the steps, then half a cosine to
// 0. Logs train_loss, val_loss and val_acc.
// Batches: "image", float [batch_size, in_channels, height, width]; "label", int64 [batch_size].
// Throws UsageError for options that cannot be used.
class ImageClassifier final : public fulgur::Module {
 public:
  using Options = ImageClassifierOptions;
  explicit ImageClassifier(Options options);

  // images: as in a batch. Returns logits [batch_size, num_classes].
  at::Tensor forward(const at::Tensor& images) { return net_->forward(images); }

  at::Tensor training_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  void validation_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  fulgur::Optimizers configure_optimizers() override;

 private:
  Options options_;
  ResNet net_{nullptr};
};

}  // namespace resnet
