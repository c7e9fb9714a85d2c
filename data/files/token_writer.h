#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>

#include "fulgur/data/files/token_header.h"

namespace fulgur {

class TemporaryName;

// Writes a token file (token_header.h) from start to end, in constant memory. The file appears complete or not at all:
// it has a temporary name in the same folder until commit() renames it, which replaces an older file. Tokens have two
// bytes if the vocabulary permits, four otherwise. Throws std::runtime_error that names the file and the reason.
class TokenWriter {
 public:
  // Throws std::invalid_argument unless 1 <= vocab_size <= 2^32.
  TokenWriter(std::filesystem::path path, int64_t vocab_size);
  ~TokenWriter();  // removes the temporary file unless it was committed
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  // Appends tokens. Throws std::invalid_argument for one that is not below vocab_size.
  void write(std::span<const uint32_t> tokens);

  // Writes the header, syncs the file and gives it its name; nothing can be written afterwards.
  void commit();

  const std::filesystem::path& path() const { return path_; }
  int64_t num_tokens() const { return header_.num_tokens; }

 private:
  struct Hash;

  explicit TokenWriter(std::filesystem::path path);  // creates no file yet
  void append(const void* data, size_t num_bytes);
  void throw_unless(bool holds, const char* action) const;  // throws with the reason in errno

  std::filesystem::path path_;
  std::unique_ptr<TemporaryName> temporary_;
  TokenHeader header_;
  std::unique_ptr<Hash> hash_;
  std::FILE* file_ = nullptr;
};

}  // namespace fulgur
