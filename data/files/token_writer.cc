#include "fulgur/data/files/token_writer.h"

#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fulgur/checkpoint/atomic_files.h"

namespace fulgur {
namespace {

constexpr int64_t kMaxVocabOf16Bits = int64_t{1} << 16, kMaxVocab = int64_t{1} << 32;

}  // namespace

struct TokenWriter::Hash {
  Hash() { XXH3_64bits_reset(&state); }
  XXH3_state_t state;
};

TokenWriter::TokenWriter(std::filesystem::path path)
    : path_(std::filesystem::absolute(path)), hash_(std::make_unique<Hash>()) {}

// Delegates, so that the destructor closes the file if something after its creation throws.
TokenWriter::TokenWriter(std::filesystem::path path, int64_t vocab_size) : TokenWriter(std::move(path)) {
  if (vocab_size < 1 || vocab_size > kMaxVocab) {
    throw std::invalid_argument("vocab_size must be 1 to 2^32; got " + std::to_string(vocab_size));
  }
  header_.vocab_size = vocab_size;
  header_.token_bytes = vocab_size <= kMaxVocabOf16Bits ? 2 : 4;
  const std::filesystem::path folder = path_.parent_path();
  if (!std::filesystem::is_directory(folder)) {
    throw std::runtime_error("cannot create '" + path_.string() + "': there is no folder '" + folder.string() + "'");
  }
  remove_temporary_folders(folder);  // files, too, that programs have left which were killed
  temporary_ = std::make_unique<TemporaryName>(TemporaryName::make(folder));
  file_ = std::fopen(temporary_->path().c_str(), "wbxe");  // a new file, closed on exec
  throw_unless(file_ != nullptr, "create");
  append(to_bytes({}).data(), TokenHeader::kBytes);  // a placeholder, which commit() overwrites
}

TokenWriter::~TokenWriter() {
  if (file_ != nullptr) std::fclose(file_);
}

void TokenWriter::write(std::span<const uint32_t> tokens) {
  for (const uint32_t token : tokens) {
    if (token >= header_.vocab_size) {
      throw std::invalid_argument("token " + std::to_string(token) + " is not below vocab_size (" +
                                  std::to_string(header_.vocab_size) + ")");
    }
  }
  const std::vector<uint16_t> narrow(header_.token_bytes == 2 ? tokens.begin() : tokens.end(), tokens.end());
  const void* const data = header_.token_bytes == 2 ? static_cast<const void*>(narrow.data()) : tokens.data();
  const size_t num_bytes = tokens.size() * static_cast<size_t>(header_.token_bytes);
  XXH3_64bits_update(&hash_->state, data, num_bytes);
  append(data, num_bytes);
  header_.num_tokens += std::ssize(tokens);
}

void TokenWriter::commit() {
  header_.xxh3 = XXH3_64bits_digest(&hash_->state);
  throw_unless(std::fseek(file_, 0, SEEK_SET) == 0, "write");
  append(to_bytes(header_).data(), TokenHeader::kBytes);
  throw_unless(std::fflush(file_) == 0, "write");
  throw_unless(::fsync(::fileno(file_)) == 0, "sync");
  throw_unless(std::rename(temporary_->path().c_str(), path_.c_str()) == 0, "create");
  std::fclose(std::exchange(file_, nullptr));
  sync_folder(path_.parent_path());
}

void TokenWriter::append(const void* data, size_t num_bytes) {
  throw_unless(std::fwrite(data, 1, num_bytes, file_) == num_bytes, "write");
}

void TokenWriter::throw_unless(bool holds, const char* action) const {
  if (holds) return;
  const std::string reason = std::strerror(errno);
  throw std::runtime_error(std::string("cannot ") + action + " '" + path_.string() + "': " + reason);
}

}  // namespace fulgur
