#include "fulgur/metrics/text.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "fulgur/metrics/labels.h"

namespace fulgur::metrics {
namespace {

using Parts = std::vector<std::string_view>;

Parts words_of(std::string_view text) {
  constexpr std::string_view kWhiteSpace = " \t\n\v\f\r";
  Parts words;
  for (size_t begin = text.find_first_not_of(kWhiteSpace); begin != text.npos;) {
    const size_t end = std::min(text.find_first_of(kWhiteSpace, begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(kWhiteSpace, end);
  }
  return words;
}

Parts characters_of(std::string_view text) {
  const auto continues = [](char byte) { return (static_cast<uint8_t>(byte) & 0xc0) == 0x80; };
  Parts characters;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    do ++end;
    while (end < text.size() && continues(text[end]));
    characters.push_back(text.substr(begin, end - begin));
  }
  return characters;
}

// Levenshtein's distance; distances[j] is the distance from the parts of `a` so far to the first j parts of `b`.
int64_t edit_distance(const Parts& a, const Parts& b) {
  std::vector<int64_t> distances(b.size() + 1);
  std::iota(distances.begin(), distances.end(), 0);
  for (const std::string_view part : a) {
    int64_t diagonal = distances[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const int64_t substituted = diagonal + (part == b[j] ? 0 : 1);
      diagonal = distances[j + 1];
      distances[j + 1] = std::min({substituted, diagonal + 1, distances[j] + 1});
    }
  }
  return distances.back();
}

}  // namespace

Perplexity::Perplexity(const PerplexityOptions& options)
    : Metric("Perplexity", {{.name = "total_log_probs", .value = at::zeros({}, at::kDouble), .combine = Combine::sum},
                            {.name = "count", .value = at::zeros({}, at::kLong), .combine = Combine::sum},
                            {.name = "out_of_range", .value = at::zeros({}, at::kLong), .combine = Combine::sum}}),
      options_(options) {}

void Perplexity::update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid) {
  const c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      preds.dim() == 3 && preds.is_floating_point() && target.dim() == 2 && preds.sizes().slice(0, 2) == target.sizes(),
      name(), ": preds must be floating-point logits [batch_size, seq_len, vocab_size] and target ",
      "[batch_size, seq_len]; got ", preds.toString(), " ", preds.sizes(), " and ", target.sizes());
  const internal::Labels truth = internal::checked_target(name(), target, preds.size(2), options_.ignore_index, valid);
  const bool is_wide = preds.scalar_type() == at::kDouble;
  const at::Tensor log_probs = at::log_softmax(preds.detach().flatten(0, 1), 1, is_wide ? at::kDouble : at::kFloat);
  const at::Tensor costs = log_probs.gather(1, truth.values.unsqueeze(1)).squeeze(1).neg();
  accumulate({internal::sum_where(truth.counted, costs), truth.counted.sum(), truth.out_of_range});
}

at::Tensor Perplexity::value_of(std::span<const at::Tensor> states) const {
  return internal::nan_if(states[2].gt(0), states[0].div(states[1]).exp());
}

WordErrorRate::WordErrorRate() : ErrorRate("WordErrorRate", words_of) {}

CharErrorRate::CharErrorRate() : ErrorRate("CharErrorRate", characters_of) {}

namespace internal {

ErrorRate::ErrorRate(std::string name, Parts (*parts_of)(std::string_view text))
    : Metric(std::move(name), {{.name = "errors", .value = at::zeros({}, at::kLong), .combine = Combine::sum},
                               {.name = "total", .value = at::zeros({}, at::kLong), .combine = Combine::sum}}),
      parts_of_(parts_of) {}

void ErrorRate::update(const std::vector<std::string>& preds, const std::vector<std::string>& target,
                       const Valid& valid) {
  TORCH_CHECK_VALUE(preds.size() == target.size(), name(),
                    ": preds and target must have one text per sample each; got ", preds.size(), " and ",
                    target.size());
  const at::Tensor samples = at::arange(static_cast<int64_t>(preds.size()));
  const at::Tensor counts = counted(name(), valid, samples).contiguous();
  int64_t errors = 0;
  int64_t total = 0;
  for (size_t i = 0; i < preds.size(); ++i) {
    if (!counts.const_data_ptr<bool>()[i]) continue;
    const Parts expected = parts_of_(target[i]);
    errors += edit_distance(parts_of_(preds[i]), expected);
    total += static_cast<int64_t>(expected.size());
  }
  accumulate({at::scalar_tensor(errors, at::kLong), at::scalar_tensor(total, at::kLong)});
}

at::Tensor ErrorRate::value_of(std::span<const at::Tensor> states) const {
  return states[0].to(at::kDouble).div(states[1]);
}

}  // namespace internal

at::Tensor perplexity(const at::Tensor& preds, const at::Tensor& target, const PerplexityOptions& options) {
  Perplexity metric(options);
  metric.update(preds, target);
  return metric.compute();
}

at::Tensor word_error_rate(const std::vector<std::string>& preds, const std::vector<std::string>& target) {
  WordErrorRate metric;
  metric.update(preds, target);
  return metric.compute();
}

at::Tensor char_error_rate(const std::vector<std::string>& preds, const std::vector<std::string>& target) {
  CharErrorRate metric;
  metric.update(preds, target);
  return metric.compute();
}

}  // namespace fulgur::metrics
