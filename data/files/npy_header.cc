#include "fulgur/data/files/npy_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

namespace fulgur {
namespace {

struct BadNpy : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxDimensions = 64;  // same limit as torch and numpy
constexpr std::string_view kKnownDtypes[] = {"b1", "u1", "u2", "u4", "u8", "i1", "i2",
                                             "i4", "i8", "f2", "f4", "f8", "c8", "c16"};

// Takes the tokens of a Python literal from the front of a text.
class Literal {
 public:
  explicit Literal(std::string_view rest) : rest_(rest) {}

  // Whether the next character is this one; then it is taken.
  bool take(char c) {
    skip_blanks();
    if (!rest_.starts_with(c)) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char c) {
    if (!take(c)) throw BadNpy(fmt::format("its header has no '{}' where numpy writes one", c));
  }

  std::string_view string() {
    const char quote = take('"') ? '"' : '\'';
    if (quote == '\'') expect('\'');
    const size_t end = rest_.find(quote);
    if (end == std::string_view::npos) throw BadNpy("its header ends within a text");
    return taken(end, 1);
  }

  bool boolean() {
    skip_blanks();
    for (const auto& [name, value] : {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (rest_.starts_with(name)) return taken(name.size(), 0), value;
    }
    throw BadNpy("its 'fortran_order' is neither True nor False");
  }

  int64_t size() {
    skip_blanks();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0) throw BadNpy("its shape has something that is no size");
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    if (rest_.starts_with('L')) rest_.remove_prefix(1);  // a long of Python 2
    return value;
  }

  bool starts_with(char c) {
    skip_blanks();
    return rest_.starts_with(c);
  }

 private:
  void skip_blanks() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\n"), rest_.size())); }

  std::string_view taken(size_t num_chars, size_t then_skipped) {
    const std::string_view text = rest_.substr(0, num_chars);
    rest_.remove_prefix(num_chars + then_skipped);
    return text;
  }

  std::string_view rest_;
};

std::vector<int64_t> take_shape(Literal& literal) {
  std::vector<int64_t> shape;
  literal.expect('(');
  while (!literal.take(')')) {
    if (shape.size() == kMaxDimensions) {
      throw BadNpy(fmt::format("its shape has more than {} dimensions", kMaxDimensions));
    }
    shape.push_back(literal.size());
    if (literal.take(')')) break;
    literal.expect(',');
  }
  return shape;
}

std::string take_dtype(Literal& literal) {
  if (literal.starts_with('[')) {
    throw BadNpy("its elements are records of several fields; save each field as an array of its own");
  }
  const std::string_view text = literal.string();
  const std::string_view name = text.substr(std::min<size_t>(1, text.size()));
  if (name.starts_with('O')) {
    throw BadNpy("it holds Python objects, a pickle that could run code; save an array of numbers instead");
  }
  if (std::ranges::find(kKnownDtypes, name) == std::end(kKnownDtypes)) {
    throw BadNpy(fmt::format("its dtype '{:.20}' is none that torch has; convert it with array.astype()", text));
  }
  if (text.starts_with('>')) {
    throw BadNpy(fmt::format("its dtype '{}' is big-endian; save array.astype('<{}') instead", text, name));
  }
  const bool needs_order = name.substr(1) != "1";
  if (!text.starts_with('<') && (needs_order || !text.starts_with('|'))) {
    throw BadNpy(fmt::format("its dtype '{}' has no byte order", text));
  }
  return std::string(name);
}

// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
NpyHeader parse_dictionary(std::string_view text) {
  std::optional<std::string> dtype;
  std::optional<bool> is_fortran;
  std::optional<std::vector<int64_t>> shape;
  Literal literal(text);
  literal.expect('{');
  while (!literal.take('}')) {
    const std::string_view key = literal.string();
    literal.expect(':');
    if (key == "descr" && !dtype) {
      dtype = take_dtype(literal);
    } else if (key == "fortran_order" && !is_fortran) {
      is_fortran = literal.boolean();
    } else if (key == "shape" && !shape) {
      shape = take_shape(literal);
    } else {
      throw BadNpy(fmt::format("its header has an unknown or second key '{:.20}'", key));
    }
    if (literal.take('}')) break;
    literal.expect(',');
  }
  if (!dtype || !is_fortran || !shape) throw BadNpy("its header lacks one of 'descr', 'fortran_order' and 'shape'");
  return {.dtype = std::move(*dtype), .shape = std::move(*shape), .is_fortran = *is_fortran};
}

// The length of the dictionary and where it begins.
std::pair<size_t, size_t> find_dictionary(std::span<const char> bytes) {
  static_assert(std::endian::native == std::endian::little, "the file is little-endian");
  const std::string_view text(bytes.data(), bytes.size());
  if (!text.starts_with(kMagic)) throw BadNpy("it is no .npy file");
  const size_t version_end = kMagic.size() + 2;
  const char major = text.size() < version_end ? '\0' : text[kMagic.size()];
  if (text.size() >= version_end && (major < 1 || major > 3)) {
    throw BadNpy(fmt::format("it has format {}; 1, 2 and 3 are known", static_cast<int>(major)));
  }
  const size_t length_bytes = major == 1 ? 2 : 4, begin = version_end + length_bytes;
  if (text.size() < begin) throw BadNpy("its header is cut off");
  uint32_t length = 0;
  std::memcpy(&length, text.data() + version_end, length_bytes);
  if (begin + length > static_cast<size_t>(kMaxNpyHeaderBytes)) {
    throw BadNpy(fmt::format("its header of {} bytes is longer than {}", length, kMaxNpyHeaderBytes));
  }
  if (length > text.size() - begin) throw BadNpy("its header is cut off");
  return {begin, length};
}

int64_t count_bytes(const NpyHeader& header) {
  int64_t product = header.element_bytes;
  bool is_empty = false;
  for (const int64_t size : header.shape) {
    is_empty |= size == 0;
    // Also refuses (0, 2^62, 2^62), whose strides overflow in torch.
    if (__builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product)) throw BadNpy("its shape is too large");
  }
  return is_empty ? 0 : product;
}

}  // namespace

NpyHeader parse_npy_header(std::span<const char> bytes, int64_t file_bytes, std::string_view file) {
  try {
    const auto [begin, length] = find_dictionary(bytes);
    NpyHeader header = parse_dictionary({bytes.data() + begin, length});
    const std::string_view digits = std::string_view(header.dtype).substr(1);
    std::from_chars(digits.data(), digits.data() + digits.size(), header.element_bytes);
    header.data_begin = static_cast<int64_t>(begin + length);
    header.data_bytes = count_bytes(header);
    const int64_t found = file_bytes - header.data_begin;
    if (header.data_bytes != found) {
      throw BadNpy(fmt::format("its shape takes {} bytes, but {} follow the header", header.data_bytes, found));
    }
    return header;
  } catch (const BadNpy& error) {
    throw std::runtime_error(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace fulgur
