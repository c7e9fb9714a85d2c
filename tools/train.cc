// Trains a model that Python has exported on a table, without a line of C++:
//   bazel run //tools:train -- --model.program=net.pt2 --model.loss=cross_entropy --optimizer=AdamW
//       --data.path=train.parquet --data.schema.target=label
//   bazel run //tools:train -- predict --ckpt_path=best --data.path=new.parquet
// The features of the table are the input that no tensor of the table has the name of; all options: --help=all.
#include <arrow/table.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fulgur.h"
#include "fulgur/base/names.h"
#include "fulgur/data/tables/read_table.h"
#include "fulgur/data/tables/table_data.h"
#include "fulgur/programs/program.h"

namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

struct TrainedProgramOptions {
  std::string program{};
  std::string loss = "cross_entropy";
  std::string output{};
  std::string checkpoint{};
  void describe(FieldVisitor& visit) {
    visit({.name = "program", .help = "archive of torch.export.save() to train, a .pt2 file", .is_common = true},
          &program);
    visit({.name = "loss",
           .help = "loss between the program's output and the label",
           .choices = {"cross_entropy", "binary_cross_entropy", "mse", "l1"},
           .is_common = true},
          &loss);
    visit({.name = "output", .help = "output of the program that the loss takes; empty: its first one"}, &output);
    visit({.name = "checkpoint",
           .help = "glob of module paths whose activations are computed again in backward; empty: none"},
          &checkpoint);
  }
};

class TrainedProgram final : public Module {
 public:
  using Options = TrainedProgramOptions;
  explicit TrainedProgram(Options options) : options_(std::move(options)) {
    if (options_.program.empty()) throw UsageError("no program is given; write --model.program=<file>.pt2");
    net_ = register_module("net", nn::Program(options_.program, {.checkpoint = options_.checkpoint}));
    save_hyper_parameters(options_);
    const std::vector<std::string> outputs = net_->output_names();
    if (options_.output.empty() && !outputs.empty()) options_.output = outputs.front();
    if (std::ranges::find(outputs, options_.output) == outputs.end()) {
      throw UsageError(unknown_name_message("output of the program", options_.output, outputs));
    }
  }

  at::Tensor training_step(const Batch& batch, int64_t) override { return evaluate("train", batch); }
  void validation_step(const Batch& batch, int64_t) override { evaluate("val", batch); }
  void test_step(const Batch& batch, int64_t) override { evaluate("test", batch); }
  Batch predict_step(const Batch& batch, int64_t) override { return net_->forward(inputs_of(batch)); }

