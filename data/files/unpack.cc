#include "fulgur/data/files/unpack.h"

#include <archive.h>
#include <archive_entry.h>
#include <fmt/format.h>

#include <memory>
#include <stdexcept>
#include <string>
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

// The bytes of a compressed file, without a view of what they mean.
class Decompressor {
 public:
  explicit Decompressor(const fs::path& path) : path_(path), archive_(::archive_read_new(), &::archive_read_free) {
    archive* const a = archive_.get();
    // Not archive_read_support_filter_all(), which also starts programs.
    ::archive_read_support_filter_gzip(a);
    ::archive_read_support_filter_bzip2(a);
    ::archive_read_support_filter_xz(a);
    ::archive_read_support_filter_zstd(a);
    ::archive_read_support_filter_lz4(a);
    ::archive_read_support_format_raw(a);
    constexpr size_t kBlockBytes = 1 << 20;
    archive_entry* entry = nullptr;
    check(::archive_read_open_filename(a, path.c_str(), kBlockBytes) == ARCHIVE_OK);
    check(::archive_read_next_header(a, &entry) == ARCHIVE_OK);
  }

  // Returns the number of bytes; 0: there are no more.
  size_t read(std::vector<char>& buffer) {
    const la_ssize_t num_bytes = ::archive_read_data(archive_.get(), buffer.data(), buffer.size());
    check(num_bytes >= 0);
    return static_cast<size_t>(num_bytes);
  }

 private:
  void check(bool succeeded) const {
    if (succeeded) return;
    const char* const reason = ::archive_error_string(archive_.get());
    throw std::runtime_error(fmt::format("{}: it cannot be unpacked: {}", path_.string(),
                                         reason == nullptr ? "it is empty, or damaged" : reason));
  }

  fs::path path_;
  std::unique_ptr<archive, decltype(&::archive_read_free)> archive_;
};

}  // namespace

fs::path unpack_once(const fs::path& compressed, const fs::path& folder) {
  Decompressor decompressor(compressed);
  fs::path unpacked = folder / unpacked_name(compressed);
  if (fs::exists(unpacked)) return unpacked;
  make_folders(folder);
  try {
    TemporaryFile file(unpacked);
    std::vector<char> buffer(1 << 20);
    while (const size_t num_bytes = decompressor.read(buffer)) file.writer().write(buffer.data(), num_bytes);
    file.commit();
  } catch (const CheckpointError&) {
    if (!fs::exists(unpacked)) throw;  // otherwise another process has been faster
  }
  return unpacked;
}

}  // namespace fulgur
