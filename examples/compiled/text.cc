// Trains a GPT that was written in Python (gpt.py) on the characters of text files, by native code, and hands it back.
//   ./bazelw run //examples/compiled:gpt -- gpt.pt2
//   ./bazelw run //examples/compiled:text -- --model.program=gpt.pt2
#include <numbers>

#include "examples/compiled/imported.h"
#include "examples/transformer_lm/text_data.h"
#include "fulgur.h"

namespace {

using namespace fulgur;

struct LanguageModel final : compiled::Imported {
  using Imported::Imported;
  void validation_step(const Batch& batch, int64_t) override {
    log("val_bpc", net->forward(batch)["loss"] / std::numbers::ln2, {.prog_bar = true});  // bits per character
  }
};

}  // namespace

int main(int argc, char** argv) {
  return cli::run<LanguageModel, transformer_lm::TextData>(
      argc, argv,
      {.trainer = {.max_epochs = 5, .gradient_clip_val = 1.0, .checkpoint = {.monitor = "val_bpc"}},
       .after_fit = [](Trainer& trainer, const auto& module, auto&) { compiled::hand_back(trainer, *module); }});
}
