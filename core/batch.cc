#include "fulgur/core/batch.h"

#include <ATen/ops/narrow.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "fulgur/base/names.h"

namespace fulgur {

Batch::Batch(std::initializer_list<Entry> entries) : Batch(std::vector<Entry>(entries)) {}

Batch::Batch(std::vector<Entry> entries) {
  for (Entry& entry : entries) {
    TORCH_CHECK_VALUE(!contains(entry.first), "a Batch has the name '", entry.first, "' twice");
    TORCH_CHECK_VALUE(entry.second.defined(), "the tensor '", entry.first, "' of a Batch is undefined");
    entries_.push_back(std::move(entry));
  }
}

Batch Batch::with(std::string_view name, at::Tensor tensor) const {
  TORCH_CHECK_VALUE(tensor.defined(), "the tensor '", name, "' of a Batch is undefined");
  Batch changed = *this;
  const auto entry = std::ranges::find(changed.entries_, name, &Entry::first);
  if (entry == changed.entries_.end()) {
    changed.entries_.emplace_back(name, std::move(tensor));
  } else {
    entry->second = std::move(tensor);
  }
  return changed;
}

const at::Tensor* Batch::find(std::string_view name) const {
  const auto entry = std::find_if(begin(), end(), [&](const Entry& e) { return e.first == name; });
  return entry == end() ? nullptr : &entry->second;
}

const at::Tensor& Batch::operator[](std::string_view name) const {
  if (const at::Tensor* tensor = find(name)) return *tensor;
  std::vector<std::string> names;
  for (const Entry& entry : entries_) names.push_back(entry.first);
  TORCH_CHECK_INDEX(false, unknown_name_message("tensor of a Batch", name, names));
}

int64_t Batch::batch_size() const {
  const Entry* first = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.second.dim() == 0) continue;
    if (first == nullptr) first = &entry;
    TORCH_CHECK_VALUE(entry.second.size(0) == first->second.size(0),
                      "dim 0 of a Batch must be the number of samples: '", first->first, "' has ",
                      first->second.size(0), ", '", entry.first, "' has ", entry.second.size(0));
  }
  TORCH_CHECK_VALUE(first != nullptr, "a Batch without a tensor of at least one dimension has no batch size");
  return first->second.size(0);
}

Batch Batch::to(c10::Device device, bool non_blocking) const {
  Batch moved = *this;
  for (Entry& entry : moved.entries_) {
    if (entry.second.device() != device) entry.second = entry.second.to(device, non_blocking);
  }
  return moved;
}

Batch Batch::pin() const {
  Batch pinned = *this;
  for (auto& [name, tensor] : pinned.entries_) {
    if (tensor.is_cpu() && tensor.layout() == at::kStrided) tensor = tensor.pin_memory();  // shared if it is pinned
  }
  return pinned;
}

std::vector<Batch> Batch::split(int64_t parts) const {
  TORCH_CHECK_VALUE(parts >= 1, "a Batch splits into at least 1 part; got ", parts);
  const int64_t total = batch_size();
  const int64_t part_size = std::max<int64_t>(1, (total + parts - 1) / parts);
  std::vector<Batch> batches;
  for (int64_t start = 0; start < total; start += part_size) {
    Batch part = *this;
    for (Entry& entry : part.entries_) {
      if (entry.second.dim() > 0) entry.second = entry.second.narrow(0, start, std::min(part_size, total - start));
    }
    batches.push_back(std::move(part));
  }
  return batches;
}

}  // namespace fulgur
