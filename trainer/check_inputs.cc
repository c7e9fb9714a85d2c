#include "fulgur/trainer/check_inputs.h"

#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/core/make_module.h"

namespace fulgur {
namespace {

void check_loader(const Loader* loader, std::string_view name) {
  require(loader != nullptr,
          fmt::format("there is no {0} loader; pass {{.{0} = ...}} or override {0}_dataloader()", name));
  require(
      loader->num_batches().value_or(1) > 0,
      fmt::format("the {} loader is empty: it yields no batch. Is the dataset empty, or shorter than batch_size with "
                  "drop_last?",
                  name));
}

}  // namespace

void require(bool condition, const std::string& message) {
  if (!condition) throw SetupError(message);
}

void require_step(const ModuleHandle& module, bool overridden, std::string_view signature, std::string_view need) {
  require(overridden, fmt::format("{} does not override {}; {}", module->name(), signature, need));
}

void require_fit_hooks(const ModuleHandle& module, const OptimizerChoice& optimizer) {
  require_step(module, module.hooks().training_step, "at::Tensor training_step(const Batch&, int64_t)",
               "fit needs training_step, configure_optimizers and a train loader");
  const bool makes_its_own = module.hooks().configure_optimizers;
  require(!makes_its_own || optimizer.is_none(),
          fmt::format("the option optimizer is {}, but {} has a configure_optimizers of its own; leave out one or the "
                      "other",
                      optimizer.name(), module->name()));
  require_optimizer(*module, makes_its_own || !optimizer.is_none());
  for (const auto& buffer : module->named_buffers()) {
    const bool is_shared = buffer.value().defined() && at::has_internal_overlap(buffer.value()) == at::MemOverlap::Yes;
    require(!is_shared, fmt::format("elements of the buffer '{}' share memory, as expand() makes them, so that no "
                                    "checkpoint could be loaded into it; register a contiguous() copy",
                                    buffer.key()));
  }
}

void require_optimizer(const Module& module, bool has_one) {
  require(has_one,
          fmt::format("{} has no optimizer: override Optimizers configure_optimizers() and return one, such as "
                      "optim::AdamW(parameters(), {{.lr = 1e-3}}), or name one in the options: --optimizer=AdamW",
                      module.name()));
}

std::shared_ptr<Loader> checked(std::shared_ptr<Loader> loader, std::string_view name) {
  check_loader(loader.get(), name);
  return loader;
}

LoaderList checked(LoaderList loaders, std::string_view name) {
  if (loaders.empty()) check_loader(nullptr, name);
  require(std::ranges::count(loaders, nullptr) == 0,
          fmt::format("one of the {} loaders is a null pointer; leave it out", name));
  for (const auto& loader : loaders) check_loader(loader.get(), name);
  return loaders;
}

LoaderList validation_loaders(const ModuleHandle& module, DataModule& data, const BatchLimit& limit, bool warn) {
  if (limit.is_zero()) return {};
  LoaderList loaders = data.val_dataloader();
  require(loaders.empty() || module.hooks().validation_step,
          fmt::format("there is validation data, but {} does not override void validation_step(const Batch&, int64_t); "
                      "write it, or leave the val loader out",
                      module->name()));
  if (warn && loaders.empty() && module.hooks().validation_step) {
    log_warning("{} has a validation_step, but there is no val loader; fit does not validate", module->name());
  }
  return loaders.empty() ? loaders : checked(std::move(loaders), "val");
}

}  // namespace fulgur
