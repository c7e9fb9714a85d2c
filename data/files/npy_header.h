#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur {

// What a .npy file says about its array.
struct NpyHeader {
  std::string dtype;  // numpy's text without the byte order, which is little-endian: "f4", "i8", "b1", "c8", ...
  int64_t element_bytes = 0;   // 1 to 16
  std::vector<int64_t> shape;  // empty for a scalar
  bool is_fortran = false;     // the first dimension is the one that is contiguous
  int64_t data_begin = 0;      // offset in the file where the elements begin
  int64_t data_bytes = 0;
};

// Checks and reads the header of a .npy file, formats 1.0, 2.0 and 3.0. `bytes` is the start of a file of `file_bytes`
// bytes and holds at least the header, for which kMaxNpyHeaderBytes suffice. Allocates nothing larger than the header.
// Throws std::runtime_error, naming `file` and the reason: it is no .npy file, its header is cut off or no dictionary
// of the known form, it holds Python objects (a pickle; nothing of it is run), records, text or big-endian numbers, or
// the file has not exactly the bytes of the shape. Source:
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
NpyHeader parse_npy_header(std::span<const char> bytes, int64_t file_bytes, std::string_view file);

inline constexpr int64_t kMaxNpyHeaderBytes = 1 << 16;  // only arrays of records, which are refused, need more

}  // namespace fulgur
