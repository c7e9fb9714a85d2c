// Steps of a model of examples/, for bench/python_examples.py, which runs the same in Lightning, and bench/claims.py:
//   example_step bert_classifier --steps=50 --strategy=ddp_sharded --devices=2 --model.size=article
// Trains on the same few batches again and again. Rank 0 prints
// the losses and the bytes that a rank keeps, counted, on 1, 2 and 8 devices, unless --barebones is given; then MB of
// the process before the model is made and at most after the first steps, and microseconds of a step after the first
// ones.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <numbers>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bench/process_memory.h"
#include "examples/bert_classifier/bert_classifier.h"
#include "examples/bert_classifier/labelled_texts.h"
#include "examples/deepspeech2/deepspeech2.h"
#include "examples/deepspeech2/speech_data.h"
#include "examples/digits/digits_data.h"
#include "examples/image_gpt/image_gpt.h"
#include "examples/resnet/image_classifier.h"
#include "examples/resnet/image_data.h"
#include "examples/swav/crops_data.h"
#include "examples/swav/swav.h"
#include "examples/transformer_lm/language_model.h"
#include "examples/transformer_lm/text_data.h"
#include "fulgur.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/programs/program.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

constexpr int64_t kSeed = 1;
constexpr int64_t kWorldSizes[] = {1, 2, 8};  // for which memory is counted

template <class Example, class Data>
struct StepOptions {
  TrainerOptions trainer{
      .accelerator = "cpu", .max_epochs = 1, .gradient_clip_val = 1.0, .enable_checkpointing = false};
  typename Example::Options model{};
  typename Data::Options data{};
  std::string folder;
  int64_t steps = 50;
  int64_t warm_up = 5;
  int64_t pool = 8;
  bool dropout = true;

  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "model", .help = "options of the example's model"}, &model);
    visit({.name = "data", .help = "options of the example's data"}, &data);
    visit({.name = "folder", .help = "where weights.safetensors and batches.safetensors are written; empty: nowhere"},
          &folder);
    visit({.name = "steps", .help = "number of steps: those that are not timed, one, and those that are", .min = 3},
          &steps);
    visit({.name = "warm_up", .help = "steps at the beginning that are not timed", .min = 1}, &warm_up);
    visit({.name = "pool", .help = "number of different batches", .min = 1}, &pool);
    visit({.name = "dropout", .help = "false: every torch::nn::Dropout of the model lets everything through"},
          &dropout);
  }
};

struct CompiledLmOptions : transformer_lm::LanguageModelOptions {
  std::string program;
  void describe(FieldVisitor& visit) {
    LanguageModelOptions::describe(visit);
    visit({.name = "program", .help = "the model with its compiled step, as bench/python_examples.py writes it"},
          &program);
  }
};

// The model of transformer_lm from Python, whose step is native code.
struct CompiledLm final : Module {
  using Options = CompiledLmOptions;
  Options options;
  nn::Program net{nullptr};
  explicit CompiledLm(Options model_options)
      : options(std::move(model_options)), net(register_module("net", nn::Program(options.program))) {}
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor loss = net->forward(batch)["loss"];
    log("train_bpc", loss / std::numbers::ln2, {.prog_bar = true});
    return loss;
  }
  Optimizers configure_optimizers() override { return transformer_lm::optimizers_of(*this, options); }
};

// Time and memory from the tick after those of the warm-up to the last one.
class Steps {
 public:
  explicit Steps(int64_t warm_up) : warm_up_(warm_up) {}
  void tick() {
    last_ = Clock::now();
    if (num_ticks_++ != warm_up_) return;
    warm_ = last_;
    bench::forget_peak();
  }
  double us_per_step() const {
    return std::chrono::duration<double, std::micro>(last_ - warm_).count() /
           static_cast<double>(num_ticks_ - 1 - warm_up_);
  }

 private:
  int64_t warm_up_, num_ticks_ = 0;
  Clock::time_point warm_, last_;
};

// The losses, and the bytes that a rank keeps. Ticks when a step has ended.
class Record final : public Callback {
 public:
  Record(StrategyChoice strategy, std::string precision, Steps& steps)
      : strategy_(std::move(strategy)), precision_(std::move(precision)), steps_(steps) {}

  // Optimizers of their own: those of the run may have shards of the parameters.
  void on_train_start(TrainerControl& trainer) override {
    for (const int64_t world_size : kWorldSizes) {
      memory_.push_back(estimate_memory(trainer.module(), strategy_, world_size, precision_,
                                        trainer.module().configure_optimizers()));
    }
  }
  void on_train_batch_end(TrainerControl&, const at::Tensor& loss, const Batch&, int64_t) override {
    losses_.push_back(loss.item<float>());
    steps_.tick();
  }

  void print() const {
    fmt::print("losses: {:.8g}\n", fmt::join(losses_, " "));
    for (size_t i = 0; i < memory_.size(); ++i) {
      const ModelMemory& memory = memory_[i];
      fmt::print("bytes of {}: parameters {}, gradients {}, optimizer {}, copies {}, buckets {}\n", kWorldSizes[i],
                 memory.parameters, memory.gradients, memory.optimizer_state.value_or(0), memory.copies,
                 memory.buckets);
    }
  }

