#pragma once

#include <string>
#include <vector>

namespace fulgur::nn {

// A module whose batch norms are not modules of C++, such as Program: plain_batch_norm_names() asks it for them.
class BatchNormOwner {
 public:
  virtual ~BatchNormOwner() = default;

  // The paths within the module ("encoder.norm"; "" for itself) of batch norms whose statistics are those of one rank.
  virtual std::vector<std::string> batch_norm_paths() const = 0;
};

}  // namespace fulgur::nn
