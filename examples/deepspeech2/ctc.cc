#include "examples/deepspeech2/ctc.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "fulgur/base/error.h"

namespace deepspeech2 {
namespace {

constexpr int64_t kBlank = 0;
constexpr double kImpossible = -std::numeric_limits<double>::infinity();

char character_of(int64_t label) { return kCharacters[static_cast<size_t>(label - 1)]; }

double log_add(double a, double b) {
  const auto [low, high] = std::minmax(a, b);
  return low == kImpossible ? high : high + std::log1p(std::exp(low - high));
}

// The log probability of a text's paths so far, by what their last frame is.
struct Score {
  double blank = kImpossible;
  double label = kImpossible;
  double total() const { return log_add(blank, label); }
};
using Beam = std::map<std::string, Score>;

// All texts that those of `beam` become by one more frame. log_probs: of its labels.
Beam extended(const Beam& beam, const float* log_probs, int64_t num_labels) {
  Beam next;
  for (const auto& [text, score] : beam) {
    Score& same = next[text];
    same.blank = log_add(same.blank, score.total() + log_probs[kBlank]);
    for (int64_t label = 1; label < num_labels; ++label) {
      const char character = character_of(label);
      const bool repeats = !text.empty() && text.back() == character;
      if (repeats) same.label = log_add(same.label, score.label + log_probs[label]);
      Score& longer = next[text + character];  // a label that repeats needs a blank before it
      longer.label = log_add(longer.label, (repeats ? score.blank : score.total()) + log_probs[label]);
    }
  }
  return next;
}

Beam best_of(const Beam& beam, int64_t width) {
  std::vector<std::pair<double, const Beam::value_type*>> ranked;
  for (const auto& item : beam) ranked.emplace_back(-item.second.total(), &item);
  std::ranges::stable_sort(ranked, {}, &std::pair<double, const Beam::value_type*>::first);
  Beam best;
  for (int64_t i = 0; i < std::min(width, std::ssize(ranked)); ++i) best.insert(*ranked[static_cast<size_t>(i)].second);
  return best;
}

}  // namespace

std::vector<int64_t> labels_of(std::string_view text) {
  std::vector<int64_t> labels;
  for (const char character : text) {
    const auto small = static_cast<char>(std::tolower(static_cast<unsigned char>(character)));
    const size_t place = kCharacters.find(small);
    if (place == std::string_view::npos) {
      throw fulgur::UsageError(fmt::format(
          "a transcript consists of letters from a to z, spaces and apostrophes, but '{}' has the character "
          "{:?}; spell it out",
          text, character));
    }
    labels.push_back(static_cast<int64_t>(place) + 1);
  }
  return labels;
}

std::string text_of(const std::vector<int64_t>& labels) {
  std::string text;
  for (const int64_t label : labels) text += character_of(label);
  return text;
}

int64_t min_output_frames(const std::vector<int64_t>& labels) {
  int64_t frames = std::ssize(labels);
  for (size_t i = 1; i < labels.size(); ++i) frames += labels[i] == labels[i - 1] ? 1 : 0;
  return frames;
}

std::string greedy_decode(const at::Tensor& log_probs) {
  const at::Tensor best = log_probs.argmax(1);
  std::string text;
  int64_t previous = kBlank;
  for (int64_t frame = 0; frame < best.size(0); ++frame) {
    const int64_t label = best.const_data_ptr<int64_t>()[frame];
    if (label != kBlank && label != previous) text += character_of(label);
    previous = label;
  }
  return text;
}

std::string beam_search_decode(const at::Tensor& log_probs, int64_t beam_width) {
  const at::Tensor rows = log_probs.to(at::kFloat).contiguous();
  Beam beam{{"", {.blank = 0.0}}};
  for (int64_t frame = 0; frame < rows.size(0); ++frame) {
    const float* row = rows.const_data_ptr<float>() + frame * rows.size(1);
    beam = best_of(extended(beam, row, rows.size(1)), beam_width);
  }
  return best_of(beam, 1).begin()->first;
}

}  // namespace deepspeech2
