#include "fulgur/checkpoint/state_json.h"

#include <type_traits>
#include <variant>

#include "fulgur/checkpoint/formats/flat_json.h"

namespace fulgur {

std::string state_to_json(const State& state, NamedTensors& tensors) {
  FlatValues values;
  for (const auto& [name, value] : state.values()) {
    std::visit(
        [&, &tensor_name = name](const auto& held) {
          if constexpr (std::is_same_v<std::decay_t<decltype(held)>, at::Tensor>) {
            tensors.emplace_back(tensor_name, held);
            values.emplace(tensor_name, TensorReference{tensor_name});
          } else {
            values.emplace(tensor_name, held);
          }
        },
        value);
  }
  return to_flat_json(values);
}

State state_from_json(std::string_view text, std::string_view file,
                      const std::function<at::Tensor(const std::string& name)>& lookup) {
  State state;
  for (const auto& [name, value] : parse_flat_json(text, file)) {
    std::visit(
        [&, &value_name = name](const auto& held) {
          if constexpr (std::is_same_v<std::decay_t<decltype(held)>, TensorReference>) {
            state.set(value_name, lookup(held.name));
          } else {
            state.set(value_name, held);
          }
        },
        value);
  }
  return state;
}

}  // namespace fulgur
