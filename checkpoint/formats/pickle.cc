#include "fulgur/checkpoint/formats/pickle.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <variant>

#include "fulgur/base/error.h"
#include "fulgur/base/utf8.h"
#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur {
namespace {

struct BadPickle : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum Opcode : unsigned char {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDup = '2',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersistentId = 'Q',
  kReduce = 'R',
  kBinString = 'T',
  kShortBinString = 'U',
  kBinUnicode = 'X',
  kEmptyList = ']',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kDict = 'd',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kList = 'l',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kEmptyTuple = ')',
  kProtocol = 0x80,
  kNewObject = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjectEx = 0x92,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
};

// Values refer to each other by index into one list, so that no pickle can make them deep or circular.
using Id = uint32_t;

struct Items {  // a list or a tuple
  std::vector<Id> ids;
};
struct Dict {
  std::vector<std::pair<Id, Id>> items;
};
struct Global {
  std::string name;  // "torch._utils _rebuild_tensor_v2"
};
struct Storage {
  std::string type, key;
  int64_t numel;
};
struct Object {  // a value that is skipped
  std::string what;
};
using Value = std::variant<Object, bool, int64_t, std::string, Items, Dict, Global, std::unique_ptr<Storage>,
                           std::unique_ptr<PickledTensor>>;

size_t bytes_of(const PickledTensor& tensor) {
  return sizeof(tensor) + tensor.storage_type.size() + tensor.storage_key.size() +
         (tensor.shape.size() + tensor.strides.size()) * sizeof(int64_t);
}

class Machine {
 public:
  Machine(std::string_view bytes, PickleLimits limits) : rest_(bytes), limits_(limits) {}

  const Value& run() {
    while (step(static_cast<Opcode>(take_number<unsigned char>()))) {
    }
    if (stack_.size() != 1) throw BadPickle("it does not end with one value");
    return values_[stack_.back()];
  }

  const Value& value(Id id) const { return values_[id]; }

  // Call before copying a value, or making one that takes more memory than its bytes in the pickle.
  void charge(size_t num_bytes) {
    copied_bytes_ += num_bytes;
    if (copied_bytes_ > limits_.max_copied_bytes) throw BadPickle("it copies one value too often");
  }

 private:
  bool step(Opcode opcode) {
    switch (opcode) {
      case kStop:
        return false;
      case kProtocol:
        take(1);
        return true;
      case kFrame:
        take(8);
        return true;
      case kMark:
        check_count(marks_.size(), "it has more than {} marks");
        marks_.push_back(stack_.size());
        return true;
      case kPop:
        pop();
        return true;
      case kPopMark:
        pop_to_mark();
        return true;
      case kDup:
        return push_id(top());
      case kBinPut:
        return remember(take_number<uint8_t>());
      case kLongBinPut:
        return remember(take_number<uint32_t>());
      case kMemoize:
        return remember(static_cast<uint32_t>(memo_.size()));
      case kBinGet:
        return get(take_number<uint8_t>());
      case kLongBinGet:
        return get(take_number<uint32_t>());
      case kBuild:
        pop();  // attributes, such as the _metadata of a state dict
        return true;
      case kAppend: {
        const Id item = pop();
        return append({item});
      }
      case kAppends:
      case kAddItems:
        return append(pop_to_mark());
      case kSetItem: {
        const Id item = pop(), name = pop();
        return set_items({name, item});
      }
      case kSetItems:
        return set_items(pop_to_mark());
      default:
        return push(make(opcode));
    }
  }

