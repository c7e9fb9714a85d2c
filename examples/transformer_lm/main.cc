// Trains a small GPT on the characters of text files, then prints a sample of its text.
#include <fmt/format.h>

#include "examples/transformer_lm/language_model.h"
#include "examples/transformer_lm/text_data.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using namespace transformer_lm;

void write_sample(LanguageModel& model, const SampleOptions& options, uint64_t seed) {
  const std::string text = sample(model, options, seed);
  const std::string rule(40, '-');
  fmt::print("{}\nsample at temperature {}\n{}\n{}{}\n{}\n", rule, options.temperature, rule, options.prompt, text,
             rule);
}

}  // namespace

int main(int argc, char** argv) {
  const auto throughput = ThroughputMonitor::make(
      {.num_items = [](const Batch& batch) { return batch.batch_size() * (batch["tokens"].size(1) - 1); }});
  const auto after_fit = [&](Trainer& trainer, const auto& model, auto& data) {
    trainer.validate(model, data);
    if (!trainer.is_global_zero()) return;
    write_sample(*model, model->options().sample, data.seed());
    fmt::print("order 0: {:.3f} bits per character, from how often each byte comes\n", order_0_bpc(data.text()));
    if (!trainer.options().barebones) fmt::print("training: {:.0f} tokens/s\n", throughput->items_per_sec());
  };
  return cli::run<LanguageModel, TextData>(argc, argv,
                                           {.trainer = {.max_epochs = 10,
                                                        .gradient_clip_val = 1.0,
                                                        .checkpoint = {.monitor = "val_bpc"},
                                                        .callbacks = {throughput}},
                                            .link = link_options,
                                            .after_fit = after_fit});
}
