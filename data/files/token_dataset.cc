#include "fulgur/data/files/token_dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/data/files/content_digest.h"

namespace fulgur {
namespace {

template <class From, class To>
void copy_tokens(const From* from, int64_t num_tokens, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<size_t>(num_tokens) * sizeof(From));
    return;
  }
  constexpr int64_t kBlock = 32;  // a length that the compiler knows, so that it makes vector code
  int64_t begin = 0;
  for (; begin + kBlock <= num_tokens; begin += kBlock) {
    for (int64_t i = begin; i < begin + kBlock; ++i) to[i] = from[i];
  }
  std::copy(from + begin, from + num_tokens, to + begin);
}

// The CPU sees by itself what follows in a window, but not where the next window begins.
void prefetch(const void* window) {
  constexpr ptrdiff_t kLineBytes = 64;
  __builtin_prefetch(window);
  __builtin_prefetch(static_cast<const char*>(window) + kLineBytes);
}

// Copies the windows that begin at index[i] * stride one after another.
template <class From, class To>
void gather(const From* tokens, at::ArrayRef<int64_t> index, int64_t stride, int64_t length, To* to) {
  for (size_t i = 0; i < index.size(); ++i) {
    if (i + 1 < index.size()) prefetch(tokens + index[i + 1] * stride);
    copy_tokens(tokens + index[i] * stride, length, to);
    to += length;
  }
}

int64_t count_windows(const std::filesystem::path& file, int64_t num_tokens, int64_t length, int64_t stride) {
  if (num_tokens < length) {
    throw UsageError(fmt::format("{}: it has {} tokens, but a window needs {}; give a longer text, or a smaller length",
                                 file.string(), num_tokens, length));
  }
  return (num_tokens - length) / stride + 1;
}

}  // namespace

void TokenOptions::describe(FieldVisitor& visit) {
  visit({.name = "length", .help = "tokens in a window: one more than the model looks back on", .min = 1}, &length);
  visit({.name = "stride", .help = "tokens from the start of a window to that of the next; none: length", .min = 1},
        &stride);
  visit({.name = "keeps_width", .help = "hand out tokens of 16 or 32 bits, as in the file, not of 64"}, &keeps_width);
}

TokenDataset::TokenDataset(const std::filesystem::path& file, TokenOptions options)
    : length_(options.length), stride_(options.stride.value_or(options.length)), keeps_width_(options.keeps_width) {
  check_fields("TokenDataset", options);
  map_ = MemoryMap::open(file);
  header_ = parse_token_header(map_->bytes(), static_cast<int64_t>(map_->bytes().size()), file.string());
  size_ = count_windows(file, header_.num_tokens, length_, stride_);
}

std::shared_ptr<TokenDataset> TokenDataset::make(const std::filesystem::path& file, TokenOptions options) {
  return std::make_shared<TokenDataset>(file, options);
}

template <class Use>
void TokenDataset::with_tokens(const Use& use) const {
  const char* const data = map_->bytes().data() + TokenHeader::kBytes;
  header_.token_bytes == 2 ? use(reinterpret_cast<const uint16_t*>(data))
                           : use(reinterpret_cast<const uint32_t*>(data));
}

Batch TokenDataset::get(int64_t index, Random&) const {
  const Batch batch = get_batch(at::scalar_tensor(index, at::kLong).unsqueeze(0), {});
  return {{"tokens", batch["tokens"][0]}};
}

Batch TokenDataset::get_batch(const at::Tensor& indices, std::span<Random>) const {
  const at::Tensor contiguous = indices.contiguous();
  const at::ArrayRef<int64_t> index(contiguous.const_data_ptr<int64_t>(), static_cast<size_t>(contiguous.numel()));
  for (const int64_t i : index) TORCH_CHECK_INDEX(i >= 0 && i < size_, "sample ", i, " of ", size_);
  const at::ScalarType own = header_.token_bytes == 2 ? at::kUInt16 : at::kUInt32;
  const at::Tensor batch = at::empty({indices.numel(), length_}, keeps_width_ ? own : at::kLong);
  void* const to = batch.mutable_data_ptr();
  with_tokens([&](const auto* tokens) {
    using Token = std::remove_cvref_t<decltype(*tokens)>;
    if (keeps_width_) {
      gather(tokens, index, stride_, length_, static_cast<Token*>(to));
    } else {
      gather(tokens, index, stride_, length_, static_cast<int64_t*>(to));
    }
  });
  return {{"tokens", batch}};
}

std::string TokenDataset::digest() const {
  return hex_digest(fmt::format("{} {:016x} {} {}", header_.num_tokens, header_.xxh3, length_, stride_));
}

void TokenDataset::verify() const {
  const auto fail = [&](const std::string& reason) {
    throw std::runtime_error(fmt::format("{}: {}", map_->path().string(), reason));
  };
  const auto bytes = map_->bytes().subspan(TokenHeader::kBytes);
  if (const uint64_t found = XXH3_64bits(bytes.data(), bytes.size()); found != header_.xxh3) {
    fail(fmt::format("it is damaged: the hash of its tokens is {:016x}, but its header says {:016x}", found,
                     header_.xxh3));
  }
  with_tokens([&](const auto* tokens) {
    const auto largest = header_.num_tokens == 0 ? 0 : *std::max_element(tokens, tokens + header_.num_tokens);
    if (largest >= header_.vocab_size) {
      fail(fmt::format("token {} is not below the vocabulary size of {}", largest, header_.vocab_size));
    }
  });
}

}  // namespace fulgur
