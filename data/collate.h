#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/core/batch.h"

namespace fulgur {

// Makes a batch of samples, which are in the order of the batch. Several threads may call it at once.
using Collate = std::function<Batch(const std::vector<Batch>& samples)>;

// Pads dim 0 of the samples' tensors to the length of the longest sample and stacks them; tensors without a dimension
// are stacked unpadded. Each padded name gets a companion `<name>_mask`: bool [batch, length], true where the sample
// has a value.
//   DataLoader::make(texts, {.batch_size = 32, .collate = pad_to_longest({{"tokens", 0}, {"targets", -100}})});
// `values`: the padding value for each name; other names are padded with 0. Throws c10::ValueError, with the name, if
// samples differ in names or in dimensions other than the first.
Collate pad_to_longest(std::vector<std::pair<std::string, double>> values = {});

}  // namespace fulgur