  Value make(Opcode opcode) {
    switch (opcode) {
      case kNone:
        return Object{"None"};
      case kNewTrue:
        return true;
      case kNewFalse:
        return false;
      case kBinInt:
        return int64_t{take_number<int32_t>()};
      case kBinInt1:
        return int64_t{take_number<uint8_t>()};
      case kBinInt2:
        return int64_t{take_number<uint16_t>()};
      case kLong1:
        return long_integer(take(take_number<uint8_t>()));
      case kLong4:
        return long_integer(take(take_number<uint32_t>()));
      case kBinFloat:
        take(8);
        return Object{"a float"};
      case kShortBinString:
      case kShortBinUnicode:
        return std::string(take(take_number<uint8_t>()));
      case kBinString:
      case kBinUnicode:
        return std::string(take(take_number<uint32_t>()));
      case kBinUnicode8:
        return std::string(take(take_number<uint64_t>()));
      case kShortBinBytes:
        take(take_number<uint8_t>());
        return Object{"bytes"};
      case kBinBytes:
        take(take_number<uint32_t>());
        return Object{"bytes"};
      case kBinBytes8:
      case kByteArray8:
        take(take_number<uint64_t>());
        return Object{"bytes"};
      case kEmptyList:
      case kEmptyTuple:
        return Items{};
      case kEmptyDict:
        return Dict{};
      case kEmptySet:
        return Object{"a set"};
      case kFrozenSet:
        pop_to_mark();
        return Object{"a set"};
      case kTuple:
      case kList:
        return Items{pop_to_mark()};
      case kTuple1:
        return Items{pop_items(1)};
      case kTuple2:
        return Items{pop_items(2)};
      case kTuple3:
        return Items{pop_items(3)};
      case kDict:
        return dict_of(pop_to_mark());
      case kGlobal: {
        const std::string module(take_line());
        return Global{module + " " + std::string(take_line())};
      }
      case kStackGlobal: {
        const Id name = pop(), module = pop();
        return stack_global(as<std::string>(module, "a module"), as<std::string>(name, "a name"));
      }
      case kNewObjectEx:
        pop();  // named arguments
        [[fallthrough]];
      case kNewObject:
      case kReduce: {
        const Id arguments = pop(), callable = pop();
        return call(callable, arguments);
      }
      case kBinPersistentId:
        return storage(as<Items>(pop(), "the reference of a storage").ids);
      default:
        throw BadPickle(fmt::format("opcode {:#04x} is not supported", static_cast<int>(opcode)));
    }
  }

  Value stack_global(const std::string& module, const std::string& name) {
    charge(module.size() + name.size());
    return Global{module + " " + name};
  }

  Value call(Id callable, Id arguments) {
    const auto* global = std::get_if<Global>(&values_[callable]);
    const std::string_view name = global == nullptr ? "an object" : std::string_view(global->name);
    const auto* items = std::get_if<Items>(&values_[arguments]);
    if (items == nullptr) return object(name);
    const std::vector<Id>& ids = items->ids;
    if (name == "collections OrderedDict") return ids.empty() ? Dict{} : dict_of_pairs(ids[0]);
    if (name == "torch._utils _rebuild_tensor_v2") return std::make_unique<PickledTensor>(tensor(ids));
    if (name == "torch._utils _rebuild_parameter" || name == "torch._utils _rebuild_parameter_with_state") {
      if (ids.empty()) throw BadPickle("a Parameter without a tensor");
      const auto& data = as<std::unique_ptr<PickledTensor>>(ids[0], "the tensor of a Parameter");
      charge(bytes_of(*data));
      return std::make_unique<PickledTensor>(*data);
    }
    if (name == "torch Size" && ids.size() == 1) {
      const Items& sizes = as<Items>(ids[0], "the sizes of a torch.Size");
      charge(sizes.ids.size() * sizeof(Id));
      return sizes;
    }
    return object(name);
  }

  Value object(std::string_view name) {
    charge(name.size());
    return Object{std::string(name)};
  }

  Value storage(const std::vector<Id>& ids) {  // ("storage", torch.FloatStorage, key, device, numel)
    constexpr std::string_view kModule = "torch ";
    if (ids.size() != 5) throw BadPickle("the reference of a storage has not 5 parts");
    const std::string& type = as<Global>(ids[1], "the type of a storage").name;
    if (!type.starts_with(kModule)) return object(type);  // an UntypedStorage
    const std::string& key = as<std::string>(ids[2], "the key of a storage");
    charge(sizeof(Storage) + type.size() + key.size());
    return std::make_unique<Storage>(Storage{type.substr(kModule.size()), key, count(ids[4], "the size of a storage")});
  }

