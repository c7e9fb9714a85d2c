// Trains a model that Python has exported on a table, without a line of C++:
//   bazel run //tools:train -- --model.program=net.pt2 --model.loss=cross_entropy --optimizer=AdamW
//       --data.path=train.parquet --data.schema.target=label
// The features of the table are the input that no tensor of the table has the name of; all options: --help=all.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fulgur.h"
#include "fulgur/base/names.h"
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
    if (options_.loss == "cross_entropy") return F::cross_entropy(output, label);
    const at::Tensor target = label.to(output.scalar_type()).reshape(output.sizes());
    if (options_.loss == "binary_cross_entropy") return F::binary_cross_entropy_with_logits(output, target);
    return options_.loss == "mse" ? F::mse_loss(output, target) : F::l1_loss(output, target);
  }

  Options options_;
  nn::Program net_{nullptr};
};

}  // namespace

int main(int argc, char** argv) {
  return cli::run<TrainedProgram, TableData>(
      argc, argv,
      {.trainer = {.checkpoint = {.monitor = "val_loss"}},
       .after_fit = [](Trainer& trainer, const auto& module, auto& data) {
         if (data.test_dataloader().empty()) return;
         trainer.test(module, data, trainer.options().enable_checkpointing.value() ? "best" : "");
       }});
}
