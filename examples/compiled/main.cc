// Trains a ResNet that was written in Python (resnet.py) on the UCI digits, by native code, and hands it back.
//   ./bazelw run //examples/compiled:resnet -- resnet.pt2
//   ./bazelw run //examples/compiled -- --model.program=resnet.pt2
#include "examples/compiled/imported.h"
#include "examples/digits/digits_data.h"
#include "fulgur.h"

namespace {

using namespace fulgur;

struct Classifier final : compiled::Imported {
  using Imported::Imported;
  void validation_step(const Batch& batch, int64_t) override { evaluate("val", batch); }
  void test_step(const Batch& batch, int64_t) override { evaluate("test", batch); }
  void evaluate(const std::string& stage, const Batch& batch) {
    const Batch outputs = net->forward(batch);
    log(stage + "_loss", outputs["loss"], {.prog_bar = true});
    log(stage + "_acc", outputs["logits"].argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
  }
};

}  // namespace

int main(int argc, char** argv) {
  return cli::run<Classifier, digits::DigitsData>(
      argc, argv,
      {.trainer = {.max_epochs = 5, .checkpoint = {.monitor = "val_loss"}},
       .after_fit = [](Trainer& trainer, const auto& module, auto& data) {
         trainer.test(module, data, trainer.options().enable_checkpointing.value() ? "best" : "");
         compiled::hand_back(trainer, *module);
       }});
}
