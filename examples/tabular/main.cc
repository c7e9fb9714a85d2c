// Trains a classifier on a table: the UCI wines, or a file of yours.
#include <filesystem>
#include <string>
#include <vector>

#include "fulgur.h"
#include "fulgur/data/tables/table_data.h"

namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

struct ClassifierOptions {
  int64_t num_features = 13;
  std::vector<int64_t> category_sizes{};  // rows of each category's embedding
  int64_t num_classes = 3;
  int64_t hidden_size = 32;
  double lr = 1e-2;
  void describe(FieldVisitor& visit) {
    visit({.name = "num_features", .help = "width of the tensor of features", .min = 0}, &num_features);
    visit({.name = "category_sizes", .help = "values of each category, and one for unknown values", .min = 1},
          &category_sizes);
    visit({.name = "num_classes", .help = "classes of the label", .min = 2}, &num_classes);
    visit({.name = "hidden_size", .help = "width of the hidden layer", .min = 1}, &hidden_size);
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  }
};

class Classifier final : public Module {
 public:
  using Options = ClassifierOptions;
  explicit Classifier(Options options) : options_(std::move(options)) {
    using namespace torch::nn;
    constexpr int64_t kEmbeddingSize = 8;
    for (const int64_t size : options_.category_sizes) embeddings_->push_back(Embedding(size, kEmbeddingSize));
    register_module("embeddings", embeddings_);
    const int64_t width = options_.num_features + kEmbeddingSize * static_cast<int64_t>(embeddings_->size());
    layers_ = register_module("layers", Sequential{Linear(width, options_.hidden_size), ReLU(),
                                                   Linear(options_.hidden_size, options_.num_classes)});
  }

  at::Tensor forward(const Batch& batch) {
    std::vector<at::Tensor> inputs;
    if (batch.contains("features")) inputs.push_back(batch["features"]);
    for (size_t i = 0; i < embeddings_->size(); ++i) {
      auto& embedding = embeddings_->at<torch::nn::EmbeddingImpl>(i);
      inputs.push_back(embedding.forward(batch["category"].select(1, static_cast<int64_t>(i))));
    }
    return layers_->forward(torch::cat(inputs, 1));
  }

  at::Tensor training_step(const Batch& batch, int64_t) override {
    const auto loss = F::cross_entropy(forward(batch), batch["label"]);
    log("train_loss", loss, {.prog_bar = true});
    return loss;
  }
  void validation_step(const Batch& batch, int64_t) override { evaluate("val", batch); }
  void test_step(const Batch& batch, int64_t) override { evaluate("test", batch); }

  Optimizers configure_optimizers() override {
    return optim::AdamW(parameters(), {.lr = options_.lr, .weight_decay = 0.01});
  }

 private:
  void evaluate(const std::string& stage, const Batch& batch) {
    const auto logits = forward(batch);
    log(stage + "_loss", F::cross_entropy(logits, batch["label"]), {.prog_bar = true});
    log(stage + "_acc", logits.argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
  }

  Options options_;
  torch::nn::ModuleList embeddings_;
  torch::nn::Sequential layers_;
};

// 178 wines of three growers by 13 measurements, the file that the build has downloaded: a line with the number of
// wines, and no line with names.
TableDataOptions wines() {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  return {.path = program + ".runfiles/wines/wine_data.csv",
          .val_fraction = 0.2,
          .test_fraction = 0.2,
          .batch_size = 16,
          .read = {.skip_rows = 1,
                   .column_names = {"alcohol", "malic_acid", "ash", "alcalinity", "magnesium", "phenols", "flavanoids",
                                    "other_phenols", "proanthocyanins", "color", "hue", "od280", "proline", "grower"}},
          .schema = {.target = "grower"}};
}

}  // namespace

int main(int argc, char** argv) {
  return cli::run<Classifier, TableData>(argc, argv,
                                         {.trainer = {.max_epochs = 20, .checkpoint = {.monitor = "val_loss"}},
                                          .data = wines(),
                                          .after_fit = [](Trainer& trainer, const auto& module, auto& data) {
                                            if (data.test_dataloader().empty()) return;
                                            trainer.test(module, data,
                                                         trainer.options().enable_checkpointing.value() ? "best" : "");
                                          }});
}
