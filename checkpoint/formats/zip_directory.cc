#include "fulgur/checkpoint/formats/zip_directory.h"

#include <fmt/format.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur {
namespace {

struct BadZip : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct NoZip : BadZip {
  NoZip() : BadZip("it is no zip file") {}
};

// Takes little-endian numbers and texts from the front of a byte string.
class Bytes {
 public:
  explicit Bytes(std::string_view rest) : rest_(rest) {}

  template <class T>
  T number() {
    static_assert(std::endian::native == std::endian::little, "the file is little-endian");
    T value;
    std::memcpy(&value, text(sizeof(T)).data(), sizeof(T));
    return value;
  }

  std::string_view text(size_t num_bytes) {
    if (num_bytes > rest_.size()) throw BadZip("its directory is cut off");
    const std::string_view taken = rest_.substr(0, num_bytes);
    rest_.remove_prefix(num_bytes);
    return taken;
  }

  void skip(size_t num_bytes) { text(num_bytes); }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

constexpr uint64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56, kLocalHeaderBytes = 30;
constexpr uint32_t kEndSign = 0x06054b50, kLocatorSign = 0x07064b50, kEnd64Sign = 0x06064b50, kEntrySign = 0x02014b50,
                   kLocalHeaderSign = 0x04034b50;
constexpr uint16_t kExtra64 = 1;  // id of the extra field for sizes and offsets that do not fit into 32 bits
constexpr uint32_t kIn64 = std::numeric_limits<uint32_t>::max();

struct Directory {
  uint64_t num_entries, num_bytes, begin;
};

// Zip64: for a file beyond 4 GB; libtorch always writes this form.
Directory find_directory64(const ReadBytes& read, uint64_t file_bytes, std::string_view locator) {
  Bytes position(locator);
  position.skip(8);  // sign, disk
  const auto begin = position.number<uint64_t>();
  if (file_bytes < kEnd64Bytes || begin > file_bytes - kEnd64Bytes) throw BadZip("its directory is outside of it");
  const std::string text = read(begin, kEnd64Bytes);
  Bytes end(text);
  if (end.number<uint32_t>() != kEnd64Sign) throw BadZip("it has no directory");
  end.skip(28);  // size, versions, disks, entries on this disk
  Directory directory{};
  directory.num_entries = end.number<uint64_t>();
  directory.num_bytes = end.number<uint64_t>();
  directory.begin = end.number<uint64_t>();
  return directory;
}

Directory find_directory(const ReadBytes& read, uint64_t file_bytes) {
  if (file_bytes < kEndBytes) throw NoZip();
  const uint64_t end_begin = file_bytes - kEndBytes;
  const std::string text = read(end_begin, kEndBytes);
  Bytes end(text);
  if (end.number<uint32_t>() != kEndSign) throw NoZip();
  end.skip(6);  // disks, entries on this disk
  Directory directory{};
  directory.num_entries = end.number<uint16_t>();
  directory.num_bytes = end.number<uint32_t>();
  directory.begin = end.number<uint32_t>();
  if (end.number<uint16_t>() != 0) throw BadZip("it is a zip file with a comment");
  if (end_begin < kLocatorBytes) return directory;
  const std::string locator = read(end_begin - kLocatorBytes, kLocatorBytes);
  return Bytes(locator).number<uint32_t>() == kLocatorSign ? find_directory64(read, file_bytes, locator) : directory;
}

// Replaces sizes and offsets that do not fit into 32 bits by those in the `extra` field.
void take_sizes64(std::string_view extra, ZipEntry& entry) {
  for (Bytes fields(extra); !fields.empty();) {
    const auto id = fields.number<uint16_t>();
    Bytes field(fields.text(fields.number<uint16_t>()));
    if (id != kExtra64) continue;
    if (entry.num_bytes == kIn64) entry.num_bytes = field.number<uint64_t>();
    if (entry.stored_bytes == kIn64) entry.stored_bytes = field.number<uint64_t>();
    if (entry.header_begin == kIn64) entry.header_begin = field.number<uint64_t>();
    return;
  }
}

ZipEntry take_entry(Bytes& directory) {
  if (directory.number<uint32_t>() != kEntrySign) throw BadZip("its directory is damaged");
  ZipEntry entry{};
  directory.skip(4);  // versions
  entry.is_encrypted = (directory.number<uint16_t>() & 1) != 0;
  entry.method = directory.number<uint16_t>();
  directory.skip(4);  // time, date
  entry.crc32 = directory.number<uint32_t>();
  entry.stored_bytes = directory.number<uint32_t>();
  entry.num_bytes = directory.number<uint32_t>();
  const auto name_bytes = directory.number<uint16_t>(), extra_bytes = directory.number<uint16_t>(),
             comment_bytes = directory.number<uint16_t>();
  directory.skip(8);  // disk, attributes
  entry.header_begin = directory.number<uint32_t>();
  entry.name = directory.text(name_bytes);
  take_sizes64(directory.text(extra_bytes), entry);
  directory.skip(comment_bytes);
  return entry;
}

std::vector<ZipEntry> read_directory(const ReadBytes& read, uint64_t file_bytes) {
  const Directory directory = find_directory(read, file_bytes);
  if (directory.begin > file_bytes || directory.num_bytes > file_bytes - directory.begin) {
    throw BadZip("its directory is outside of it");
  }
  const std::string text = read(directory.begin, directory.num_bytes);
  std::vector<ZipEntry> entries;
  uint64_t unused = file_bytes;
  for (Bytes rest(text); entries.size() < directory.num_entries;) {
    const ZipEntry& entry = entries.emplace_back(take_entry(rest));
    if (entry.stored_bytes > unused) throw BadZip("its entries have more bytes together than the file");
    unused -= entry.stored_bytes;
  }
  return entries;
}

void check_is_state_dict(const std::vector<ZipEntry>& entries) {
  for (const ZipEntry& entry : entries) {
    if (!entry.name.ends_with("/constants.pkl")) continue;
    throw BadZip(
        "it is a TorchScript module (torch.jit.save() or C++'s torch::save()), not a state dict of torch.save()");
  }
  for (const ZipEntry& entry : entries) {
    if (entry.method == 0 && entry.stored_bytes == entry.num_bytes) continue;
    throw BadZip(fmt::format("its entry {} is compressed, which torch.save() never does", quote(entry.name)));
  }
}

[[noreturn]] void fail(std::string_view file, std::string_view reason) {
  throw CheckpointError(fmt::format("{}: {}", file, reason));
}

}  // namespace

std::vector<ZipEntry> read_zip_directory(const ReadBytes& read, uint64_t file_bytes, std::string_view file) {
  try {
    return read_directory(read, file_bytes);
  } catch (const BadZip& error) {
    fail(file, error.what());
  }
}

uint64_t zip_entry_begin(const ZipEntry& entry, const ReadBytes& read, uint64_t file_bytes, std::string_view file) {
  const auto outside = [&] { fail(file, fmt::format("its entry {} is outside of it", quote(entry.name))); };
  if (file_bytes < kLocalHeaderBytes || entry.header_begin > file_bytes - kLocalHeaderBytes) outside();
  const std::string text = read(entry.header_begin, kLocalHeaderBytes);
  Bytes header(text);
  if (header.number<uint32_t>() != kLocalHeaderSign) {
    fail(file, fmt::format("its entry {} is not where the directory says", quote(entry.name)));
  }
  header.skip(22);  // fields that the directory has, too
  const auto name_bytes = header.number<uint16_t>(), extra_bytes = header.number<uint16_t>();
  const uint64_t begin = entry.header_begin + kLocalHeaderBytes + name_bytes + extra_bytes;
  if (begin > file_bytes || entry.stored_bytes > file_bytes - begin) outside();
  return begin;
}

void check_zip_directory(const ReadBytes& read, uint64_t file_bytes, std::string_view file) {
  try {
    check_is_state_dict(read_directory(read, file_bytes));
  } catch (const NoZip& error) {
    fail(file, fmt::format("{}, as torch.save() of torch 1.6 or later writes it", error.what()));
  } catch (const BadZip& error) {
    fail(file, error.what());
  }
}

}  // namespace fulgur
