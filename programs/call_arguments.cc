#include "fulgur/programs/call_arguments.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/jit_type.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <variant>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur::program {
namespace {

using c10::IValue;

at::Tensor to_tensor(const at::Scalar& number) {  // as Python passes a number where an operator takes a tensor
  at::Tensor tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// A list of values as the element type of a schema asks for it.
template <class Items>
IValue to_list(const Items& items, const c10::TypePtr& element) {
  const auto fill = [&](auto list, const auto& convert) {
    list.reserve(items.size());
    for (const IValue& item : items) list.push_back(convert(item));
    return IValue(std::move(list));
  };
  switch (element->kind()) {
    case c10::TypeKind::TensorType:
      return fill(c10::List<at::Tensor>(), [](const IValue& item) { return item.toTensor(); });
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
      return fill(c10::List<int64_t>(), [](const IValue& item) { return item.toInt(); });
    case c10::TypeKind::FloatType:
      return fill(c10::List<double>(), [](const IValue& item) { return item.toScalar().toDouble(); });
    case c10::TypeKind::BoolType:
      return fill(c10::List<bool>(), [](const IValue& item) { return item.toBool(); });
    case c10::TypeKind::StringType:
      return fill(c10::List<std::string>(), [](const IValue& item) { return item.toStringRef(); });
    case c10::TypeKind::NumberType:
      return fill(c10::List<at::Scalar>(), [](const IValue& item) { return item.toScalar(); });
    case c10::TypeKind::OptionalType:
      if (element->expectRef<c10::OptionalType>().getElementType()->kind() != c10::TypeKind::TensorType) break;
      return fill(c10::List<std::optional<at::Tensor>>(),
                  [](const IValue& item) { return item.toOptional<at::Tensor>(); });
    default:
      break;
  }
  throw CheckpointError(fmt::format("lists of {} are not supported", element->str()));
}

// A value as the type of a schema asks for it.
IValue convert(IValue value, const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      if (value.isScalar()) return to_tensor(value.toScalar());
      return value;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
      if (value.isInt()) return static_cast<double>(value.toInt());
      return value;
    default:
      return value;
  }
}

// Whether a constant may be passed to an argument of a type that is no list. Values are checked when they are known.
bool fits(const IValue& constant, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::AnyType:
      return true;
    case c10::TypeKind::TensorType:
    case c10::TypeKind::NumberType:
      return constant.isScalar();
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
      return constant.isDouble() || constant.isInt();
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return constant.isInt();
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      return constant.isBool();
    case c10::TypeKind::StringType:
      return constant.isString();
    case c10::TypeKind::LayoutType:
      return constant.isInt() && constant.toInt() == static_cast<int64_t>(at::kStrided);
    case c10::TypeKind::MemoryFormatType:
      return constant.isInt() && constant.toInt() >= 0 &&
             constant.toInt() < static_cast<int64_t>(at::MemoryFormat::NumOptions);
    default:
      return false;
  }
}

[[noreturn]] void refuse(std::string_view given, const c10::Type& type) {
  throw CheckpointError(fmt::format("{} is given where {} is needed", given, type.str()));
}

// A constant in a message: "None", "0.5 (Double)".
std::string describe(const IValue& constant) {
  if (constant.isNone()) return "None";
  return fmt::format("{} ({})", constant.isString() ? quote(constant.toStringRef()) : c10::str(constant),
                     constant.tagKind());
}

bool needs_conversion(const c10::TypePtr& type) {
  return type && (type->kind() == c10::TypeKind::TensorType || type->kind() == c10::TypeKind::FloatType ||
                  type->kind() == c10::TypeKind::SymFloatType);
}

Source list_source(const ArgumentList& items, const c10::TypePtr& type, c10::Device device) {
  const bool is_list = type && type->kind() == c10::TypeKind::ListType;
  if (type && !is_list) refuse("a list", *type);
  const c10::TypePtr element = is_list ? type->expectRef<c10::ListType>().getElementType() : c10::TensorType::get();
  std::vector<Source> sources;
  for (const Argument& item : items) sources.push_back(to_source(item, element, {}, device));
  const bool has_values = std::ranges::any_of(items, [](const Argument& item) { return item.value() != nullptr; });
  std::vector<IValue> constants, no_slots;
  if (has_values) {
    to_list(constants, element);  // throws if there are no such lists
    return {std::move(sources), element};
  }
  for (const Source& each : sources) constants.push_back(each.load(no_slots));
  return Source(to_list(constants, element));
}

}  // namespace

IValue Source::load_list(std::vector<IValue>& slots) const {
  std::vector<IValue> items;
  items.reserve(items_.size());
  for (const Source& item : items_) items.push_back(item.load(slots));
  return to_list(items, type_);
}

IValue Source::converted(IValue value) const { return convert(std::move(value), type_); }

Source to_source(const Argument& argument, c10::TypePtr type, std::optional<int32_t> repeat, c10::Device device) {
  const bool may_be_none = !type || type->kind() == c10::TypeKind::OptionalType;
  if (type && may_be_none) type = type->expectRef<c10::OptionalType>().getElementType();
  if (const ValueRef* value = argument.value()) return {value->index, needs_conversion(type) ? type : nullptr};
  if (const auto* items = std::get_if<ArgumentList>(&argument.what)) return list_source(*items, type, device);
  if (std::holds_alternative<c10::Device>(argument.what)) {
    if (type && type->kind() != c10::TypeKind::DeviceObjType) refuse("a device", *type);
    return Source(IValue(device));
  }
  if (const auto* dtype = std::get_if<at::ScalarType>(&argument.what)) {
    const bool is_asked =
        !type || type->kind() == c10::TypeKind::ScalarTypeType || type->kind() == c10::TypeKind::IntType;
    if (!is_asked) refuse("a data type", *type);
    return Source(IValue(*dtype));
  }
  const auto* constant = std::get_if<IValue>(&argument.what);
  if (constant == nullptr) throw CheckpointError("a graph is given where a value is needed");
  if (!type || (constant->isNone() && may_be_none)) return Source(*constant);
  if (type->kind() == c10::TypeKind::ListType && repeat) {
    return list_source(ArgumentList(static_cast<size_t>(*repeat), argument), type, device);
  }
  if (!fits(*constant, *type)) refuse(describe(*constant), *type);
  return Source(convert(*constant, type));
}

}  // namespace fulgur::program
