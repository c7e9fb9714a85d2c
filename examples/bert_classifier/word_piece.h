#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace bert_classifier {

// Text as the tokens that an uncased BERT reads: accents are taken off, letters become small, words are cut at white
// space and punctuation, and each word is cut into the longest pieces that the vocabulary has, from the left; "##" is
// in front of those that go on with a word. A word without such pieces is [UNK].
// Sources: Devlin et al. 2018, arXiv:1810.04805; Wu et al. 2016, arXiv:1609.08144, for the pieces.
class WordPiece {
 public:
  // `vocabulary` has a token in each line, by number. Throws UsageError without [UNK], [CLS] and [SEP], and for a
  // token that is there twice.
  explicit WordPiece(const std::filesystem::path& vocabulary);

  // Returns [CLS], the pieces of the text, [SEP], at most `max_length` tokens: the last pieces of a longer text are
  // left out. Bytes that are no UTF-8 are ignored.
  std::vector<int64_t> encode(std::string_view text, int64_t max_length) const;

  int64_t size() const { return static_cast<int64_t>(numbers_.size()); }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view token) const { return std::hash<std::string_view>{}(token); }
  };

  int64_t number_of(std::string_view token) const;
  void add_pieces(std::string_view word, std::vector<int64_t>& tokens) const;

  std::filesystem::path file_;
  std::unordered_map<std::string, int64_t, Hash, std::equal_to<>> numbers_;
  int64_t unknown_, begin_, end_;
};

}  // namespace bert_classifier
