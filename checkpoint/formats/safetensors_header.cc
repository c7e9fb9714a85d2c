#include "fulgur/checkpoint/formats/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/limits.h"

namespace fulgur {
namespace {

constexpr size_t kMaxDimensions = 64;  // same limit as torch
constexpr std::string_view kMetadataName = "__metadata__";

constexpr std::pair<std::string_view, int> kBitsOfDtype[] = {
    {"BOOL", 8},    {"U8", 8},      {"I8", 8},          {"U16", 16},       {"I16", 16},    {"U32", 32},
    {"I32", 32},    {"U64", 64},    {"I64", 64},        {"F16", 16},       {"BF16", 16},   {"F32", 32},
    {"F64", 64},    {"C64", 64},    {"F4", 4},          {"F6_E2M3", 6},    {"F6_E3M2", 6}, {"F8_E4M3", 8},
    {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};

// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"key": "text", ...}}
class HeaderReader : public JsonEvents {
 public:
  explicit HeaderReader(SafetensorsHeader& header) : header_(header) {}

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kNames;
        return true;
      case Place::kNames:
        place_ = name_ == kMetadataName ? Place::kMetadata : Place::kEntry;
        if (place_ == Place::kEntry) header_.entries.emplace_back().name = name_;
        seen_ = {};
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool key(string_t& name) override {
    if (place_ == Place::kEntry) {
      field_ = std::find(kFields.begin(), kFields.end(), name) - kFields.begin();
      if (field_ == kFields.size()) return unexpected("the field " + quote(name));
      if (std::exchange(seen_[field_], true)) return unexpected("a second field " + quote(name));
    } else if (place_ == Place::kMetadata && header_.metadata.contains(name)) {
      return unexpected("a second " + quote(name));
    } else {
      if (place_ == Place::kNames && name == kMetadataName && std::exchange(has_metadata_, true)) {
        return unexpected("a second " + quote(name));
      }
      (place_ == Place::kNames ? name_ : key_) = name;
    }
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::kMetadata) {
      header_.metadata.emplace(key_, text);
    } else if (place_ == Place::kEntry && field_ == kDtype) {
      header_.entries.back().dtype = text;
    } else {
      return unexpected("a text");
    }
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kEntry || field_ == kDtype) return unexpected("an array");
    place_ = Place::kNumbers;
    num_offsets_ = 0;
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (place_ != Place::kNumbers) return unexpected("a number");
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return unexpected("a number above 2^63");
    const auto value = static_cast<int64_t>(number);
    SafetensorsEntry& entry = header_.entries.back();
    if (field_ == kShape) {
      if (entry.shape.size() == kMaxDimensions)
        return unexpected(fmt::format("a shape of more than {} sizes", kMaxDimensions));
      entry.shape.push_back(value);
    } else {
      if (num_offsets_ == 2) return unexpected("a third offset");
      (num_offsets_++ == 0 ? entry.begin : entry.end) = value;
    }
    return true;
  }

  bool end_array() override {
    if (field_ == kOffsets && num_offsets_ != 2) return unexpected("the end of data_offsets before the second");
    place_ = Place::kEntry;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kEntry && seen_ != std::array{true, true, true}) {
      const auto missing = static_cast<size_t>(std::find(seen_.begin(), seen_.end(), false) - seen_.begin());
      throw BadJson(fmt::format("tensor {} has no {}", quote(name_), kFields[missing]));
    }
    place_ = place_ == Place::kNames ? Place::kEnd : Place::kNames;
    return true;
  }

 private:
  enum class Place { kStart, kNames, kMetadata, kEntry, kNumbers, kEnd };
  enum Field : size_t { kDtype, kShape, kOffsets };
  static constexpr std::array<std::string_view, 3> kFields{"dtype", "shape", "data_offsets"};

  bool unexpected(std::string_view what) override {
    if (place_ == Place::kStart) throw BadJson(fmt::format("the header is {}, not an object", what));
    throw BadJson(fmt::format("the header has {} at {}", what, quote(name_)));
  }

  SafetensorsHeader& header_;
  Place place_ = Place::kStart;
  std::string name_;  // name of the current tensor
  std::string key_;   // current key of the metadata
  size_t field_ = 0;
  std::array<bool, 3> seen_{};  // by Field, for the current tensor
  int num_offsets_ = 0;
  bool has_metadata_ = false;
};

