#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type_base.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/programs/graph.h"

namespace fulgur::program {

// Where one argument of a call comes from: a constant, a value, or a list of both. The values of a running graph lie in
// slots.
class Source {
 public:
  explicit Source(c10::IValue constant) : constant_(std::move(constant)) {}
  Source(size_t slot, c10::TypePtr type) : slot_(slot), type_(std::move(type)) {}
  Source(std::vector<Source> items, c10::TypePtr element) : items_(std::move(items)), type_(std::move(element)) {}

  static constexpr size_t kNoSlot = static_cast<size_t>(-1);

  // Returns the argument. The last use of a value empties its slot.
  c10::IValue load(std::vector<c10::IValue>& slots) const {
    if (!items_.empty()) return load_list(slots);
    if (slot_ == kNoSlot) return constant_;
    c10::IValue value = is_last_use_ ? std::move(slots[slot_]) : slots[slot_];
    return type_ ? converted(std::move(value)) : value;
  }

  // Calls visit(source) for each value among the argument, from the last one on.
  template <class Visit>
  void for_each_value(const Visit& visit) {
    for (auto item = items_.rbegin(); item != items_.rend(); ++item) item->for_each_value(visit);
    if (slot_ != kNoSlot) visit(*this);
  }
  size_t slot() const { return slot_; }
  void set_last_use() { is_last_use_ = true; }

 private:
  c10::IValue load_list(std::vector<c10::IValue>& slots) const;
  c10::IValue converted(c10::IValue value) const;

  c10::IValue constant_{};
  size_t slot_ = kNoSlot;
  bool is_last_use_ = false;
  std::vector<Source> items_{};
  c10::TypePtr type_{};  // what the value, or each element of the list, must be; null: anything
};

// `type`: what the operator's schema asks for; null: anything. `repeat`: the length of the list that a single number
// stands for. `device` replaces every device in the graph. Throws CheckpointError if the schema does not
// take the argument.
Source to_source(const Argument& argument, c10::TypePtr type, std::optional<int32_t> repeat, c10::Device device);

}  // namespace fulgur::program