  // (storage, offset, sizes, strides, requires_grad, hooks, metadata)
  PickledTensor tensor(const std::vector<Id>& ids) {
    if (ids.size() < 4) throw BadPickle("a tensor has fewer than 4 parts");
    const Storage& storage = *as<std::unique_ptr<Storage>>(ids[0], "the storage of a tensor");
    charge(sizeof(PickledTensor) + storage.type.size() + storage.key.size());
    PickledTensor tensor{storage.type,   storage.key,   storage.numel, count(ids[1], "the offset of a tensor"),
                         counts(ids[2]), counts(ids[3])};
    check_inside(tensor);
    if (ids.size() > 6) read_metadata(ids[6], tensor);
    return tensor;
  }

  // A dict of the bits that torch sets in a tensor instead of computing other values.
  void read_metadata(Id id, PickledTensor& tensor) const {
    const auto* bits = std::get_if<Dict>(&values_[id]);
    if (bits == nullptr) return;  // None
    for (const auto& [name, value] : bits->items) {
      const std::string& bit = as<std::string>(name, "the name of a tensor's bit");
      if (!as<bool>(value, "a tensor's bit")) continue;
      if (bit != "conj" && bit != "neg") throw BadPickle(fmt::format("a tensor has the unknown bit {}", quote(bit)));
      (bit == "conj" ? tensor.is_conjugated : tensor.is_negated) = true;
    }
  }

  static void check_inside(const PickledTensor& tensor) {
    if (tensor.shape.size() != tensor.strides.size()) {
      throw BadPickle("a tensor has not one stride for each size");
    }
    int64_t last = tensor.offset, elements = 1;
    bool is_empty = false, overflows = false;
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      int64_t step = 0;
      is_empty |= tensor.shape[i] == 0;
      overflows |= __builtin_mul_overflow(elements, std::max<int64_t>(tensor.shape[i], 1), &elements) ||
                   __builtin_mul_overflow(std::max<int64_t>(tensor.shape[i], 1) - 1, tensor.strides[i], &step) ||
                   __builtin_add_overflow(last, step, &last);
    }
    if (overflows || (is_empty ? tensor.offset > tensor.storage_numel : last >= tensor.storage_numel)) {
      throw BadPickle(fmt::format("a tensor is larger than its storage {}", quote(tensor.storage_key)));
    }
  }

  Value dict_of(const std::vector<Id>& names_and_values) {
    charge(names_and_values.size() * sizeof(Id));
    if (names_and_values.size() % 2 != 0) throw BadPickle("a dict has a name without a value");
    Dict dict;
    for (size_t i = 0; i < names_and_values.size(); i += 2) {
      dict.items.emplace_back(names_and_values[i], names_and_values[i + 1]);
    }
    return dict;
  }

  Value dict_of_pairs(Id pairs) {
    std::vector<Id> flat;
    for (const Id pair : as<Items>(pairs, "the items of an OrderedDict").ids) {
      const auto& ids = as<Items>(pair, "an item of an OrderedDict").ids;
      if (ids.size() != 2) throw BadPickle("an item of an OrderedDict is no pair");
      flat.insert(flat.end(), ids.begin(), ids.end());
    }
    return dict_of(flat);
  }

  bool append(const std::vector<Id>& ids) {
    if (auto* items = std::get_if<Items>(&values_[top()])) items->ids.insert(items->ids.end(), ids.begin(), ids.end());
    return true;  // items of a set or an object are skipped
  }

  bool set_items(const std::vector<Id>& names_and_values) {
    Value items = dict_of(names_and_values);
    const auto& added = std::get<Dict>(items).items;
    if (auto* dict = std::get_if<Dict>(&values_[top()])) {
      dict->items.insert(dict->items.end(), added.begin(), added.end());
    }
    return true;
  }