std::optional<int> bits_of(std::string_view dtype) {
  for (const auto& [name, bits] : kBitsOfDtype) {
    if (name == dtype) return bits;
  }
  return std::nullopt;
}

// The product of the sizes times `bits`. Also refuses [0, 2^62, 2^62], whose strides overflow in torch.
int64_t count_bits(const SafetensorsEntry& entry, int bits) {
  int64_t product = bits;
  bool is_empty = false;
  for (const int64_t size : entry.shape) {
    is_empty |= size == 0;
    if (__builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product)) {
      throw BadJson(fmt::format("the shape of tensor {} is too large", quote(entry.name)));
    }
  }
  return is_empty ? 0 : product;
}

void check_size(const SafetensorsEntry& entry) {
  if (entry.begin > entry.end) throw BadJson(fmt::format("tensor {} ends before it begins", quote(entry.name)));
  const auto bits = bits_of(entry.dtype);
  const int64_t wanted_bits = count_bits(entry, bits.value_or(1));
  if (!bits) return;
  const int64_t num_bytes = entry.end - entry.begin;
  if (wanted_bits % 8 != 0 || wanted_bits / 8 != num_bytes) {
    throw BadJson(fmt::format("tensor {} of {} takes {} bits, but has {} bytes", quote(entry.name), entry.dtype,
                              wanted_bits, num_bytes));
  }
}

void check_names(const std::vector<SafetensorsEntry>& entries) {
  std::vector<std::string_view> names;
  for (const SafetensorsEntry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) throw BadJson(fmt::format("tensor {} is there twice", quote(*twice)));
}

// Checks that the entries, sorted by their bytes, cover the data from start to end without holes or overlaps.
void check_ranges(const std::vector<SafetensorsEntry>& entries, int64_t data_bytes) {
  int64_t position = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.end > data_bytes) {
      throw BadJson(fmt::format("tensor {} ends at byte {} of {}: the file is cut or damaged", quote(entry.name),
                                entry.end, data_bytes));
    }
    if (entry.begin != position) {
      throw BadJson(fmt::format("tensor {} begins at byte {} and not at {}: there is {}", quote(entry.name),
                                entry.begin, position, entry.begin < position ? "an overlap" : "a hole"));
    }
    position = entry.end;
  }
  if (position != data_bytes) {
    throw BadJson(fmt::format("the tensors end at byte {} of {}", position, data_bytes));
  }
}

std::string_view header_text(std::span<const char> bytes, int64_t file_bytes) {
  static_assert(std::endian::native == std::endian::little, "the file is little-endian");
  uint64_t size = 0;
  if (bytes.size() < sizeof(size)) throw BadJson(fmt::format("{} bytes are too few for a header", bytes.size()));
  std::memcpy(&size, bytes.data(), sizeof(size));
  if (size > limits::kSafetensorsHeaderBytes) {
    throw BadJson(
        fmt::format("this is no safetensors file: its first 8 bytes would make a header of {} bytes, and "
                    "one has at most {}",
                    size, limits::kSafetensorsHeaderBytes));
  }
  if (size > bytes.size() - sizeof(size)) {
    throw BadJson(fmt::format(
        "this is no safetensors file, or its end is missing: the header has {} bytes, the file {}", size, file_bytes));
  }
  return {bytes.data() + sizeof(size), size};
}

}  // namespace

int64_t SafetensorsEntry::numel() const {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

SafetensorsHeader parse_safetensors_header(std::span<const char> bytes, int64_t file_bytes, std::string_view file) {
  try {
    const std::string_view text = header_text(bytes, file_bytes);
    if (!text.starts_with('{')) throw BadJson("the header does not begin with '{'");
    SafetensorsHeader header;
    header.data_begin = static_cast<int64_t>(sizeof(uint64_t) + text.size());
    HeaderReader reader(header);
    read_json(text, file, reader);
    check_names(header.entries);
    std::for_each(header.entries.begin(), header.entries.end(), check_size);
    std::sort(header.entries.begin(), header.entries.end(),
              [](const auto& a, const auto& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    check_ranges(header.entries, file_bytes - header.data_begin);
    return header;
  } catch (const BadJson& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace fulgur
