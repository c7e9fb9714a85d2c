#pragma once

#include <memory>
#include <string_view>

#include "core/loader.h"
#include "core/run_state.h"

namespace fulgur {

// The loaders of a run: `trainer.fit(module, {.train = train, .val = val})`. Null where there is none.
struct Loaders {
  std::shared_ptr<Loader> train{};
  std::shared_ptr<Loader> val{};
  std::shared_ptr<Loader> test{};
  std::shared_ptr<Loader> predict{};
};

// Everything about a data set in one reusable place: how to get it, split it and batch it. Hooks stand in the order in
// which they fire; each comes before the Module's hook of the same name.
class DataModule {
 public:
  virtual ~DataModule() = default;
  virtual void prepare_data() {}  // download, unpack: once per machine
  virtual void setup(EntryPoint) {}
  virtual std::shared_ptr<Loader> train_dataloader() { return nullptr; }
  virtual std::shared_ptr<Loader> val_dataloader() { return nullptr; }
  virtual std::shared_ptr<Loader> test_dataloader() { return nullptr; }
  virtual std::shared_ptr<Loader> predict_dataloader() { return nullptr; }
  virtual void teardown(EntryPoint) {}
};

}  // namespace fulgur
