#include "examples/bert_classifier/word_piece.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <ranges>
#include <utility>

#include "fulgur.h"

namespace bert_classifier {
namespace {

using CodePoints = std::vector<utf8proc_int32_t>;

constexpr size_t kLongestWord = 100;  // in characters; a longer one is unknown

// The code points of a text; bytes that are no UTF-8 are left out.
CodePoints decode(std::string_view text) {
  CodePoints points;
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t i = 0; i < text.size();) {
    utf8proc_int32_t point = 0;
    const auto num_bytes = utf8proc_iterate(bytes + i, static_cast<utf8proc_ssize_t>(text.size() - i), &point);
    if (num_bytes > 0) points.push_back(point);
    i += static_cast<size_t>(std::max<utf8proc_ssize_t>(1, num_bytes));
  }
  return points;
}

void append(std::string& text, utf8proc_int32_t point) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto num_bytes = utf8proc_encode_char(point, bytes.data());
  text.append(reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(num_bytes));
}

bool is_space(utf8proc_int32_t point) {
  if (point == '\t' || point == '\n' || point == '\r') return true;
  switch (utf8proc_category(point)) {
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return true;
    default:
      return false;
  }
}

// What does not show, such as control characters and marks of direction.
bool is_control(utf8proc_int32_t point) {
  switch (utf8proc_category(point)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CS:
      return !is_space(point);
    default:
      return point == 0xFFFD;
  }
}

bool is_punctuation(utf8proc_int32_t point) {
  const bool is_ascii_symbol = point > ' ' && point < 0x7F && !(point >= '0' && point <= '9') &&
                               !(point >= 'A' && point <= 'Z') && !(point >= 'a' && point <= 'z');
  if (is_ascii_symbol) return true;
  const utf8proc_category_t category = utf8proc_category(point);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

// True for the characters of Chinese, which are words of their own. The blocks are those of the tokenizers package.
bool is_ideograph(utf8proc_int32_t point) {
  constexpr std::array<std::pair<utf8proc_int32_t, utf8proc_int32_t>, 8> kBlocks = {{{0x4E00, 0x9FFF},
                                                                                     {0x3400, 0x4DBF},
                                                                                     {0x20000, 0x2A6DF},
                                                                                     {0x2A700, 0x2B73F},
                                                                                     {0x2B740, 0x2B81F},
                                                                                     {0x2B920, 0x2CEAF},
                                                                                     {0xF900, 0xFAFF},
                                                                                     {0x2F800, 0x2FA1F}}};
  return std::ranges::any_of(kBlocks, [=](const auto& block) { return block.first <= point && point <= block.second; });
}

// The words of a text, in small letters and without accents.
std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words(1);
  const auto end_word = [&] {
    if (!words.back().empty()) words.emplace_back();
  };
  const auto add = [&](utf8proc_int32_t point) {
    if (utf8proc_category(point) == UTF8PROC_CATEGORY_MN) return;  // an accent, apart from its letter
    const bool is_alone = is_punctuation(point) || is_ideograph(point);
    if (is_space(point) || is_alone) end_word();
    if (is_space(point)) return;
    append(words.back(), utf8proc_tolower(point));
    if (is_alone) end_word();
  };
  for (const utf8proc_int32_t point : decode(text)) {
    if (is_control(point)) continue;
    std::array<utf8proc_int32_t, 32> parts{};  // a letter, and its accents
    const auto num_parts = utf8proc_decompose_char(point, parts.data(), parts.size(), UTF8PROC_DECOMPOSE, nullptr);
    for (utf8proc_ssize_t i = 0; i < num_parts; ++i) add(parts[static_cast<size_t>(i)]);
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

// Where each character of a word begins, and its end.
std::vector<size_t> boundaries(std::string_view word) {
  std::vector<size_t> places;
  for (size_t i = 0; i < word.size(); ++i) {
    const bool continues = (static_cast<unsigned char>(word[i]) & 0xC0) == 0x80;
    if (!continues) places.push_back(i);
  }
  places.push_back(word.size());
  return places;
}

}  // namespace

WordPiece::WordPiece(const std::filesystem::path& vocabulary) : file_(vocabulary) {
  std::ifstream lines(vocabulary);
  if (!lines) throw fulgur::UsageError(fmt::format("cannot read the vocabulary '{}'", vocabulary.string()));
  for (std::string token; std::getline(lines, token);) {
    if (token.ends_with('\r')) token.pop_back();
    const auto [first, is_new] = numbers_.try_emplace(token, size());
    if (is_new) continue;
    throw fulgur::UsageError(fmt::format("{}:{}: the token '{}' is that of line {}, too", vocabulary.string(),
                                         size() + 1, token, first->second + 1));
  }
  unknown_ = number_of("[UNK]");
  begin_ = number_of("[CLS]");
  end_ = number_of("[SEP]");
}

int64_t WordPiece::number_of(std::string_view token) const {
  const auto found = numbers_.find(token);
  if (found != numbers_.end()) return found->second;
  throw fulgur::UsageError(
      fmt::format("{} has no token {}: give the vocab.txt of an uncased BERT", file_.string(), token));
}

std::vector<int64_t> WordPiece::encode(std::string_view text, int64_t max_length) const {
  std::vector<int64_t> tokens = {begin_};
  for (const std::string& word : words_of(text)) add_pieces(word, tokens);
  tokens.resize(std::min(tokens.size(), static_cast<size_t>(std::max<int64_t>(2, max_length) - 1)));
  tokens.push_back(end_);
  return tokens;
}

void WordPiece::add_pieces(std::string_view word, std::vector<int64_t>& tokens) const {
  const std::vector<size_t> places = boundaries(word);
  const size_t num_before = tokens.size();
  size_t begin = 0;
  while (places.size() - 1 <= kLongestWord && begin + 1 < places.size()) {
    size_t end = places.size() - 1;
    for (; end > begin; --end) {
      const std::string_view piece = word.substr(places[begin], places[end] - places[begin]);
      const auto found = begin == 0 ? numbers_.find(piece) : numbers_.find("##" + std::string(piece));
      if (found == numbers_.end()) continue;
      tokens.push_back(found->second);
      break;
    }
    if (end == begin) break;
    begin = end;
  }
  if (begin + 1 == places.size()) return;
  tokens.resize(num_before);
  tokens.push_back(unknown_);
}

}  // namespace bert_classifier
