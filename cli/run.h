#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>

#include "fulgur/base/describe.h"
#include "fulgur/core/make_module.h"
#include "fulgur/core/module.h"
#include "fulgur/core/overridden_hooks.h"
#include "fulgur/data/data_module.h"
#include "fulgur/trainer/trainer.h"

namespace fulgur::cli {
namespace internal {

struct NoOptions {
  void describe(FieldVisitor&) {}
};
template <class T>
struct OptionsOf {
  using Type = NoOptions;
};
template <class T>
  requires requires { typename T::Options; }
struct OptionsOf<T> {
  using Type = typename T::Options;
};

// Makes a T from its options and the seed, from as much of these as its constructor takes.
template <class T, class Make>
auto make_with(const typename OptionsOf<T>::Type& options, uint64_t seed, const Make& make) {
  using Options = typename OptionsOf<T>::Type;
  if constexpr (std::constructible_from<T, Options, uint64_t>) {
    return make(options, seed);
  } else if constexpr (std::constructible_from<T, Options>) {
    return make(options);
  } else {
    static_assert(std::default_initializable<T>,
                  "a Module or DataModule of cli::run is made from its Options, from its Options and a uint64_t seed, "
                  "or from nothing");
    return make();
  }
}

// A Program without its types.
struct AnyProgram {
  TrainerOptions* trainer;
  int64_t* seed;
  DescribeFields describe_model, describe_data;
  std::function<void()> link;  // sets the options that follow from others
  std::function<ModuleHandle()> make_module;
  std::function<std::unique_ptr<DataModule>()> make_data;
  std::function<void(Trainer&)> after_fit;
  OverriddenHooks hooks;  // --help lists the commands for which the module has a step
};

int run(int argc, char** argv, const AnyProgram& program);

}  // namespace internal

// The defaults of a program, and what it does besides training.
template <class M, class D>
struct Program {
  using ModelOptions = typename internal::OptionsOf<M>::Type;
  using DataOptions = typename internal::OptionsOf<D>::Type;

  TrainerOptions trainer{};
  ModelOptions model{};
  DataOptions data{};
  int64_t seed = 1;  // seed_everything gets it, and M and D if they take a seed

  // Sets options that follow from others, such as a length that both have; called once all options are read.
  std::function<void(ModelOptions&, DataOptions&)> link{};

  // Called when fit has ended, on every rank.
  std::function<void(Trainer&, const std::shared_ptr<M>&, D&)> after_fit{};
};

// A complete main() for a Module and a DataModule:
//   int main(int argc, char** argv) { return cli::run<Digits, DigitsData>(argc, argv, {.seed = 7}); }
// Both are made from their Options, a struct that describes itself; a constructor may also take the seed, or nothing.
//   program [command] [--max_epochs=5] [--model.lr=1e-3] [--data.batch_size=32] [--seed=1] [--config=run.toml]
// commands: fit (if none is given), validate, test, predict, find_lr, find_batch_size, estimate_memory; --help lists
// those that M has a step for, with all options. fit writes config.toml, all its options, and env.json, where it ran,
// into the run's folder, and lets runs/latest point there. Checkpoints have the model's options as hyper-parameters,
// unless the Module saves others; validate, test and predict take the model's options from their checkpoint, except
// those that are given.
// --ckpt_path=best or last looks in the run called --name, or in the latest one. Returns the exit code, as exit_code_of
// does.
template <std::derived_from<Module> M, std::derived_from<DataModule> D>
int run(int argc, char** argv, Program<M, D> program = {}) {
  std::shared_ptr<M> model;
  D* data = nullptr;
  const auto seed = [&] { return static_cast<uint64_t>(program.seed); };
  return internal::run(argc, argv,
                       {.trainer = &program.trainer,
                        .seed = &program.seed,
                        .describe_model = [&](FieldVisitor& visit) { program.model.describe(visit); },
                        .describe_data = [&](FieldVisitor& visit) { program.data.describe(visit); },
                        .link =
                            [&] {
                              if (program.link) program.link(program.model, program.data);
                            },
                        .make_module = [&]() -> ModuleHandle {
                          model = internal::make_with<M>(program.model, seed(), [](const auto&... arguments) {
                            return make_module<M>(arguments...);
                          });
                          if (model->hyper_parameters().empty()) model->save_hyper_parameters(program.model);
                          return model;
                        },
                        .make_data = [&]() -> std::unique_ptr<DataModule> {
                          auto made = internal::make_with<D>(program.data, seed(), [](const auto&... arguments) {
                            return std::make_unique<D>(arguments...);
                          });
                          data = made.get();
                          return made;
                        },
                        .after_fit =
                            [&](Trainer& trainer) {
                              if (program.after_fit) program.after_fit(trainer, model, *data);
                            },
                        .hooks = overridden_hooks<M>()});
}

}  // namespace fulgur::cli
