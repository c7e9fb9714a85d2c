#include "fulgur/data/files/tar_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "fulgur/data/files/archive_path.h"

namespace fulgur {
namespace {

struct BadTar : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int64_t kBlockBytes = 512;

std::string shown(std::string_view path) { return fmt::format("'{:.100}'", path); }

// The path without "./" in front.
std::string without_dots(std::string path) {
  size_t begin = 0;
  while (path.compare(begin, 2, "./") == 0) begin += 2;
  return path.erase(0, begin);
}

// What a header block says. Each field is a text up to the first NUL, or a number in octal.
class Header {
 public:
  explicit Header(std::string_view block) : block_(block) {}

  bool is_zero() const { return block_.find_first_not_of('\0') == std::string_view::npos; }
  char type() const { return block_[156]; }

  std::string path() const {
    const std::string_view prefix = text(345, 155);
    if (!is_posix() || prefix.empty()) return std::string(text(0, 100));
    return fmt::format("{}/{}", prefix, text(0, 100));
  }

  int64_t num_bytes() const {
    const auto first = static_cast<uint8_t>(block_[124]);
    if ((first & 0x80) == 0) return octal(124, 12);
    if (first != 0x80) throw BadTar("a size in it is negative");  // GNU's form for 8 GB and more: big-endian
    uint64_t value = 0;
    for (const char c : block_.substr(125, 11)) {
      if (value >> 55 != 0) throw BadTar("a size in it is too large");
      value = value << 8 | static_cast<uint8_t>(c);
    }
    return static_cast<int64_t>(value);
  }

  void check_sum() const {
    int64_t sum = 8 * ' ';  // the field of the sum counts as blanks
    for (size_t i = 0; i < block_.size(); ++i) sum += i >= 148 && i < 156 ? 0 : static_cast<uint8_t>(block_[i]);
    if (sum != octal(148, 8)) throw BadTar("the checksum of a header in it is wrong: it is no tar archive, or damaged");
  }

 private:
  bool is_posix() const { return block_.substr(257, 6) == std::string_view("ustar\0", 6); }

  std::string_view text(size_t begin, size_t max_length) const {
    const std::string_view field = block_.substr(begin, max_length);
    return field.substr(0, field.find('\0'));
  }

  int64_t octal(size_t begin, size_t length) const {
    std::string_view digits = block_.substr(begin, length);
    digits.remove_prefix(std::min(digits.find_first_not_of(' '), digits.size()));
    digits = digits.substr(0, digits.find_first_of(std::string_view(" \0", 2)));
    int64_t value = 0;
    if (digits.empty()) return value;  // as in the label of a volume
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 8);
    if (error != std::errc() || end != digits.data() + digits.size() || value < 0) {
      throw BadTar("a number in a header is not octal: it is no tar archive, or damaged");
    }
    return value;
  }

  std::string_view block_;
};

// What an extended header says about the file that follows it.
struct Extension {
  std::optional<std::string> path{};
  std::optional<int64_t> num_bytes{};
};

// Takes "<length> <key>=<value>\n", where the length is that of all of it.
std::pair<std::string_view, std::string_view> take_pax_record(std::string_view& records) {
  size_t length = 0;
  const auto [end, error] = std::from_chars(records.data(), records.data() + records.size(), length);
  const auto digits = static_cast<size_t>(end - records.data());
  if (error != std::errc() || length > records.size() || length < digits + 2)
    throw BadTar("a pax header in it is damaged");
  const std::string_view record = records.substr(0, length).substr(digits);
  const size_t equals = record.find('=');
  if (!record.starts_with(' ') || !record.ends_with('\n') || equals == std::string_view::npos) {
    throw BadTar("a pax header in it is damaged");
  }
  records.remove_prefix(length);
  return {record.substr(1, equals - 1), record.substr(equals + 1, record.size() - equals - 2)};
}

void read_pax(std::string_view records, Extension& extension) {
  while (!records.empty()) {
    const auto [key, value] = take_pax_record(records);
    if (key == "path") extension.path = value;
    if (key.starts_with("GNU.sparse."))
      throw BadTar("it has a sparse file, whose holes are not stored; pack it without");
    if (key != "size") continue;
    int64_t size = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), size);
    if (error != std::errc() || end != value.data() + value.size() || size < 0) {
      throw BadTar("a pax header in it has a size that is no number");
    }
    extension.num_bytes = size;
  }
}

class Reader {
 public:
  explicit Reader(std::span<const char> archive) : archive_(archive.data(), archive.size()) {}

