#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace fulgur {

// A field that is written as text: "auto", "2", "0,1".
struct TextField {
  std::function<void(std::string_view)> set;  // throws UsageError
  std::function<std::string()> get;
  std::function<void(std::string_view name)> check{};  // throws UsageError with the name of the field if the value
                                                       // cannot be used; null: every value can
};

// The text "none" unsets an optional.
using FieldValue = std::variant<bool*, int64_t*, double*, std::string*, TextField, std::optional<bool>*,
                                std::optional<int64_t>*, int*, float*, std::optional<double>*>;

// What is known about a field besides its value.
struct Field {
  std::string_view name{};  // as in the struct
  std::string_view help{};  // one clause
  std::string_view unit{};  // what a number is measured in, such as "s" or "MiB"; empty: a count or a ratio
  double min = -std::numeric_limits<double>::infinity();  // numbers only, inclusive
  double max = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices{};  // values of a string (empty: any); an enum's names, from value 0 on
  bool applies = true;                 // false: a setting of a choice that was not made, such as another strategy
  bool is_common = false;              // --help shows it without being asked for all
  std::vector<std::string> used_by{};  // a setting of a choice: what can be chosen that has it
};

class FieldVisitor;

// An object of a list, whose options are set before it is made.
class ObjectDraft {
 public:
  virtual ~ObjectDraft() = default;
  virtual void describe(FieldVisitor& visit) = 0;
  virtual void add() = 0;  // makes the object and appends it to the list; throws UsageError for options that do not fit
};

// A list of objects, such as callbacks (base/options_registry.h) or options structs (list_of).
struct ObjectList {
  std::function<std::unique_ptr<ObjectDraft>(std::string_view type)> begin;  // throws UsageError for an unknown type
  std::vector<std::string> types{};                                          // empty: all objects are of one type
};

// Walks over the fields of an options struct. The struct names each field once:
//   struct SGDOptions {
//     double lr = 1e-3;
//     void describe(FieldVisitor& visit) { visit({.name = "lr", .help = "learning rate", .min = 0}, &lr); }
//   };
// Flags, --help and the checks of values all follow from describe. A field is a bool, an int, an int64_t, a uint64_t, a
// float, a double, a string, an optional bool, int64_t or double, a path, an enum (its names are the field's choices),
// a vector or a pair of these (as text with commas: "64,32"; min, max and choices apply to each element), anything else
// that a TextField reads, or a struct with a describe() of its own, whose fields are a section: visit({.name =
// "trainer"}, &trainer) visits trainer.max_epochs.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  virtual void operator()(const Field& field, FieldValue value) = 0;
  virtual void list(const Field& /*field*/, const ObjectList& /*objects*/) {}  // config files have it, flags do not

  template <class T>
    requires(!std::constructible_from<FieldValue, T*>)
  void operator()(const Field& field, T* value);
};

// Calls the describe() of an options struct with the visitor.
using DescribeFields = std::function<void(FieldVisitor&)>;

// Sets the field from text, such as a flag's. Throws UsageError: "lr: 'fast' is not a number".
void set_field(const Field& field, const FieldValue& value, std::string_view text);

std::string field_text(const FieldValue& value);  // text that set_field accepts

// Throws UsageError if the value is outside min and max or is not one of the choices.
void check_field(const Field& field, const FieldValue& value);

