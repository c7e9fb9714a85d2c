// Trains a network that writes down what is said: by default digits, spoken by voices that it has not heard in
// training.
//   ./bazelw run //examples/deepspeech2
#include <fmt/format.h>

#include "examples/deepspeech2/deepspeech2.h"
#include "examples/deepspeech2/speech_data.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using namespace deepspeech2;

// Prints the first utterances of the test: what was said, and what the model hears.
void print_transcripts(DeepSpeech2& model, SpeechData& data) {
  constexpr size_t kNumPrinted = 5;
  const at::NoGradGuard no_grad;
  model.eval();
  const auto loader = data.test_dataloader()[0];
  loader->begin_epoch(0);
  const Batch batch = loader->next()->to(model.parameters().front().device());
  const auto said = transcripts_of(batch), heard = model.transcribe(batch);
  for (size_t i = 0; i < std::min(kNumPrinted, said.size()); ++i)
    fmt::print("said:  {}\nheard: {}\n", said[i], heard[i]);
}

void test_best(Trainer& trainer, const std::shared_ptr<DeepSpeech2>& model, SpeechData& data) {
  const bool has_best = trainer.options().enable_checkpointing.value();
  trainer.test(model, data, has_best ? "best" : "");
  if (trainer.is_global_zero()) print_transcripts(*model, data);
}

}  // namespace

int main(int argc, char** argv) {
  return cli::run<DeepSpeech2, SpeechData>(
      argc, argv,
      {.trainer = {.max_epochs = 10, .gradient_clip_val = 5.0, .checkpoint = {.monitor = "val_loss"}},
       .link = link_options,
       .after_fit = test_best});
}
