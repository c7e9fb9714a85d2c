// Trains a small GPT on the characters of text files, then prints a sample of its text.
#include <fmt/format.h>

#include "examples/transformer_lm/language_model.h"
#include "examples/transformer_lm/text_data.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using namespace transformer_lm;

struct Options {
  TrainerOptions trainer{.max_epochs = 10, .gradient_clip_val = 1.0};
  TextDataOptions data;
  LanguageModelOptions model;
  SampleOptions sample;
  int64_t seed = 1;

  void describe(FieldVisitor& visit) {
    visit({.name = "trainer", .help = "how to train"}, &trainer);
    data.describe(visit);
    model.describe(visit);
    sample.describe(visit);
    visit({.name = "seed", .help = "seed of the weights, the windows and the sample", .min = 0}, &seed);
  }
};

void write_sample(LanguageModel& model, const SampleOptions& options, uint64_t seed) {
  const std::string text = sample(model, options, seed);
  const std::string rule(40, '-');
  fmt::print("{}\nsample at temperature {}\n{}\n{}{}\n{}\n", rule, options.temperature, rule, options.prompt, text,
             rule);
}

void train(Options options) {
  check(options.sample);
  seed_everything(options.seed);
  TextData data(options.data, options.model.context, options.seed);
  const auto model = make_module<LanguageModel>(options.model);
  const auto checkpoint = ModelCheckpoint::make({.monitor = "val_bpc"});
  const auto throughput = ThroughputMonitor::make(
      {.num_items = [](const Batch& batch) { return batch.batch_size() * (batch["tokens"].size(1) - 1); }});
  const bool is_bare = options.trainer.barebones;  // a barebones Trainer takes no callbacks
  const bool saves = options.trainer.enable_checkpointing.value_or(!is_bare);
  if (!is_bare) options.trainer.callbacks.push_back(throughput);
  if (saves) options.trainer.callbacks.push_back(checkpoint);

  Trainer trainer(options.trainer);
  trainer.fit(model, data);
  trainer.validate(model, data);

  if (!trainer.is_global_zero()) return;
  write_sample(*model, options.sample, options.seed);
  fmt::print("order 0: {:.3f} bits per character, from how often each byte comes\n", order_0_bpc(data.text()));
  if (!is_bare) fmt::print("training: {:.0f} tokens/s\n", throughput->items_per_sec());
  const auto best = checkpoint->best_model_path();
  if (!best.empty()) fmt::print("checkpoint: {}\n", best.string());
  fmt::print("next: ./bazelw run //examples/transformer_lm -- --max_epochs=30 --dropout=0.1\n");
}

}  // namespace

int main(int argc, char** argv) { return fulgur::run_command_line(argc, argv, train); }
