// Makes token files (data/files/token_header.h) of text, for TokenDataset; docs/data/files.md shows how.
//
// A program in C++, because SentencePiece is a Debian package for C++ and the file format has its writer there. It is
// not linked to libtorch, whose protobuf would meet SentencePiece's.
#include <sentencepiece_processor.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/data/files/token_header.h"
#include "fulgur/data/files/token_writer.h"
#include "fulgur/reports/command.h"

namespace {

namespace fs = std::filesystem;

using fulgur::TokenWriter;

constexpr std::string_view kWhiteSpace = " \n\r\t";

struct Options {
  std::vector<fs::path> texts{};
  fs::path out{};
  fs::path model{};       // empty: a token per byte
  double held_out = 0.0;  // fraction of each text's bytes
};

// Text to tokens.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocab_size() const = 0;  // with the token that ends a document
  virtual uint32_t end_of_document() const = 0;
  virtual std::vector<uint32_t> encode(std::string_view text) const = 0;
};

class Bytes final : public Tokenizer {
 public:
  int64_t vocab_size() const override { return 257; }
  uint32_t end_of_document() const override { return 256; }
  std::vector<uint32_t> encode(std::string_view text) const override {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(text.data());
    return {bytes, bytes + text.size()};
  }
};

// The model's </s> ends a document; a model without one gets a token behind its own.
class SentencePiece final : public Tokenizer {
 public:
  explicit SentencePiece(const fs::path& model) {
    const auto status = processor_.Load(model.string());
    if (!status.ok()) {
      throw std::runtime_error("cannot load the SentencePiece model '" + model.string() + "': " + status.message());
    }
  }
  int64_t vocab_size() const override { return processor_.GetPieceSize() + (processor_.eos_id() < 0 ? 1 : 0); }
  uint32_t end_of_document() const override {
    return static_cast<uint32_t>(processor_.eos_id() < 0 ? processor_.GetPieceSize() : processor_.eos_id());
  }
  std::vector<uint32_t> encode(std::string_view text) const override {
    const std::vector<int> ids = processor_.EncodeAsIds({text.data(), text.size()});
    return {ids.begin(), ids.end()};
  }

 private:
  sentencepiece::SentencePieceProcessor processor_{};
};

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

// The text itself, or the texts under a folder in the order of their paths, without hidden files and links.
std::vector<fs::path> texts_under(const fs::path& path) {
  if (!fs::exists(path)) throw std::runtime_error("there is no file or folder '" + path.string() + "'");
  if (!fs::is_directory(path)) return {path};
  std::vector<fs::path> files;
  for (auto entry = fs::recursive_directory_iterator(path); entry != fs::end(entry); ++entry) {
    if (is_hidden(entry->path())) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file() && !entry->is_symlink()) {
      files.push_back(entry->path());
    }
  }
  std::ranges::sort(files);
  return files;
}

fs::path held_out_path(fs::path out) {
  const std::string extension = out.extension().string();
  return out.replace_extension("held_out" + extension);
}

// Throws UsageError if the file exists: it may have taken hours.
void require_new(const fs::path& file) {
  if (!fs::exists(file)) return;
  throw fulgur::UsageError("'" + file.string() +
                           "' exists and would be overwritten; move it away, or name another file " + "with --out");
}

// Whether this program has written the file.
bool has_tokens(const fs::path& file) {
  std::string begin(fulgur::TokenHeader::kBytes, '\0');
  std::ifstream(file, std::ios::binary).read(begin.data(), std::ssize(begin));
  return fulgur::begins_token_file(begin);
}

// All texts of the options, without the token files that earlier runs have written among them.
std::vector<fs::path> texts_of(const Options& options) {
  std::vector<fs::path> texts;
  for (const fs::path& path : options.texts) {
    std::ranges::remove_copy_if(texts_under(path), std::back_inserter(texts), has_tokens);
  }
  return texts;
}

constexpr size_t kMaxCharacterBytes = 4;  // in UTF-8

bool is_continuation(char byte) { return (byte & 0xc0) == 0x80; }

// Offset in UTF-8 text, at most `offset`, at which a character begins.
size_t character_begin(std::string_view text, size_t offset) {
  for (size_t begin = offset; begin + kMaxCharacterBytes > offset; --begin) {
    if (begin == 0 || begin == text.size() || !is_continuation(text[begin])) return begin;
  }
  return offset;  // no UTF-8
}

// A document that is read in pieces, however long it is.
class Text {
 public:
  explicit Text(const fs::path& file) : file_(file), stream_(file, std::ios::binary), num_bytes_(fs::file_size(file)) {
    if (!stream_) fail();
  }