  bool push(Value value) {
    check_count(values_.size(), "it has more than {} values");
    values_.push_back(std::move(value));
    return push_id(static_cast<Id>(values_.size() - 1));
  }

  bool push_id(Id id) {
    check_count(stack_.size(), "its stack has more than {} values");
    stack_.push_back(id);
    return true;
  }

  bool remember(uint32_t key) {
    check_count(memo_.size(), "it remembers more than {} values");
    memo_[key] = top();
    return true;
  }

  // Call before adding one more.
  void check_count(size_t count, fmt::format_string<const size_t&> message) const {
    if (count >= limits_.max_values) throw BadPickle(fmt::format(message, limits_.max_values));
  }

  bool get(uint32_t key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) throw BadPickle(fmt::format("there is no memo {}", key));
    return push_id(found->second);
  }

  Id top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) throw BadPickle("a value is missing");
    return stack_.back();
  }

  Id pop() {
    const Id id = top();
    stack_.pop_back();
    return id;
  }

  std::vector<Id> pop_items(size_t count) {
    std::vector<Id> ids(count);
    for (size_t i = count; i > 0; --i) ids[i - 1] = pop();
    return ids;
  }

  std::vector<Id> pop_to_mark() {
    if (marks_.empty()) throw BadPickle("a mark is missing");
    const auto first = stack_.begin() + static_cast<ptrdiff_t>(marks_.back());
    std::vector<Id> ids(first, stack_.end());
    stack_.erase(first, stack_.end());
    marks_.pop_back();
    return ids;
  }

  std::string_view take(uint64_t num_bytes) {
    if (num_bytes > rest_.size()) throw BadPickle("it is cut off");
    const std::string_view bytes = rest_.substr(0, num_bytes);
    rest_.remove_prefix(num_bytes);
    return bytes;
  }

  std::string_view take_line() {
    const size_t end = rest_.find('\n');
    if (end == rest_.npos) throw BadPickle("it is cut off");
    const std::string_view line = take(end);
    take(1);
    return line;
  }

  template <class T>
  T take_number() {
    T number;
    std::memcpy(&number, take(sizeof(T)).data(), sizeof(T));
    return number;
  }

  static Value long_integer(std::string_view bytes) {  // little-endian, two's complement
    if (bytes.size() > 8) return Object{"an integer of more than 64 bits"};
    uint64_t value = !bytes.empty() && static_cast<signed char>(bytes.back()) < 0 ? ~uint64_t{0} : 0;
    for (size_t i = bytes.size(); i > 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[i - 1]);
    return static_cast<int64_t>(value);
  }

  template <class T>
  const T& as(Id id, std::string_view what) const {
    if (const T* value = std::get_if<T>(&values_[id])) return *value;
    throw BadPickle(fmt::format("{} has another type than expected", what));
  }

  int64_t count(Id id, std::string_view what) const {
    const int64_t value = as<int64_t>(id, what);
    if (value < 0) throw BadPickle(fmt::format("{} is negative", what));
    return value;
  }

  std::vector<int64_t> counts(Id id) {
    const std::vector<Id>& ids = as<Items>(id, "the shape of a tensor").ids;
    if (ids.size() > 64) throw BadPickle("a tensor has more than 64 sizes");
    charge(ids.size() * sizeof(int64_t));
    std::vector<int64_t> values;
    for (const Id each : ids) values.push_back(count(each, "a size or stride"));
    return values;
  }

  std::string_view rest_;
  PickleLimits limits_;
  size_t copied_bytes_ = 0;
  std::vector<Value> values_;
  std::vector<Id> stack_;
  std::vector<size_t> marks_;  // stack sizes at the marks
  std::unordered_map<uint32_t, Id> memo_;
};