 private:
  at::Tensor evaluate(const std::string& stage, const Batch& batch) {
    const at::Tensor output = net_->forward(inputs_of(batch))[options_.output];
    const at::Tensor loss = loss_of(output, batch["label"]);
    log(stage + "_loss", loss, {.prog_bar = true});
    if (options_.loss == "cross_entropy") {
      log(stage + "_acc", output.argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
    }
    return loss;
  }

  // The batch, in which the table's features have the name of the one input that it lacks.
  Batch inputs_of(const Batch& batch) const {
    std::vector<std::string> missing = net_->input_names();
    std::erase_if(missing, [&](const std::string& name) { return batch.contains(name); });
    if (missing.size() != 1 || !batch.contains("features")) return batch;
    return batch.with(missing.front(), batch["features"]);
  }

  at::Tensor loss_of(const at::Tensor& output, const at::Tensor& label) const {
    require_fit(output, label);
    if (options_.loss == "cross_entropy") return F::cross_entropy(output, label);
    const at::Tensor target = label.to(output.scalar_type()).reshape(output.sizes());
    if (options_.loss == "binary_cross_entropy") return F::binary_cross_entropy_with_logits(output, target);
    return options_.loss == "mse" ? F::mse_loss(output, target) : F::l1_loss(output, target);
  }

  // Throws UsageError unless the loss can compare them.
  void require_fit(const at::Tensor& output, const at::Tensor& label) const {
    const auto refuse = [&](const char* takes, const char* advice) {
      throw UsageError(
          fmt::format("--model.loss={} takes {}, but '{}' is {} of sizes {}, and the label {} of sizes {}; {}",
                      options_.loss, takes, options_.output, toString(output.scalar_type()), output.sizes(),
                      toString(label.scalar_type()), label.sizes(), advice));
    };
    if (options_.loss != "cross_entropy") {
      if (output.numel() != label.numel()) {
        refuse("an output with one number for each label",
               "write --model.loss=cross_entropy if the label is a class, name another output with --model.output, or "
               "export a program with one number for each sample");
      }
      const bool is_class = at::isIntegralType(label.scalar_type(), /*includeBool=*/false);
      if (options_.loss != "binary_cross_entropy" && is_class) {
        refuse("numbers as labels", "write --data.schema.target_type=number, or --model.loss=cross_entropy");
      }
      if (is_class && label.gt(1).any().item<bool>()) {
        refuse("labels of two classes", "write --model.loss=cross_entropy");
      }
      return;
    }
    if (!at::isIntegralType(label.scalar_type(), /*includeBool=*/false)) {
      refuse("classes as labels",
             "write --model.loss=mse, or --data.schema.target_type=category if the numbers are classes");
    }
    if (output.dim() >= 2 && output.size(0) == label.size(0)) return;
    refuse(
        "an output with a number for each class of each sample",
        "name another output with --model.output, or write --model.loss=binary_cross_entropy if there are two classes");
  }

  Options options_;
  nn::Program net_{nullptr};
};

// A table with a label, which only predict can do without.
class LabelledTable final : public TableData {
 public:
  LabelledTable(Options options, uint64_t seed) : TableData(options, seed), options_(std::move(options)) {}

  void setup(EntryPoint entry_point) override {
    predicts_ = entry_point == EntryPoint::predict;
    if (predicts_) return;
    TableData::setup(entry_point);
    if (entry_point == EntryPoint::fit) require_label();  // a checkpoint may bring it to the others
  }
  LoaderList val_dataloader() override {
    require_label();
    return TableData::val_dataloader();
  }
  LoaderList test_dataloader() override {
    require_label();
    return TableData::test_dataloader();
  }

  // All rows of the table in their order, as training has read them; without a checkpoint by their own statistics.
  LoaderList predict_dataloader() override {
    if (!trained_) TableData::setup(EntryPoint::predict);
    const TableSchema& columns = trained_ ? *trained_ : schema();
    const auto table = read_table(options_.path, options_.read, columns.text_columns());
    return DataLoader::make(TensorDataset::make(columns.encode_inputs(*table)), {.batch_size = options_.batch_size});
  }

  void load_state(const State& state) override {
    if (!predicts_) return TableData::load_state(state);
    if (!state.empty()) trained_ = TableSchema::from_state(state);
  }

 private:
  void require_label() const {
    if (!state().get<std::string>("target").empty()) return;
    const auto table = read_table(options_.path, options_.read);
    throw UsageError(
        fmt::format("no column of '{}' is the label, with which the loss compares the program's output; "
                    "write --data.schema.target=<column>; known: {}",
                    options_.path.string(), fmt::join(table->ColumnNames(), ", ")));
  }

  Options options_;
  bool predicts_ = false;
  std::optional<TableSchema> trained_{};  // the schema in the checkpoint that predict reads
};

}  // namespace

int main(int argc, char** argv) {
  return cli::run<TrainedProgram, LabelledTable>(
      argc, argv,
      {.trainer = {.checkpoint = {.monitor = "val_loss"}},
       .after_fit = [](Trainer& trainer, const auto& module, auto& data) {
         if (data.test_dataloader().empty()) return;
         trainer.test(module, data, trainer.options().enable_checkpointing.value() ? "best" : "");
       }});
}