  uint64_t num_bytes() const { return num_bytes_; }

  // Where to cut the text in two: at the first line that begins at `offset` or behind it, otherwise at the first word,
  // otherwise at a character. Neither a line nor a word begins where only white space follows.
  uint64_t place_to_cut(uint64_t offset) {
    if (offset == 0 || offset >= num_bytes_) return offset;
    const std::string text = read(offset - 1, std::min(num_bytes_, offset + kPieceBytes));
    for (const std::string_view separators : {std::string_view("\n"), kWhiteSpace}) {
      const size_t found = text.find_first_of(separators);
      if (text.find_first_not_of(kWhiteSpace, found) != std::string::npos) return offset + found;
    }
    size_t begin = 1;  // text[1] is the byte at `offset`
    while (begin < std::min(kMaxCharacterBytes, text.size()) && is_continuation(text[begin])) ++begin;
    return offset - 1 + begin;
  }

  // Hands out the bytes from `begin` to `end` in pieces that end after white space, where there is some.
  void for_each_piece(uint64_t begin, uint64_t end, const std::function<void(std::string_view)>& use) {
    while (begin < end) {
      std::string piece = read(begin, std::min(end, begin + kPieceBytes));
      if (begin + piece.size() < end) piece.resize(length_of_piece(piece));
      use(piece);
      begin += piece.size();
    }
  }

 private:
  static constexpr uint64_t kPieceBytes = 256 << 10;

  static size_t length_of_piece(std::string_view text) {
    const size_t space = text.find_last_of(kWhiteSpace);
    return space != std::string_view::npos ? space + 1 : character_begin(text, text.size() - 1);
  }

  std::string read(uint64_t begin, uint64_t end) {
    std::string bytes(end - begin, '\0');
    stream_.seekg(static_cast<std::streamoff>(begin));
    if (!stream_.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) fail();
    return bytes;
  }

  [[noreturn]] void fail() const { throw std::runtime_error("cannot read '" + file_.string() + "'"); }

  fs::path file_;
  std::ifstream stream_;
  uint64_t num_bytes_;
};

void write_document(Text& text, uint64_t begin, uint64_t end, const Tokenizer& tokenizer, TokenWriter& writer) {
  if (begin == end) return;
  text.for_each_piece(begin, end, [&](std::string_view piece) { writer.write(tokenizer.encode(piece)); });
  const uint32_t last[] = {tokenizer.end_of_document()};
  writer.write(last);
}

void require_text(const TokenWriter& writer) {
  if (writer.num_tokens() > 0) return;
  throw std::runtime_error("there is no text for '" + writer.path().string() + "', so nothing is written");
}

void commit(TokenWriter& writer, int64_t vocab_size) {
  writer.commit();
  std::cout << writer.path().string() << ": " << writer.num_tokens() << " tokens, vocabulary " << vocab_size << '\n';
}

void make_token_files(const Options& options) {
  require_new(options.out);
  if (options.held_out > 0) require_new(held_out_path(options.out));
  std::unique_ptr<const Tokenizer> tokenizer;
  if (options.model.empty()) {
    tokenizer = std::make_unique<Bytes>();
  } else {
    tokenizer = std::make_unique<SentencePiece>(options.model);
  }
  TokenWriter train(options.out, tokenizer->vocab_size());
  std::optional<TokenWriter> held_out;
  if (options.held_out > 0) held_out.emplace(held_out_path(options.out), tokenizer->vocab_size());
  for (const fs::path& file : texts_of(options)) {
    Text text(file);
    const auto bytes = text.num_bytes();
    const auto kept = bytes - static_cast<uint64_t>(options.held_out * static_cast<double>(bytes));
    const uint64_t cut = text.place_to_cut(kept);
    write_document(text, 0, cut, *tokenizer, train);
    if (held_out) write_document(text, cut, bytes, *tokenizer, *held_out);
  }
  require_text(train);
  if (held_out) require_text(*held_out);
  commit(train, tokenizer->vocab_size());
  if (held_out) commit(*held_out, tokenizer->vocab_size());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Makes a file of tokens of texts; each text ends with a token that says so.");
  Options options;
  app.add_option("texts", options.texts, "texts, and folders of texts")->required();
  app.add_option("--out", options.out, "new file to write")->required();
  app.add_option("--model", options.model, "SentencePiece model; without one each byte is a token");
  app.add_option("--held_out", options.held_out,
                 "fraction of each text, at its end, that is written to <out>.held_out.<extension> instead")
      ->check(CLI::Range(0.0, 0.5));
  return fulgur::run_command(app, argc, argv, [&] {
    make_token_files(options);
    return 0;
  });
}