  std::vector<TarEntry> entries() && {
    while (true) {
      if (archive_.size() - position_ < kBlockBytes) {
        throw BadTar("it ends without the blocks of zeros that end an archive: it is cut off, or no tar archive");
      }
      const Header header(archive_.substr(position_, kBlockBytes));
      if (header.is_zero()) break;
      header.check_sum();
      position_ += kBlockBytes;
      take(header);
    }
    check_end();
    check_paths();
    return std::move(entries_);
  }

 private:
  // Readers stop at a block of zeros, so that they would not see the files after one.
  void check_end() const {
    const size_t next = archive_.find_first_not_of('\0', position_);
    if (next == std::string_view::npos) return;
    throw BadTar(
        fmt::format("it has bytes at {} after the block of zeros at {}, which ends an archive: a part was overwritten "
                    "by zeros, or several archives are in one file; copy it anew, or give each archive a file of its "
                    "own",
                    next, position_));
  }

  void take(const Header& header) {
    switch (header.type()) {
      case 'L':  // GNU: the next file's name
        extension_.path = content(header.num_bytes(), "a long name");
        extension_.path->resize(std::min(extension_.path->find('\0'), extension_.path->size()));
        return;
      case 'K':  // GNU: where the next entry, a link, points to
        content(header.num_bytes(), "a long target of a link");
        return;
      case 'x':
        return read_pax(content(header.num_bytes(), "a pax header"), extension_);
      case 'g': {  // for all following files: comments, times
        Extension ignored;
        return read_pax(content(header.num_bytes(), "a pax header"), ignored);
      }
      case 'V':  // GNU: the label of the volume
        content(header.num_bytes(), "the label of a volume");
        return;
      default:
        take_file(header, std::exchange(extension_, {}));
    }
  }

  void take_file(const Header& header, Extension extension) {
    constexpr std::string_view kFile("0\0007", 3);  // '7': contiguous, which is no different here
    constexpr char kFolder = '5';
    std::string path = without_dots(extension.path ? std::move(*extension.path) : header.path());
    if (header.type() == kFolder) return;  // a size is a hint to the space that it needs: no blocks follow
    const int64_t num_bytes = extension.num_bytes ? *extension.num_bytes : header.num_bytes();
    const int64_t begin = static_cast<int64_t>(position_);
    const std::string_view bytes = content(num_bytes, shown(path));
    if (path.ends_with('/') && bytes.empty()) return;  // a folder of tar before 1988
    if (header.type() == 'S') throw BadTar("it has a sparse file, whose holes are not stored; pack it without");
    if (kFile.find(header.type()) == std::string_view::npos) {
      throw BadTar(
          fmt::format("its entry {} is no file but of type '{}' (1 and 2 are links); pack it with --dereference",
                      shown(path), header.type()));
    }
    if (leaves_folder(path)) throw BadTar(fmt::format("its entry {} has a path that leaves the archive", shown(path)));
    entries_.push_back({std::move(path), begin, num_bytes});
  }

  // The content of the entry whose header has just been read; goes on to the next header.
  std::string_view content(int64_t num_bytes, const std::string& what) {
    const size_t left = archive_.size() - position_;
    if (static_cast<uint64_t>(num_bytes) > left) {
      throw BadTar(fmt::format("it is cut off: {} has {} bytes, but {} follow", what, num_bytes, left));
    }
    const std::string_view bytes = archive_.substr(position_, static_cast<size_t>(num_bytes));
    const size_t padding = (kBlockBytes - bytes.size() % kBlockBytes) % kBlockBytes;
    position_ += bytes.size() + std::min(padding, left - bytes.size());
    return bytes;
  }

  void check_paths() const {
    std::vector<std::string_view> paths;
    paths.reserve(entries_.size());
    for (const TarEntry& entry : entries_) paths.push_back(entry.path);
    std::ranges::sort(paths);
    const auto twice = std::ranges::adjacent_find(paths);
    if (twice != paths.end()) throw BadTar(fmt::format("its entry {} is there twice", shown(*twice)));
  }

  std::string_view archive_;
  size_t position_ = 0;
  Extension extension_{};
  std::vector<TarEntry> entries_{};
};

}  // namespace

std::vector<TarEntry> read_tar_index(std::span<const char> archive, std::string_view archive_name) {
  try {
    return Reader(archive).entries();
  } catch (const BadTar& error) {
    throw std::runtime_error(fmt::format("{}: {}", archive_name, error.what()));
  }
}

}  // namespace fulgur
