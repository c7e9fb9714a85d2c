#pragma once

#include <exception>
#include <memory>
#include <utility>

#include "fulgur/base/state.h"
#include "fulgur/core/loader.h"
#include "fulgur/core/run_state.h"

namespace fulgur {

// The loaders of a run: `trainer.fit(module, {.train = train, .val = val})`. A loader not given is null or empty.
struct Loaders {
  std::shared_ptr<Loader> train{};
  LoaderList val{};  // one, or several: {a, b}
  LoaderList test{};
  LoaderList predict{};
};

// Everything about a data set in one reusable place: how to get it, split it and batch it. Hooks are declared in the
// order in which they fire; each runs before the Module's hook of the same name.
class DataModule {
 public:
  virtual ~DataModule() = default;
  virtual void prepare_data() {}  // download, unpack: once per machine
  virtual void setup(EntryPoint) {}
  virtual std::shared_ptr<Loader> train_dataloader() { return nullptr; }
  virtual LoaderList val_dataloader() { return nullptr; }
  virtual LoaderList test_dataloader() { return nullptr; }
  virtual LoaderList predict_dataloader() { return nullptr; }

  // Transforms each batch before and after its transfer to the device; the Module's hook of the same name gets the
  // result.
  virtual Batch on_before_batch_transfer(Batch batch) { return batch; }
  virtual Batch on_after_batch_transfer(Batch batch) { return batch; }

  // What a checkpoint saves of the data module. load_state() is called by a fit that resumes, and by validate, test and
  // predict with a checkpoint that has such a state; after setup, before the loaders are requested.
  virtual State state() const { return {}; }
  virtual void load_state(const State&) {}

  virtual void on_exception(const std::exception&) {}
  virtual void teardown(EntryPoint) {}
};

// A data module of loaders that exist already.
class LoadersDataModule final : public DataModule {
 public:
  explicit LoadersDataModule(Loaders loaders) : loaders_(std::move(loaders)) {}
  std::shared_ptr<Loader> train_dataloader() override { return loaders_.train; }
  LoaderList val_dataloader() override { return loaders_.val; }
  LoaderList test_dataloader() override { return loaders_.test; }
  LoaderList predict_dataloader() override { return loaders_.predict; }

 private:
  Loaders loaders_;
};

}  // namespace fulgur
