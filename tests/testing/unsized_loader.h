#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "fulgur/core/loader.h"

namespace fulgur::testing {

// The batches of another loader without their number, as in a stream.
class UnsizedLoader final : public Loader {
 public:
  explicit UnsizedLoader(std::shared_ptr<Loader> loader) : loader_(std::move(loader)) {}
  static std::shared_ptr<UnsizedLoader> make(std::shared_ptr<Loader> loader) {
    return std::make_shared<UnsizedLoader>(std::move(loader));
  }
  void begin_epoch(int64_t epoch) override { loader_->begin_epoch(epoch); }
  std::optional<Batch> next() override { return loader_->next(); }
  std::optional<int64_t> num_batches() const override { return std::nullopt; }

 private:
  std::shared_ptr<Loader> loader_;
};

}  // namespace fulgur::testing
