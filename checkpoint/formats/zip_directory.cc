#include "fulgur/checkpoint/formats/zip_directory.h"

#include <fmt/format.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur {
namespace {

struct BadZip : std::runtime_error {
  using std::runtime_error::runtime_error;
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

constexpr uint64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56;
constexpr uint32_t kEndSign = 0x06054b50, kLocatorSign = 0x07064b50, kEnd64Sign = 0x06064b50, kEntrySign = 0x02014b50;
constexpr uint16_t kExtra64 = 1;  // id of the extra field for sizes and offsets that do not fit into 32 bits
constexpr uint32_t kIn64 = std::numeric_limits<uint32_t>::max();

struct Directory {
  uint64_t num_entries, num_bytes, begin;
};

struct Entry {
  std::string_view name;
  uint64_t num_bytes, stored_bytes;
  uint16_t method;
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
  if (file_bytes < kEndBytes) throw BadZip("it is no zip file, as torch.save() of torch 1.6 or later writes it");
  const uint64_t end_begin = file_bytes - kEndBytes;
  const std::string text = read(end_begin, kEndBytes);
  Bytes end(text);
  if (end.number<uint32_t>() != kEndSign)
    throw BadZip("it is no zip file, as torch.save() of torch 1.6 or later writes it");
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

// Replaces sizes that do not fit into 32 bits by those in the `extra` field.
void take_sizes64(std::string_view extra, Entry& entry) {
  for (Bytes fields(extra); !fields.empty();) {
    const auto id = fields.number<uint16_t>();
    Bytes field(fields.text(fields.number<uint16_t>()));
    if (id != kExtra64) continue;
    if (entry.num_bytes == kIn64) entry.num_bytes = field.number<uint64_t>();
    if (entry.stored_bytes == kIn64) entry.stored_bytes = field.number<uint64_t>();
    return;
  }
}

Entry take_entry(Bytes& directory) {
  if (directory.number<uint32_t>() != kEntrySign) throw BadZip("its directory is damaged");
  Entry entry{};
  directory.skip(6);  // versions, flags
  entry.method = directory.number<uint16_t>();
  directory.skip(8);  // time, date, checksum
  entry.stored_bytes = directory.number<uint32_t>();
  entry.num_bytes = directory.number<uint32_t>();
  const auto name_bytes = directory.number<uint16_t>(), extra_bytes = directory.number<uint16_t>(),
             comment_bytes = directory.number<uint16_t>();
  directory.skip(12);  // disk, attributes, offset
  entry.name = directory.text(name_bytes);
  take_sizes64(directory.text(extra_bytes), entry);
  directory.skip(comment_bytes);
  return entry;
}

void check(const std::vector<Entry>& entries, uint64_t file_bytes) {
  for (const Entry& entry : entries) {
    if (!entry.name.ends_with("/constants.pkl")) continue;
    throw BadZip(
        "it is a TorchScript module (torch.jit.save() or C++'s torch::save()), not a state dict of torch.save()");
  }
  uint64_t unused = file_bytes;
  for (const Entry& entry : entries) {
    if (entry.method != 0 || entry.stored_bytes != entry.num_bytes) {
      throw BadZip(fmt::format("its entry {} is compressed, which torch.save() never does", quote(entry.name)));
    }
    if (entry.num_bytes > unused) throw BadZip("its entries have more bytes together than the file");
    unused -= entry.num_bytes;
  }
}

}  // namespace

void check_zip_directory(const ReadBytes& read, uint64_t file_bytes, std::string_view file) {
  try {
    const Directory directory = find_directory(read, file_bytes);
    if (directory.begin > file_bytes || directory.num_bytes > file_bytes - directory.begin) {
      throw BadZip("its directory is outside of it");
    }
    const std::string text = read(directory.begin, directory.num_bytes);
    std::vector<Entry> entries;
    for (Bytes rest(text); entries.size() < directory.num_entries;) entries.push_back(take_entry(rest));
    check(entries, file_bytes);
  } catch (const BadZip& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace fulgur