const Dict& state_dict_in(const Machine& machine, const Value& root) {
  const Dict* outer = std::get_if<Dict>(&root);
  if (outer == nullptr) throw BadPickle("it holds no dict of tensors by name");
  for (const auto& [name, value] : outer->items) {
    const auto* text = std::get_if<std::string>(&machine.value(name));
    const auto* inner = std::get_if<Dict>(&machine.value(value));
    if (text != nullptr && *text == "state_dict" && inner != nullptr) return *inner;
  }
  return *outer;
}

PickledTensors tensors_in(Machine& machine, const Dict& dict) {
  PickledTensors tensors;
  std::unordered_set<std::string_view> names;
  for (const auto& [name, value] : dict.items) {
    const auto* text = std::get_if<std::string>(&machine.value(name));
    if (text == nullptr) throw BadPickle("a name in the state dict is no text");
    if (!names.insert(*text).second) throw BadPickle(fmt::format("{} is in the state dict twice", quote(*text)));
    const auto* tensor = std::get_if<std::unique_ptr<PickledTensor>>(&machine.value(value));
    if (tensor == nullptr) {
      const auto* object = std::get_if<Object>(&machine.value(value));
      throw BadPickle(fmt::format("{} in the state dict is no tensor{}", quote(*text),
                                  object == nullptr ? "" : " but " + quote(object->what)));
    }
    machine.charge(text->size() + bytes_of(**tensor));
    tensors.emplace_back(*text, **tensor);
  }
  return tensors;
}

template <class T>
void add_number(std::string& bytes, T number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof(T));
}

}  // namespace

void PickleWriter::integer(int64_t value) {
  static_assert(std::endian::native == std::endian::little, "the pickle is little-endian");
  if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
    bytes_ += static_cast<char>(kBinInt);
    return add_number(bytes_, static_cast<int32_t>(value));
  }
  bytes_ += static_cast<char>(kLong1);
  bytes_ += '\x08';
  add_number(bytes_, value);
}

void PickleWriter::real(double value) {
  bytes_ += static_cast<char>(kBinFloat);
  add_number(bytes_, __builtin_bswap64(std::bit_cast<uint64_t>(value)));  // the only big-endian field
}

void PickleWriter::text(std::string_view utf8) {
  if (!is_utf8(utf8)) throw CheckpointError(fmt::format("{} is not UTF-8, which Python needs", quote(utf8)));
  bytes_ += static_cast<char>(kBinUnicode);
  add_number(bytes_, static_cast<uint32_t>(utf8.size()));
  bytes_ += utf8;
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  bytes_ += fmt::format("{}{}\n{}\n", static_cast<char>(kGlobal), module, name);
}

void PickleWriter::integers(const std::vector<int64_t>& values) {
  bytes_ += static_cast<char>(kMark);
  for (const int64_t value : values) integer(value);
  bytes_ += static_cast<char>(kTuple);
}

void PickleWriter::tensor(const PickledTensor& tensor) {
  global("torch._utils", "_rebuild_tensor_v2");
  bytes_ += "((";  // opens the tuple of arguments and, as its first, the tuple that refers to the storage
  text("storage");
  global("torch", tensor.storage_type);
  text(tensor.storage_key);
  text("cpu");
  integer(tensor.storage_numel);
  bytes_ += "tQ";
  integer(tensor.offset);
  integers(tensor.shape);
  integers(tensor.strides);
  boolean(false);  // requires_grad
  global("collections", "OrderedDict");
  bytes_ += ")RtR";  // no hooks; end of the arguments; the call
}

std::string PickleWriter::finish() { return std::move(bytes_) + static_cast<char>(kStop); }

PickledTensors read_pickled_state_dict(std::string_view bytes, std::string_view file, PickleLimits limits) {
  try {
    Machine machine(bytes, limits);
    const Value& root = machine.run();
    return tensors_in(machine, state_dict_in(machine, root));
  } catch (const BadPickle& error) {
    throw CheckpointError(fmt::format("{}: its pickle cannot be read: {}", file, error.what()));
  }
}

}  // namespace fulgur