 private:
  const StrategyChoice strategy_;
  const std::string precision_;
  Steps& steps_;
  std::vector<ModelMemory> memory_;
  std::vector<float> losses_;
};

// The first few batches of a loader, again and again, the same on every rank. With `steps` it ticks for each batch,
// which a run on one device takes at most a step ahead: barebones mode has no callbacks.
class Pool final : public Loader {
 public:
  Pool(Loader& loader, int64_t size, int64_t num_batches, Steps* steps) : num_batches_(num_batches), steps_(steps) {
    loader.begin_epoch(0);
    while (std::ssize(batches_) < size) {
      auto batch = loader.next();
      if (!batch) throw UsageError(fmt::format("the data has {} batches, not {}", batches_.size(), size));
      batches_.push_back(std::move(*batch));
    }
  }
  void begin_epoch(int64_t) override { num_given_ = 0; }
  std::optional<Batch> next() override {
    if (num_given_ == num_batches_) return std::nullopt;
    if (steps_ != nullptr) steps_->tick();
    return batches_[static_cast<size_t>(num_given_++) % batches_.size()];
  }
  std::optional<int64_t> num_batches() const override { return num_batches_; }
  bool set_shard(const DataShard&) override { return true; }

  NamedTensors tensors() const {  // "<batch>.<name>"
    NamedTensors all;
    for (size_t i = 0; i < batches_.size(); ++i) {
      for (const auto& [name, tensor] : batches_[i]) all.emplace_back(fmt::format("{}.{}", i, name), tensor);
    }
    return all;
  }

 private:
  std::vector<Batch> batches_;
  int64_t num_batches_, num_given_ = 0;
  Steps* steps_;
};

// The other examples have a link_options of their own, which is found beside their options.
void link_options(const image_gpt::ImageGptOptions&, const digits::DigitsDataOptions&) {}

template <class Example>
std::shared_ptr<Example> make_example(const typename Example::Options& options) {
  if constexpr (std::is_constructible_v<Example, typename Example::Options>) {
    return make_module<Example>(options);
  } else {
    return make_module<Example>(options, kSeed);
  }
}

void drop_nothing(const torch::nn::Module& module) {
  for (const auto& part : module.modules()) {
    if (auto* dropout = part->as<torch::nn::Dropout>()) dropout->options.p(0);
  }
}

void write_beginning(const fs::path& folder, const torch::nn::Module& module, const Pool& pool) {
  if (fs::exists(folder / "weights.safetensors")) return;
  NamedTensors parameters;
  for (const auto& parameter : module.named_parameters()) {
    parameters.emplace_back(parameter.key(), parameter.value().detach());
  }
  write_safetensors(folder / "batches.safetensors", pool.tensors());
  write_safetensors(folder / "weights.safetensors", parameters);
}

template <class Example, class Data>
void run(StepOptions<Example, Data> options) {
  at::set_num_threads(1);
  link_options(options.model, options.data);
  seed_everything(kSeed);
  const double before_mb = bench::resident_mb();
  Data data(options.data, kSeed);
  data.setup(EntryPoint::fit);
  Steps steps(options.warm_up);
  const auto pool = std::make_shared<Pool>(*data.train_dataloader(), options.pool, options.steps,
                                           options.trainer.barebones ? &steps : nullptr);
  const auto module = make_example<Example>(options.model);
  if (!options.dropout) drop_nothing(*module);
  if (!options.folder.empty()) write_beginning(options.folder, *module, *pool);
  const auto record = std::make_shared<Record>(options.trainer.strategy, options.trainer.precision, steps);
  if (!options.trainer.barebones) options.trainer.callbacks.push_back(record);
  Trainer trainer(options.trainer);
  trainer.fit(module, {.train = pool});
  if (!trainer.is_global_zero()) return;
  record->print();
  fmt::print("MB before the model: {:.1f}, at most: {:.1f}\nus/step: {:.1f}\n", before_mb, bench::peak_mb(),
             steps.us_per_step());
}

using Main = int (*)(int argc, char** argv);

template <class Example, class Data>
int main_of(int argc, char** argv) {
  return run_command_line(argc, argv, run<Example, Data>);
}

const std::vector<std::pair<std::string_view, Main>> kExamples{
    {"bert_classifier", main_of<bert_classifier::BertClassifier, bert_classifier::LabelledTextsData>},
    {"compiled_lm", main_of<CompiledLm, transformer_lm::TextData>},
    {"deepspeech2", main_of<deepspeech2::DeepSpeech2, deepspeech2::SpeechData>},
    {"image_gpt", main_of<image_gpt::ImageGpt, digits::DigitsData>},
    {"resnet", main_of<resnet::ImageClassifier, resnet::ImageData>},
    {"swav", main_of<swav::Swav, swav::CropsData>},
    {"transformer_lm", main_of<transformer_lm::LanguageModel, transformer_lm::TextData>},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  for (const auto& [name, run_main] : kExamples) {
    if (name == wanted) return run_main(argc - 1, argv + 1);
  }
  return exit_code_of([&] {
    std::vector<std::string_view> names;
    for (const auto& example : kExamples) names.push_back(example.first);
    throw UsageError(fmt::format("example_step trains one of {}, not '{}'", fmt::join(names, ", "), wanted));
  });
}
