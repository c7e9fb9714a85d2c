// Trains a ResNet on the UCI digits, or on a folder of pictures.
//   ./bazelw run //examples/resnet
//   ./bazelw run //examples/resnet -- --data.path=pets --model.size=article
#include "examples/resnet/image_classifier.h"
#include "examples/resnet/image_data.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using namespace resnet;

constexpr int64_t kArticleImageSize = 224, kSmallImageSize = 32;  // pixels

void link_options(ImageClassifierOptions& model, ImageDataOptions& data) {
  model.num_classes = data.num_classes();
  model.in_channels = data.num_channels();
  if (data.image_size) return;
  if (model.size == "article") {
    data.image_size = kArticleImageSize;
  } else if (!data.path.empty()) {
    data.image_size = kSmallImageSize;
  }
}

}  // namespace

int main(int argc, char** argv) {
  return cli::run<ImageClassifier, ImageData>(
      argc, argv,
      {.trainer = {.max_epochs = 10},
       .link = link_options,
       .after_fit = [](Trainer& trainer, const auto& model, auto& data) { trainer.validate(model, data); }});
}
