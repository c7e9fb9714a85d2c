// Trains a ResNet on the UCI digits, or on a folder of pictures.
//   ./bazelw run //examples/resnet
//   ./bazelw run //examples/resnet -- --model.size=resnet18
//   ./bazelw run //examples/resnet -- --data.path=pets --model.size=article
#include "examples/resnet/image_classifier.h"
#include "examples/resnet/image_data.h"
#include "fulgur.h"

using namespace fulgur;
using namespace resnet;

int main(int argc, char** argv) {
  return cli::run<ImageClassifier, ImageData>(
      argc, argv,
      {.trainer = {.max_epochs = 10},
       .link = link_options,
       .after_fit = [](Trainer& trainer, const auto& model, auto& data) { trainer.validate(model, data); }});
}
