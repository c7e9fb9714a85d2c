#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

namespace fulgur {

// Restores, in its destructor, the train or eval mode that every submodule had: parents first, because train() also
// sets the children.
class ScopedModes {
 public:
  explicit ScopedModes(torch::nn::Module& module) {
    for (const auto& part : module.modules()) modes_.emplace_back(part, part->is_training());
  }
  ~ScopedModes() {
    for (const auto& [part, was_training] : modes_) part->train(was_training);
  }
  ScopedModes(const ScopedModes&) = delete;
  ScopedModes& operator=(const ScopedModes&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
};

}  // namespace fulgur
