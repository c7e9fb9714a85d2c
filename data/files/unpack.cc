#include "fulgur/data/files/unpack.h"

#include <archive.h>
#include <archive_entry.h>
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/data/files/content_digest.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

std::string unpacked_name(const fs::path& compressed) {
  const std::string identity = fmt::format("{} {} {}", fs::absolute(compressed).string(), fs::file_size(compressed),
                                           fs::last_write_time(compressed).time_since_epoch().count());
  const std::string name = compressed.filename().string();
  return fmt::format("{}-{}.tar", name.substr(0, name.find('.')), hex_digest(identity));
}

constexpr size_t kBlockBytes = 1 << 20;

// The bytes of a compressed file, without a view of what they mean.
class Decompressor {
 public:
  explicit Decompressor(const fs::path& path) : path_(path) {}
  virtual ~Decompressor() = default;
  Decompressor(const Decompressor&) = delete;
  Decompressor& operator=(const Decompressor&) = delete;

  // Returns the number of bytes; 0: there are no more.
  virtual size_t read(std::vector<char>& buffer) = 0;

 protected:
  [[noreturn]] void fail(std::string_view reason) const {
    throw std::runtime_error(fmt::format("{}: it cannot be unpacked: {}", path_.string(), reason));
  }

 private:
  fs::path path_;
};

bool is_gzip(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return file.get() == 0x1f && file.get() == 0x8b;
}

// A file of one or several gzip members, one after the other. libarchive, at least up to 3.6, compares neither the
// CRC-32 nor the length at the end of a member; zlib does.
class GzipDecompressor final : public Decompressor {
 public:
  explicit GzipDecompressor(const fs::path& path)
      : Decompressor(path), file_(path, std::ios::binary), compressed_(kBlockBytes) {
    constexpr int kGzip = MAX_WBITS + 16;
    if (::inflateInit2(&stream_, kGzip) != Z_OK) throw std::bad_alloc();
  }
  ~GzipDecompressor() override { ::inflateEnd(&stream_); }

  size_t read(std::vector<char>& buffer) override {
    stream_.next_out = reinterpret_cast<Bytef*>(buffer.data());
    stream_.avail_out = static_cast<uInt>(buffer.size());
    while (stream_.avail_out > 0 && (!is_between_members_ || begins_member())) inflate();
    return buffer.size() - stream_.avail_out;
  }

 private:
  // Returns false at the end of the file.
  bool has_input() {
    if (stream_.avail_in > 0) return true;
    file_.read(compressed_.data(), std::ssize(compressed_));
    if (file_.bad()) fail("it cannot be read");
    stream_.next_in = reinterpret_cast<Bytef*>(compressed_.data());
    stream_.avail_in = static_cast<uInt>(file_.gcount());
    return stream_.avail_in > 0;
  }

  // Skips the zeros with which some programs fill up the last block of a file. Returns false at the end of the file.
  bool begins_member() {
    while (has_input()) {
      const std::string_view input(reinterpret_cast<const char*>(stream_.next_in), stream_.avail_in);
      const auto num_zeros = static_cast<uInt>(std::min(input.find_first_not_of('\0'), input.size()));
      stream_.next_in += num_zeros;
      stream_.avail_in -= num_zeros;
      if (stream_.avail_in == 0) continue;
      ::inflateReset(&stream_);
      is_between_members_ = false;
      return true;
    }
    return false;
  }

  void inflate() {
    if (!has_input()) fail("truncated gzip input");
    const int result = ::inflate(&stream_, Z_NO_FLUSH);
    is_between_members_ = result == Z_STREAM_END;
    if (result == Z_OK || is_between_members_) return;
    fail(fmt::format("it is damaged ({}); copy or pack it anew",
                     stream_.msg == nullptr ? "it cannot be inflated" : stream_.msg));
  }

  std::ifstream file_;
  std::vector<char> compressed_;
  z_stream stream_{};
  bool is_between_members_ = true;
};

class LibarchiveDecompressor final : public Decompressor {
 public:
  explicit LibarchiveDecompressor(const fs::path& path)
      : Decompressor(path), archive_(::archive_read_new(), &::archive_read_free) {
    archive* const a = archive_.get();
    // Not archive_read_support_filter_all(), which also starts programs.
    ::archive_read_support_filter_bzip2(a);
    ::archive_read_support_filter_xz(a);
    ::archive_read_support_filter_zstd(a);
    ::archive_read_support_filter_lz4(a);
    ::archive_read_support_format_raw(a);
    archive_entry* entry = nullptr;
    check(::archive_read_open_filename(a, path.c_str(), kBlockBytes) == ARCHIVE_OK);
    check(::archive_read_next_header(a, &entry) == ARCHIVE_OK);
  }

  size_t read(std::vector<char>& buffer) override {
    const la_ssize_t num_bytes = ::archive_read_data(archive_.get(), buffer.data(), buffer.size());
    check(num_bytes >= 0);
    return static_cast<size_t>(num_bytes);
  }

 private:
  void check(bool succeeded) const {
    if (succeeded) return;
    const char* const reason = ::archive_error_string(archive_.get());
    fail(reason == nullptr ? "it is empty, or damaged" : reason);
  }

  std::unique_ptr<archive, decltype(&::archive_read_free)> archive_;
};

std::unique_ptr<Decompressor> open_compressed(const fs::path& path) {
  if (is_gzip(path)) return std::make_unique<GzipDecompressor>(path);
  return std::make_unique<LibarchiveDecompressor>(path);
}

}  // namespace

fs::path unpack_once(const fs::path& compressed, const fs::path& folder) {
  const auto decompressor = open_compressed(compressed);
  fs::path unpacked = folder / unpacked_name(compressed);
  if (fs::exists(unpacked)) return unpacked;
  make_folders(folder);
  try {
    TemporaryFile file(unpacked);
    std::vector<char> buffer(kBlockBytes);
    while (const size_t num_bytes = decompressor->read(buffer)) file.writer().write(buffer.data(), num_bytes);
    file.commit();
  } catch (const CheckpointError&) {
    if (!fs::exists(unpacked)) throw;  // otherwise another process has been faster
  }
  return unpacked;
}

}  // namespace fulgur
