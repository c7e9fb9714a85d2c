#include "fulgur/programs/input_checker.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <set>
#include <variant>
#include <vector>

#include "fulgur/base/names.h"

namespace fulgur::program {
namespace {

using c10::IValue;

std::string text_of(const Range& range) {
  const auto number = [](const std::optional<int64_t>& limit, const char* otherwise) {
    return limit ? std::to_string(*limit) : otherwise;
  };
  return fmt::format("{} to {}", number(range.min, "0"), number(range.max, "any size"));
}

// "2 * s77 + 1"
std::string text_of(const SymbolicSize& size) {
  std::string text = size.symbol;
  if (size.factor != 1) text = fmt::format("{} * {}", size.factor, text);
  if (size.offset != 0) text += fmt::format(" {} {}", size.offset < 0 ? '-' : '+', std::abs(size.offset));
  return text;
}

// Python lets sizes of 0 and 1 pass where a range begins at 2, which export writes for any dynamic size.
bool is_within(int64_t size, const Range& range) {
  constexpr int64_t kFromAny = 2;
  return (!range.min || *range.min <= kFromAny || size >= *range.min) && (!range.max || size <= *range.max);
}

}  // namespace

std::string InputChecker::Place::text() const {
  return dim ? fmt::format("dimension {} of '{}'", *dim, input->name) : fmt::format("'{}'", input->name);
}

IValue InputChecker::value_of(const Input& input, const Batch& batch) {
  if (!batch.contains(input.name)) fail_by_missing(input, batch);
  const at::Tensor& tensor = batch[input.name];
  if (!input.dtype) return number_of(input, tensor);
  const bool both_floating = at::isFloatingType(*input.dtype) && tensor.is_floating_point();
  TORCH_CHECK_VALUE(both_floating || tensor.scalar_type() == *input.dtype,
                    fmt::format("input '{}' of {} is {}, but the program was exported for {}; convert it by to()",
                                input.name, file_, toString(tensor.scalar_type()), toString(*input.dtype)));
  TORCH_CHECK_VALUE(tensor.dim() == static_cast<int64_t>(input.sizes.size()),
                    fmt::format("input '{}' of {} has sizes {}, but the program was exported for {} dimensions",
                                input.name, file_, tensor.sizes(), input.sizes.size()));
  for (size_t dim = 0; dim < input.sizes.size(); ++dim) {
    check_size(tensor.sizes()[dim], input.sizes[dim], {.input = &input, .dim = dim});
  }
  return tensor;
}

void InputChecker::check_fixed(size_t place, const Batch& batch) const {
  const Input& input = program_.inputs[place];
  const auto* fixed = std::get_if<IValue>(&program_.graph.inputs[place].what);
  const bool is_number = fixed != nullptr && (fixed->isInt() || fixed->isDouble() || fixed->isBool());
  if (!is_number || !batch.contains(input.name)) return;
  const at::Tensor& tensor = batch[input.name];
  const double exported = fixed->isBool() ? static_cast<double>(fixed->toBool()) : fixed->toScalar().toDouble();
  const bool is_same =
      tensor.numel() == 1 &&
      at::full({}, exported, at::TensorOptions(tensor.scalar_type())).equal(tensor.detach().cpu().reshape({}));
  TORCH_CHECK_VALUE(is_same,
                    fmt::format("input '{}' of {} is fixed: the program was exported for {} alone; take it out "
                                "of the batch, or export the program with it as a tensor",
                                input.name, file_, exported));
}

void InputChecker::check_guards(const Batch& batch) const {
  for (const SizeGuard& guard : program_.guards) {
    std::vector<int64_t> values;
    for (const SizeGuard::InputSize& size : guard.sizes()) {
      if (!batch.contains(size.input)) break;
      values.push_back(batch[size.input].size(static_cast<int64_t>(size.dim)));
    }
    if (values.size() < guard.sizes().size() || guard.holds(values)) continue;
    std::set<std::string> found;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto& [input, dim] = guard.sizes()[i];
      found.insert(fmt::format("dimension {} of '{}' is {}", dim, input, values[i]));
    }
    C10_THROW_ERROR(ValueError, fmt::format("{} was exported for sizes with {}, but {}; export it with an example of "
                                            "such sizes",
                                            file_, guard.text(), fmt::join(found, ", ")));
  }
}

void InputChecker::fail_by_missing(const Input& input, const Batch& batch) const {
  std::vector<std::string> given;
  for (const auto& [name, tensor] : batch) given.push_back(name);
  C10_THROW_ERROR(ValueError, fmt::format("{} needs the inputs {}: {}", file_, fmt::join(program_.input_names(), ", "),
                                          unknown_name_message("tensor of the batch", input.name, given)));
}

IValue InputChecker::number_of(const Input& input, const at::Tensor& tensor) {
  const bool is_size = !input.sizes.empty();
  const bool is_whole = at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
  TORCH_CHECK_VALUE(
      tensor.numel() == 1 && (is_whole || !is_size),
      fmt::format("input '{}' of {} is {} of sizes {}, but the program was exported for a {}number", input.name, file_,
                  toString(tensor.scalar_type()), tensor.sizes(), is_size ? "whole " : ""));
  if (is_size) check_size(tensor.item<int64_t>(), input.sizes.front(), {.input = &input, .dim = {}});
  return tensor.item();
}

void InputChecker::check_size(int64_t size, const Size& exported, Place place) {
  if (const auto* fixed = std::get_if<int64_t>(&exported)) {
    TORCH_CHECK_VALUE(size == *fixed,
                      fmt::format("{} of {} is {}, but the program was exported for {} alone; export it with "
                                  "dynamic_shapes and torch.export.Dim to allow others",
                                  place.text(), file_, size, *fixed));
  }
  if (const auto* symbolic = std::get_if<SymbolicSize>(&exported)) check_symbol(size, *symbolic, place);
}

void InputChecker::check_symbol(int64_t size, const SymbolicSize& exported, Place place) {
  TORCH_CHECK_VALUE(
      size >= exported.offset && (size - exported.offset) % exported.factor == 0,
      fmt::format("{} of {} is {}, but the program was exported for {}", place.text(), file_, size, text_of(exported)));
  const int64_t value = (size - exported.offset) / exported.factor;
  const auto& [first_value, first_place] = known_.try_emplace(exported.symbol, value, place).first->second;
  if (value != first_value) {
    const int64_t needed = exported.factor * first_value + exported.offset;
    C10_THROW_ERROR(ValueError, fmt::format("{} of {} is {}, but it must be {} to go with {}", place.text(), file_,
                                            size, needed, first_place.text()));
  }
  const auto range = program_.ranges.find(exported.symbol);
  if (range == program_.ranges.end() || is_within(value, range->second)) return;
  const std::string expression = text_of(exported);
  const std::string where = expression == exported.symbol ? "" : fmt::format(" in {}", expression);
  C10_THROW_ERROR(ValueError, fmt::format("{} of {} is {}, but the program was exported for {}{}; export it with "
                                          "another range of torch.export.Dim",
                                          place.text(), file_, size, text_of(range->second), where));
}

}  // namespace fulgur::program
