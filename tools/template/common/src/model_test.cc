// The model learns its data: a run without files whose accuracy is compared with what it must reach.
#include <cstdio>
#include <stdexcept>

#include "data.h"
#include "fulgur.h"
#include "model.h"

int main() {
  return fulgur::exit_code_of([] {
    fulgur::seed_everything(1);
    fulgur::Trainer trainer({.accelerator = "cpu",
                             .max_epochs = 20,
                             .enable_progress_bar = false,
                             .enable_model_summary = false,
                             .enable_checkpointing = false,
                             .logger = false});
    const auto model = fulgur::make_module<Model>(ModelOptions{});
    Data data(DataOptions{}, /*seed=*/1);
    trainer.fit(model, data);
    const double accuracy = trainer.test(model, data).at("test_acc");
    std::printf("accuracy %.3f\n", accuracy);
    if (accuracy < 0.95) throw std::runtime_error("the accuracy is below 0.95");
  });
}
