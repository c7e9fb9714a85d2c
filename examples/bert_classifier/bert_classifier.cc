#include "examples/bert_classifier/bert_classifier.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

namespace bert_classifier {
namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

at::Tensor accuracy(const at::Tensor& logits, const at::Tensor& targets) {
  return logits.argmax(1).eq(targets).to(at::kFloat).mean();
}

}  // namespace

void BertClassifierOptions::describe(FieldVisitor& visit) {
  visit({.name = "weights", .help = "folder of the Hugging Face hub: config.json, model.safetensors, vocab.txt"},
        &weights);
  visit({.name = "pretrained", .help = "begin with these weights; false: with random ones"}, &pretrained);
  visit({.name = "size",
         .help = "which encoder: that of config.json, or BERT-base with random weights",
         .choices = {"weights", "article"}},
        &size);
  visit({.name = "num_classes", .help = "classes of the texts; follows from the data", .min = 2}, &num_classes);
  visit({.name = "dropout", .help = "fraction dropped in front of the head", .min = 0, .max = 1}, &dropout);
  visit({.name = "lr", .help = "learning rate at its peak; for BERT-base, 2e-5 to 5e-5", .min = 0}, &lr);
}

BertSizes BertClassifierOptions::encoder() const {
  if (size == "article") return {};  // BERT-base
  return BertSizes::read(std::filesystem::path(weights) / "config.json");
}

void link_options(BertClassifierOptions& model, LabelledTextsOptions& data) {
  if (data.vocabulary.empty()) data.vocabulary = (std::filesystem::path(model.weights) / "vocab.txt").string();
  data.max_length = std::min(data.max_length, model.encoder().max_length);
  model.num_classes = std::ssize(read_labelled_texts(data.path).classes);
  if (const int64_t tokens = WordPiece(data.vocabulary).size(); tokens > model.encoder().vocab_size) {
    throw UsageError(fmt::format("'{}' has {} tokens, but the model knows {}: give the vocabulary of its weights",
                                 data.vocabulary, tokens, model.encoder().vocab_size));
  }
}

BertClassifier::BertClassifier(Options options) : options_(std::move(options)) {
  save_hyper_parameters(options_);
  const BertSizes sizes = options_.encoder();
  bert_ = register_module("bert", Bert(sizes));
  dropout_ = register_module("dropout", torch::nn::Dropout(options_.dropout));
  head_ = register_module("head", torch::nn::Linear(sizes.hidden, options_.num_classes));
  if (options_.pretrained && options_.size != "article") bert_->load_huggingface(options_.weights);
}

at::Tensor BertClassifier::logits(const Batch& batch) {
  const auto pooled = bert_->forward(batch["input_ids"], batch["attention_mask"]).pooled;
  return head_->forward(dropout_->forward(pooled));
}

at::Tensor BertClassifier::training_step(const Batch& batch, int64_t) {
  const at::Tensor scores = logits(batch), loss = F::cross_entropy(scores, batch["targets"]);
  log("train_loss", loss, {.prog_bar = true});
  log("acc", accuracy(scores, batch["targets"]), {.prog_bar = true});
  return loss;
}

void BertClassifier::validation_step(const Batch& batch, int64_t) {
  const at::Tensor scores = logits(batch);
  log("val_loss", F::cross_entropy(scores, batch["targets"]), {.prog_bar = true});
  log("val_acc", accuracy(scores, batch["targets"]), {.prog_bar = true});
}

Optimizers BertClassifier::configure_optimizers() {
  const int64_t total_steps = estimated_stepping_batches();
  return {optim::AdamW(parameters(), {.lr = options_.lr}),
          {.scheduler = optim::WarmupLinearLR::make({.warmup_steps = total_steps / 10, .total_steps = total_steps}),
           .interval = "step"}};
}

}  // namespace bert_classifier
