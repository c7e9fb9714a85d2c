#include "fulgur/data/files/npy.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/checkpoint/formats/zip_directory.h"
#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/data/files/archive_path.h"
#include "fulgur/data/files/npy_header.h"

namespace fulgur {
namespace {

// What is wrong with an entry of a .npz file, without the names of both.
struct BadEntry : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr uint16_t kStored = 0, kDeflated = 8;
constexpr uint64_t kMaxInflation = 1032;  // a bit of a deflated stream stands for up to 129 bytes

at::ScalarType dtype_of(const NpyHeader& header) {
  static constexpr std::pair<std::string_view, at::ScalarType> kDtypes[] = {
      {"b1", at::kBool},         {"u1", at::kByte},          {"u2", at::kUInt16}, {"u4", at::kUInt32},
      {"u8", at::kUInt64},       {"i1", at::kChar},          {"i2", at::kShort},  {"i4", at::kInt},
      {"i8", at::kLong},         {"f2", at::kHalf},          {"f4", at::kFloat},  {"f8", at::kDouble},
      {"c8", at::kComplexFloat}, {"c16", at::kComplexDouble}};
  return std::ranges::find(kDtypes, header.dtype, &std::pair<std::string_view, at::ScalarType>::first)->second;
}

// The shape as it lies in memory, the last dimension contiguous.
std::vector<int64_t> stored_shape(const NpyHeader& header) {
  std::vector<int64_t> shape = header.shape;
  if (header.is_fortran) std::ranges::reverse(shape);
  return shape;
}

at::Tensor in_order(const at::Tensor& stored, const NpyHeader& header) {
  if (!header.is_fortran) return stored;
  std::vector<int64_t> reversed(header.shape.size());
  for (size_t i = 0; i < reversed.size(); ++i) reversed[i] = static_cast<int64_t>(reversed.size() - 1 - i);
  return stored.permute(reversed);
}

uint32_t crc32_of(std::span<const char> bytes, uint32_t crc = 0) {
  return static_cast<uint32_t>(::crc32_z(crc, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

// Inflates a deflated entry, checking its CRC-32 on the way.
class Inflater {
 public:
  explicit Inflater(std::span<const char> deflated) : rest_(deflated) {
    constexpr int kRawStream = -MAX_WBITS;  // a zip entry has no header of zlib
    if (::inflateInit2(&stream_, kRawStream) != Z_OK) throw std::bad_alloc();
  }
  ~Inflater() { ::inflateEnd(&stream_); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  // The next bytes. Throws BadEntry if there are fewer.
  void read(char* to, size_t num_bytes) {
    constexpr size_t kPiece = std::numeric_limits<uInt>::max();
    while (num_bytes > 0) {
      const size_t piece = std::min(num_bytes, kPiece);
      inflate_piece(to, piece);
      crc_ = crc32_of({to, piece}, crc_);
      to += piece;
      num_bytes -= piece;
    }
  }

  // Throws if the stream does not end here, or its bytes are not those of the CRC-32.
  void finish(uint32_t crc) {
    char none = 0;
    stream_.next_out = reinterpret_cast<Bytef*>(&none);
    stream_.avail_out = 1;
    if (!is_at_end_ && (step() != Z_STREAM_END || stream_.avail_out == 0)) {
      throw BadEntry("has more bytes than the directory says");
    }
    if (crc_ != crc) throw BadEntry("is damaged: its CRC-32 is another one");
  }

 private:
  void inflate_piece(char* to, size_t num_bytes) {
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(num_bytes);
    while (stream_.avail_out > 0) {
      if (is_at_end_) throw BadEntry("has fewer bytes than the directory says");
      const int result = step();
      is_at_end_ = result == Z_STREAM_END;
      if (result != Z_OK && !is_at_end_) throw BadEntry("is damaged: it cannot be inflated");
    }
  }

  int step() {
    if (stream_.avail_in == 0) {
      const size_t piece = std::min<size_t>(rest_.size(), std::numeric_limits<uInt>::max());
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(rest_.data()));  // zlib only reads it
      stream_.avail_in = static_cast<uInt>(piece);
      rest_ = rest_.subspan(piece);
    }
    return ::inflate(&stream_, Z_NO_FLUSH);
  }

  z_stream stream_{};
  std::span<const char> rest_;
  uint32_t crc_ = 0;
  bool is_at_end_ = false;
};

at::Tensor inflate_array(std::span<const char> deflated, const ZipEntry& entry, const std::string& place) {
  if (entry.num_bytes / kMaxInflation > entry.stored_bytes) {
    throw BadEntry(fmt::format("claims {} bytes, more than deflate makes of {}", entry.num_bytes, entry.stored_bytes));
  }
  std::string start(std::min<uint64_t>(entry.num_bytes, kMaxNpyHeaderBytes), '\0');
  Inflater inflater(deflated);
  inflater.read(start.data(), start.size());
  const NpyHeader header = parse_npy_header(start, static_cast<int64_t>(entry.num_bytes), place);
  at::Tensor array = at::empty(stored_shape(header), dtype_of(header));
  auto* const data = static_cast<char*>(array.mutable_data_ptr());
  const auto begin = static_cast<size_t>(header.data_begin);
  std::ranges::copy(std::string_view(start).substr(begin), data);
  inflater.read(data + (start.size() - begin), entry.num_bytes - start.size());
  inflater.finish(entry.crc32);
  return in_order(array, header);
}

at::Tensor stored_array(const MemoryMap& map, uint64_t begin, const ZipEntry& entry, const std::string& place) {
  if (entry.num_bytes != entry.stored_bytes) throw BadEntry("is stored, but has two sizes");
  const std::span<const char> bytes = map.bytes().subspan(begin, entry.num_bytes);
  if (crc32_of(bytes) != entry.crc32) throw BadEntry("is damaged: its CRC-32 is another one");
  const NpyHeader header = parse_npy_header(bytes, static_cast<int64_t>(bytes.size()), place);
  const auto data_begin = static_cast<int64_t>(begin) + header.data_begin;
  return in_order(map.tensor(data_begin, stored_shape(header), dtype_of(header)), header);
}

at::Tensor array_of(const MemoryMap& map, uint64_t begin, const ZipEntry& entry, const std::string& place) {
  if (entry.is_encrypted) throw BadEntry("is encrypted");
  if (entry.method == kStored) return stored_array(map, begin, entry, place);
  if (entry.method == kDeflated) return inflate_array(map.bytes().subspan(begin, entry.stored_bytes), entry, place);
  throw BadEntry(fmt::format("is compressed by method {}; 0 (stored) and 8 (deflate) are known", entry.method));
}

std::string array_name(const std::string& name) {
  constexpr std::string_view kExtension = ".npy";
  if (!name.ends_with(kExtension)) throw BadEntry("is no .npy file");
  if (leaves_folder(name)) throw BadEntry("has a path that leaves the archive");
  return name.substr(0, name.size() - kExtension.size());
}

}  // namespace

at::Tensor read_npy(const std::filesystem::path& file) {
  const auto map = MemoryMap::open(file);
  const NpyHeader header = parse_npy_header(map->bytes(), static_cast<int64_t>(map->bytes().size()), file.string());
  return in_order(map->tensor(header.data_begin, stored_shape(header), dtype_of(header)), header);
}

NamedTensors read_npz(const std::filesystem::path& file) {
  const auto map = MemoryMap::open(file);
  const uint64_t file_bytes = map->bytes().size();
  const ReadBytes read = [&](uint64_t begin, uint64_t num_bytes) {
    return std::string(map->bytes().data() + begin, num_bytes);
  };
  NamedTensors arrays;
  std::set<std::string> names;
  for (const ZipEntry& entry : read_zip_directory(read, file_bytes, file.string())) {
    const std::string place = fmt::format("{}: its entry '{:.100}'", file.string(), entry.name);
    try {
      std::string name = array_name(entry.name);
      if (!names.insert(name).second) throw BadEntry("is there twice");
      const uint64_t begin = zip_entry_begin(entry, read, file_bytes, file.string());
      arrays.emplace_back(std::move(name), array_of(*map, begin, entry, place));
    } catch (const BadEntry& error) {
      throw std::runtime_error(fmt::format("{} {}", place, error.what()));
    }
  }
  return arrays;
}

}  // namespace fulgur
