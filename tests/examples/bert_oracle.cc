// What examples/bert_classifier makes of a text, for comparison with Python:
//   bert_oracle tokens <vocab.txt> <file of lines>       writes the tokens of each line as a line of numbers
//   bert_oracle hidden <weights folder> <in> <out>       reads input_ids and attention_mask, writes hidden and pooled
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "examples/bert_classifier/bert.h"
#include "examples/bert_classifier/word_piece.h"
#include "fulgur.h"
#include "fulgur/checkpoint/formats/safetensors.h"

namespace {

using namespace bert_classifier;
namespace fs = std::filesystem;

constexpr int64_t kMaxLength = 512;

void write_tokens(const fs::path& vocabulary, const fs::path& file) {
  const WordPiece word_piece(vocabulary);
  std::ifstream lines(file, std::ios::binary);
  for (std::string line; std::getline(lines, line);) {
    for (const int64_t token : word_piece.encode(line, kMaxLength)) fmt::print("{} ", token);
    fmt::print("\n");
  }
}

void write_hidden(const fs::path& weights, const fs::path& in, const fs::path& out) {
  Bert bert(BertSizes::read(weights / "config.json"));
  bert->load_huggingface(weights);
  bert->eval();
  const torch::NoGradGuard no_grad;
  const fulgur::SafetensorsFile batch(in);
  const auto [hidden, pooled] = bert->forward(batch.tensor("input_ids"), batch.tensor("attention_mask"));
  fulgur::write_safetensors(out, {{"hidden", hidden}, {"pooled", pooled}});
}

}  // namespace

int main(int argc, char** argv) {
  return fulgur::exit_code_of([&] {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "tokens" && argc == 4) return write_tokens(argv[2], argv[3]);
    if (what == "hidden" && argc == 5) return write_hidden(argv[2], argv[3], argv[4]);
    throw fulgur::UsageError("usage: bert_oracle tokens <vocab.txt> <lines>, or hidden <weights> <in> <out>");
  });
}
