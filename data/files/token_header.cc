#include "fulgur/data/files/token_header.h"

#include <bit>
#include <cstring>
#include <stdexcept>

namespace fulgur {
namespace {

constexpr std::string_view kMagic = "FULGURTK";
constexpr uint32_t kVersion = 1;

static_assert(std::endian::native == std::endian::little, "the file is little-endian");

template <class T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class T>
T number_at(std::span<const char> bytes, size_t begin) {
  T value;
  std::memcpy(&value, bytes.data() + begin, sizeof(T));
  return value;
}

}  // namespace

bool begins_token_file(std::string_view bytes) { return bytes.starts_with(kMagic); }

std::string to_bytes(const TokenHeader& header) {
  std::string bytes(kMagic);
  append(bytes, kVersion);
  append(bytes, static_cast<uint32_t>(header.token_bytes));
  append(bytes, header.num_tokens);
  append(bytes, header.vocab_size);
  append(bytes, header.xxh3);
  bytes.resize(TokenHeader::kBytes, '\0');
  return bytes;
}

TokenHeader parse_token_header(std::span<const char> bytes, int64_t file_bytes, std::string_view file) {
  const auto require = [&](bool holds, const std::string& reason) {
    if (!holds) throw std::runtime_error(std::string(file) + ": " + reason);
  };
  const auto text = [](auto value) { return std::to_string(value); };
  require(begins_token_file({bytes.data(), bytes.size()}), "it is no token file; //tools:tokens makes one of text");
  require(bytes.size() >= TokenHeader::kBytes, "its header is cut off");
  const auto version = number_at<uint32_t>(bytes, 8), token_bytes = number_at<uint32_t>(bytes, 12);
  require(version == kVersion, "it has format version " + text(version) + "; 1 is known");
  require(token_bytes == 2 || token_bytes == 4, "its tokens have " + text(token_bytes) + " bytes; 2 and 4 are known");
  const auto num_tokens = number_at<uint64_t>(bytes, 16), vocab_size = number_at<uint64_t>(bytes, 24);
  const auto data_bytes = static_cast<uint64_t>(file_bytes - TokenHeader::kBytes);
  require(data_bytes % token_bytes == 0 && num_tokens == data_bytes / token_bytes,
          "its header counts " + text(num_tokens) + " tokens of " + text(token_bytes) + " bytes, but " +
              text(data_bytes) + " bytes follow");
  require(vocab_size >= 1 && vocab_size <= uint64_t{1} << (8 * token_bytes),
          "its vocabulary size of " + text(vocab_size) + " does not fit tokens of " + text(token_bytes) + " bytes");
  return {.token_bytes = token_bytes,
          .num_tokens = static_cast<int64_t>(num_tokens),
          .vocab_size = static_cast<int64_t>(vocab_size),
          .xxh3 = number_at<uint64_t>(bytes, 32)};
}

}  // namespace fulgur
