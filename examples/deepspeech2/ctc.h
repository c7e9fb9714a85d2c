#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace deepspeech2 {

// The characters of a transcript. Label 0 is the blank of CTC, label i > 0 is kCharacters[i - 1].
// Source of CTC: Graves et al. 2006, "Connectionist Temporal Classification", ICML.
inline constexpr std::string_view kCharacters = " 'abcdefghijklmnopqrstuvwxyz";
inline constexpr int64_t kNumLabels = std::ssize(kCharacters) + 1;

// The labels of a text; capitals count as small letters. Throws UsageError for another character.
std::vector<int64_t> labels_of(std::string_view text);
std::string text_of(const std::vector<int64_t>& labels);

// The shortest output that can spell `labels`: one frame for each, and a blank between two that are equal.
int64_t min_output_frames(const std::vector<int64_t>& labels);

// The text of the likeliest path: the best label of each frame, without repetitions and blanks.
// log_probs: float [num_frames, up to kNumLabels] on the CPU.
std::string greedy_decode(const at::Tensor& log_probs);

// The likeliest text, whose probability is that of all its paths together. After each frame only the `beam_width` best
// beginnings are kept; with a beam that keeps all of them the search is exact. log_probs as above.
// Source: Hannun et al. 2014, arXiv:1408.2873, algorithm 1, without its language model.
std::string beam_search_decode(const at::Tensor& log_probs, int64_t beam_width);

}  // namespace deepspeech2
