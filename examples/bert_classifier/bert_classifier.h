#pragma once

#include <string>
#include <utility>

#include "examples/bert_classifier/bert.h"
#include "examples/bert_classifier/labelled_texts.h"
#include "fulgur.h"

namespace bert_classifier {

struct BertClassifierOptions {
  std::string weights;           // folder with config.json, model.safetensors and vocab.txt of the Hugging Face hub
  bool pretrained = true;        // false: random weights
  std::string size = "weights";  // as config.json says; "article": BERT-base, with random weights
  int64_t num_classes = 2;
  double dropout = 0.3;  // in front of the head
  double lr = 2e-4;      // at its peak; for BERT-base, 2e-5 to 5e-5
  void describe(fulgur::FieldVisitor& visit);
  BertSizes encoder() const;  // throws what BertSizes::read throws
};

// Sets the classes, the vocabulary of the weights' folder unless one is given, and as many tokens as the model has
// positions if more are asked for. Throws what BertSizes::read, read_labelled_texts and WordPiece throw, and UsageError
// for a vocabulary with more tokens than the model has.
void link_options(BertClassifierOptions& model, LabelledTextsOptions& data);

// A BERT with a head on its pooled output, fine-tuned as a whole by AdamW: a linear warm-up over the first tenth of all
// steps, then a linear decay. Logs acc and train_loss, val_acc and val_loss.
class BertClassifier final : public fulgur::Module {
 public:
  using Options = BertClassifierOptions;
  explicit BertClassifier(Options options);

  at::Tensor training_step(const fulgur::Batch& batch, int64_t) override;
  void validation_step(const fulgur::Batch& batch, int64_t) override;
  fulgur::Optimizers configure_optimizers() override;

 private:
  at::Tensor logits(const fulgur::Batch& batch);

  Options options_;
  Bert bert_{nullptr};
  torch::nn::Dropout dropout_{nullptr};
  torch::nn::Linear head_{nullptr};
};

}  // namespace bert_classifier
