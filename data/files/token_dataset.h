#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "fulgur/base/describe.h"
#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/data/dataset.h"
#include "fulgur/data/files/token_header.h"

namespace fulgur {

// The options of TokenDataset.
struct TokenOptions {
  int64_t length = 1025;            // tokens in a window: the context of the model and one more to predict
  std::optional<int64_t> stride{};  // tokens from the start of a window to that of the next; nullopt: length
  bool keeps_width = false;         // false: int64; true: uint16 or uint32, as in the file
  void describe(FieldVisitor& visit);
};

// Windows of the tokens in a mapped file, which //tools:tokens makes of text. Samples: "tokens" [length]. The model
// predicts the last length - 1 of them from the first length - 1:
//   auto train = TokenDataset::make("books.tokens", {.length = 1025, .stride = 1024});
//   logits = forward(batch["tokens"].slice(1, 0, -1));  // compared with batch["tokens"].slice(1, 1)
// With stride = length - 1 each token but the first is predicted once per epoch; with stride = 1 a window begins at
// each token, for samplers that draw some of the windows. A window may reach from one document into the next; tokens at
// the end that fill no window are left out.
//   With keeps_width a batch has a quarter (uint16) or half (uint32) of the bytes, also in the copy to a GPU. The model
// then begins with batch["tokens"].to(at::kLong), the type that embeddings and losses need.
class TokenDataset final : public Dataset {
 public:
  // Throws UsageError for options out of range or if the file is too short for a window, std::runtime_error as
  // parse_token_header() says.
  explicit TokenDataset(const std::filesystem::path& file, TokenOptions options = {});
  static std::shared_ptr<TokenDataset> make(const std::filesystem::path& file, TokenOptions options = {});

  int64_t size() const override { return size_; }
  Batch get(int64_t index, Random& random) const override;
  Batch get_batch(const at::Tensor& indices, std::span<Random> random) const override;
  std::string digest() const override;  // depends on the tokens, the length and the stride

  int64_t num_tokens() const { return header_.num_tokens; }
  int64_t vocab_size() const { return header_.vocab_size; }  // all tokens are smaller

  // Reads the whole file and compares it with the hash in its header, as fast as the disk is (some GB/s if the file is
  // in the page cache). Throws std::runtime_error if they differ, or a token is not below vocab_size().
  void verify() const;

 private:
  // Calls `use` with a pointer to the first token, a uint16_t or uint32_t.
  template <class Use>
  void with_tokens(const Use& use) const;

  std::shared_ptr<const MemoryMap> map_;
  TokenHeader header_;
  int64_t length_, stride_, size_;
  bool keeps_width_;
};

}  // namespace fulgur
