#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fulgur {

// What one step works on: an ordered list of named tensors. Dim 0 of every tensor counts samples; a 0-dim tensor (a
// temperature, a flag) belongs to all of them. A handle like at::Tensor: copies share the tensors.
//   Batch batch{{"image", images}, {"label", labels}};
//   batch["image"];
class Batch {
 public:
  using Entry = std::pair<std::string, at::Tensor>;

  Batch() = default;
  Batch(std::initializer_list<Entry> entries);  // throws c10::ValueError for a duplicate name
  explicit Batch(std::vector<Entry> entries);   // throws c10::ValueError for a duplicate name

  // Returns a copy of the batch in which the tensor called `name` is `tensor`: in its old place, or appended if the
  // name is new. Throws c10::ValueError if the tensor is undefined.
  Batch with(std::string_view name, at::Tensor tensor) const;

  // Throws c10::IndexError that lists the names and the nearest one.
  const at::Tensor& operator[](std::string_view name) const;
  const at::Tensor& operator[](std::integral auto) const = delete;  // batch[0] would be a null string
  const at::Tensor& operator[](std::nullptr_t) const = delete;

  bool contains(std::string_view name) const { return find(name) != nullptr; }
  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }  // number of tensors
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

  // Dim 0 of the tensors that have one. Throws c10::ValueError, with the name, if they differ or if there are none.
  int64_t batch_size() const;

  // The tensors on `device`; tensors that are there already are shared, not copied.
  Batch to(c10::Device device, bool non_blocking = false) const;

  // The tensors in page-locked memory, from where a copy to a GPU can run in the background. Needs an accelerator. A
  // sparse tensor, or one that is on an accelerator already, is shared as it is.
  Batch pin() const;

  // At most `parts` batches of equal size along dim 0, the last one shorter if it must be; views, not copies. 0-dim
  // tensors are in every part. Throws as batch_size() does.
  std::vector<Batch> split(int64_t parts) const;

 private:
  const at::Tensor* find(std::string_view name) const;

  std::vector<Entry> entries_;
};

}  // namespace fulgur