namespace internal {

template <class T>
concept PlainField = std::constructible_from<FieldValue, T*>;

// Errors of these functions do not name the field: the caller of a TextField adds the name.
std::vector<std::string_view> split_at_commas(std::string_view text);  // empty for an empty text
size_t enum_value_of(const std::vector<std::string>& choices, std::string_view name);
std::string enum_name_of(const std::vector<std::string>& choices, size_t value);
Field element_of(const Field& field, const std::string& name);  // borrows `name`

void check_is_pair(size_t num_elements);

TextField text_field(const Field& field, uint64_t* value);

// Adds the name of the field to the UsageError of `call`.
void with_name(std::string_view name, const std::function<void()>& call);

// An element as a list's text has it. Throws UsageError for one that could not be read back: empty, or with a comma.
std::string text_of_element(const Field& element, const FieldValue& value);

// Matches std::filesystem::path without including its header, which takes long to compile.
template <class T>
concept PathLike = requires(T path) {
  { path.filename().string() } -> std::same_as<std::string>;
  path = std::string();
};

template <PathLike T>
TextField text_field(const Field&, T* path) {
  return {.set = [path](std::string_view text) { *path = std::string(text); },
          .get = [path] { return path->string(); }};
}

template <class T>
  requires std::is_enum_v<T>
TextField text_field(const Field& field, T* value) {
  const auto get = [choices = field.choices, value] { return enum_name_of(choices, static_cast<size_t>(*value)); };
  return {.set = [choices = field.choices,
                  value](std::string_view text) { *value = static_cast<T>(enum_value_of(choices, text)); },
          .get = get,
          .check = [get](std::string_view name) { with_name(name, get); }};
}

template <class T>
  requires(PlainField<T> || std::is_enum_v<T>)
TextField text_field(const Field& field, std::vector<T>* values) {
  const auto value_of = [](const Field& element, T* value) -> FieldValue {
    if constexpr (PlainField<T>) {
      return value;
    } else {
      return text_field(element, value);
    }
  };
  const auto on_each = [field, value_of](std::vector<T>& all, const auto& use) {
    for (size_t i = 0; i < all.size(); ++i) {
      const std::string name = "element " + std::to_string(i);
      const Field element = element_of(field, name);
      T value = all[i];
      use(i, element, value_of(element, &value));
      all[i] = std::move(value);
    }
  };
  const auto set = [on_each, values](std::string_view text) {
    const std::vector<std::string_view> parts = split_at_commas(text);
    std::vector<T> read(parts.size());
    on_each(read,
            [&](size_t i, const Field& element, const FieldValue& value) { set_field(element, value, parts[i]); });
    *values = std::move(read);
  };
  const auto get = [on_each, values] {
    std::string text;
    on_each(*values, [&](size_t i, const Field& element, const FieldValue& value) {
      if (i > 0) text += ',';
      text += text_of_element(element, value);
    });
    return text;
  };
  const auto check = [on_each, values](std::string_view name) {
    with_name(name, [&] {
      on_each(*values, [](size_t, const Field& element, const FieldValue& value) {
        check_field(element, value);
        static_cast<void>(text_of_element(element, value));
      });
    });
  };
  return {.set = set, .get = get, .check = check};
}

// A pair is read and written as a list of two.
template <class T>
  requires(PlainField<T> || std::is_enum_v<T>)
TextField text_field(const Field& field, std::pair<T, T>* pair) {
  const auto as_list = [field, pair](const auto& use) {
    std::vector<T> list{pair->first, pair->second};
    use(text_field(field, &list));
    check_is_pair(list.size());
    *pair = {list[0], list[1]};
  };
  const auto set = [as_list](std::string_view text) { as_list([text](const TextField& list) { list.set(text); }); };
  const auto get = [as_list] {
    std::string text;
    as_list([&text](const TextField& list) { text = list.get(); });
    return text;
  };
  const auto check = [as_list](std::string_view name) { as_list([name](const TextField& list) { list.check(name); }); };
  return {.set = set, .get = get, .check = check};
}

// Visits fields under the name of a section: "section.field".
class SectionVisitor final : public FieldVisitor {
 public:
  SectionVisitor(FieldVisitor& visit, std::string_view section) : visit_(visit), section_(section) {}
  void operator()(const Field& field, FieldValue value) override;
  void list(const Field& field, const ObjectList& objects) override;

 private:
  FieldVisitor& visit_;
  const std::string section_;
};

template <class T>
concept Described = requires(T options, FieldVisitor& visit) { options.describe(visit); };

template <class T>
concept HasTextField = requires(const Field& field, T* value) { text_field(field, value); };

class FieldChecker final : public FieldVisitor {
 public:
  explicit FieldChecker(std::string_view owner) : owner_(owner) {}
  void operator()(const Field& field, FieldValue value) override;

 private:
  std::string_view owner_;
};

class FieldTexts final : public FieldVisitor {
 public:
  void operator()(const Field& field, FieldValue value) override;
  std::string without(const FieldTexts& others) const;  // "name=text,..." of the fields whose text differs

 private:
  std::vector<std::pair<std::string, std::string>> texts_;  // by name, in the order of describe
};

}  // namespace internal

template <class T>
  requires(!std::constructible_from<FieldValue, T*>)
void FieldVisitor::operator()(const Field& field, T* value) {
  static_assert(internal::HasTextField<T> || internal::Described<T>,
                "a field of this type cannot be described: FieldVisitor says which can; read and write it by a "
                "TextField");
  if constexpr (internal::HasTextField<T>) {
    (*this)(field, FieldValue(internal::text_field(field, value)));
  } else if constexpr (internal::Described<T>) {
    internal::SectionVisitor section(*this, field.name);
    value->describe(section);
  }
}

// A field that appends options structs to `list`, which is borrowed.
template <internal::Described T>
ObjectList list_of(std::vector<T>& list) {
  class Draft final : public ObjectDraft {
   public:
    explicit Draft(std::vector<T>& all) : all_(all) {}
    void describe(FieldVisitor& visit) override { options_.describe(visit); }
    void add() override { all_.push_back(options_); }

   private:
    std::vector<T>& all_;
    T options_{};
  };
  return {.begin = [&list](std::string_view) { return std::make_unique<Draft>(list); }};
}

// Checks every field of an options struct; `owner` begins the message: "AdamW: lr must be at least 0; got -1".
template <class Options>
void check_fields(std::string_view owner, Options options) {
  internal::FieldChecker checker(owner);
  options.describe(checker);
}

// The fields whose values are not the default ones, as "monitor=val_loss,mode=max"; empty if there are none.
template <class Options>
std::string changed_fields(Options options) {
  internal::FieldTexts own, defaults;
  options.describe(own);
  Options().describe(defaults);
  return own.without(defaults);
}

}  // namespace fulgur
