#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/core/metric.h"
#include "fulgur/metrics/samples.h"

namespace fulgur::metrics {

struct PerplexityOptions {
  std::optional<int64_t> ignore_index{};  // tokens with this target, such as padding, do not count; often -100
};

// exp of the mean negative log likelihood of the target tokens.
// preds: logits (or log probabilities) [batch_size, seq_len, vocab_size]; target: integers [batch_size, seq_len].
// A very improbable token has a large, finite cost; in torchmetrics its probability can round to 0, and the value to
// inf. The value is NaN before the first update(), and if a target on an accelerator is outside the vocabulary; on the
// CPU such a target throws.
class Perplexity final : public Metric {
 public:
  explicit Perplexity(const PerplexityOptions& options = {});
  void update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid = std::nullopt);

 protected:
  at::Tensor value_of(std::span<const at::Tensor> states) const override;

 private:
  PerplexityOptions options_;
};

namespace internal {

// The edit distance (Levenshtein) between preds and target, summed over the texts, divided by the number of words or
// characters in target; above 1 if preds is much longer. The state lives on the CPU. NaN before the first update().
class ErrorRate : public Metric {
 public:
  // Each text is one sample. `valid` is read on the CPU.
  void update(const std::vector<std::string>& preds, const std::vector<std::string>& target,
              const Valid& valid = std::nullopt);

 protected:
  using Parts = std::vector<std::string_view>;
  ErrorRate(std::string name, Parts (*parts_of)(std::string_view text));
  at::Tensor value_of(std::span<const at::Tensor> states) const override;

 private:
  Parts (*parts_of_)(std::string_view text);
};

}  // namespace internal

// The parts are words, separated by ASCII white space.
class WordErrorRate final : public internal::ErrorRate {
 public:
  WordErrorRate();
};

// The parts are characters of UTF-8, white space among them.
class CharErrorRate final : public internal::ErrorRate {
 public:
  CharErrorRate();
};

// The values of a single batch.
at::Tensor perplexity(const at::Tensor& preds, const at::Tensor& target, const PerplexityOptions& options = {});
at::Tensor word_error_rate(const std::vector<std::string>& preds, const std::vector<std::string>& target);
at::Tensor char_error_rate(const std::vector<std::string>& preds, const std::vector<std::string>& target);

}  // namespace fulgur::metrics
