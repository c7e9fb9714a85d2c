#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fulgur {

// The header of a token file. The layout of the file, with all numbers little-endian:
//   bytes  0 to  7   "FULGURTK"
//   bytes  8 to 11   format version, 1
//   bytes 12 to 15   bytes of a token, 2 or 4
//   bytes 16 to 23   number of tokens
//   bytes 24 to 31   vocabulary size: all tokens are smaller
//   bytes 32 to 39   XXH3_64bits of the tokens' bytes, seed 0; https://github.com/Cyan4973/xxHash
//   bytes 40 to 63   zeros
//   from 64 on       the tokens
struct TokenHeader {
  int64_t token_bytes = 2;
  int64_t num_tokens = 0;
  int64_t vocab_size = 0;
  uint64_t xxh3 = 0;

  static constexpr int64_t kBytes = 64;
};

std::string to_bytes(const TokenHeader& header);

// Whether a file that begins with `bytes` is a token file, of any version.
bool begins_token_file(std::string_view bytes);

// Checks and reads the header. `bytes` is the start of a file of `file_bytes` bytes and holds at least the header.
// Throws std::runtime_error, naming `file` and the reason: it is no token file or of a later version, a number is
// impossible, or the file has not exactly the tokens that the header counts. The hash is not checked, for that takes
// reading all of the file: TokenDataset::verify().
TokenHeader parse_token_header(std::span<const char> bytes, int64_t file_bytes, std::string_view file);

}  // namespace fulgur
