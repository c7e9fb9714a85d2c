// The side of examples/bert_classifier that reads files: text becomes tokens, and config.json the sizes of a model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "examples/bert_classifier/bert.h"
#include "examples/bert_classifier/bert_classifier.h"
#include "examples/bert_classifier/labelled_texts.h"
#include "examples/bert_classifier/word_piece.h"
#include "fulgur.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace bert_classifier {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::string_view kVocabulary =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\nun\n##aff\n##able\nthe\ncafe\n,\n!\n$\n\u8a9e\nstra\n##\u00df\n##e\n";

// What the Hugging Face hub calls a parameter of Bert.
std::string hub_name(std::string name, const std::string& prefix, bool is_old) {
  const std::vector<std::pair<std::string, std::string>> replaced = {
      {"token_embedding", "embeddings.word_embeddings"},
      {"position_embedding", "embeddings.position_embeddings"},
      {"segment_embedding", "embeddings.token_type_embeddings"},
      {"embedding_norm", "embeddings.LayerNorm"},
      {"pooler", "pooler.dense"},
      {"layers", "encoder.layer"},
      {"query", "attention.self.query"},
      {"key", "attention.self.key"},
      {"value", "attention.self.value"},
      {"project", "attention.output.dense"},
      {"attention_norm", "attention.output.LayerNorm"},
      {"expand", "intermediate.dense"},
      {"contract", "output.dense"},
      {"output_norm", "output.LayerNorm"}};
  std::string result = prefix;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    std::string part = name.substr(begin, end - begin);
    if (is_old && result.ends_with("LayerNorm.")) part = part == "weight" ? "gamma" : "beta";
    for (const auto& [from, to] : replaced) {
      if (part == from) {
        part = to;
        break;
      }
    }
    result += part + (end < name.size() ? "." : "");
    begin = end + 1;
  }
  return result;
}

class BertText : public ::testing::Test {
 protected:
  fs::path write(const std::string& name, std::string_view text) const {
    fulgur::write_file(dir_.path() / name, text);
    return dir_.path() / name;
  }

  fulgur::testing::TempDir dir_;
};

TEST_F(BertText, WordsAreCutIntoTheLongestPieces) {
  const WordPiece word_piece(write("vocab.txt", kVocabulary));
  const auto encode = [&](std::string_view text) { return word_piece.encode(text, 100); };
  EXPECT_THAT(encode("unaffable"), ElementsAre(2, 4, 5, 6, 3));
  EXPECT_THAT(encode("The,the!"), ElementsAre(2, 7, 9, 7, 10, 3));       // punctuation is alone, capitals are small
  EXPECT_THAT(encode("Caf\u00e9 cafe\u0301"), ElementsAre(2, 8, 8, 3));  // an accent within the letter, or behind it
  EXPECT_THAT(encode("the\u8a9ethe"), ElementsAre(2, 7, 12, 7, 3));      // an ideograph is a word
  EXPECT_THAT(encode("th\u200be \x01the"), ElementsAre(2, 7, 7, 3));     // what does not show is left out
  EXPECT_THAT(encode("unable unaffables $"), ElementsAre(2, 4, 6, 1, 11, 3));  // a word without a last piece is unknown
  EXPECT_THAT(encode("Stra\u00dfe"), ElementsAre(2, 13, 14, 15, 3));
  EXPECT_THAT(encode("\xff\xfethe\xc3"), ElementsAre(2, 7, 3));  // no UTF-8
  EXPECT_THAT(encode(std::string(101, 'a')), ElementsAre(2, 1, 3));
  EXPECT_THAT(encode(" \t\n"), ElementsAre(2, 3));
  EXPECT_THAT(word_piece.encode("the the the the", 4), ElementsAre(2, 7, 7, 3));
}

TEST_F(BertText, BadVocabulariesAreNamed) {
  const std::string special[] = {"[UNK]", "[CLS]", "[SEP]"};
  for (const std::string& missing : special) {
    std::string tokens = "the\n";
    for (const std::string& token : special) {
      if (token != missing) tokens += token + "\n";
    }
    EXPECT_THAT(fulgur::testing::message_of<fulgur::UsageError>([&] { WordPiece(write("no " + missing, tokens)); }),
                HasSubstr("has no token " + missing + ": give the vocab.txt of an uncased BERT"));
  }
  EXPECT_THAT(fulgur::testing::message_of<fulgur::UsageError>([&] { WordPiece(write("b", "the\n[PAD]\nthe\n")); }),
              HasSubstr("b:3: the token 'the' is that of line 1, too"));
  EXPECT_THAT(fulgur::testing::message_of<fulgur::UsageError>([&] { WordPiece(dir_.path() / "none"); }),
              HasSubstr("cannot read the vocabulary"));
}

TEST_F(BertText, LinesAreAClassATabAndAText) {
  const LabelledTexts all = read_labelled_texts(write("it.tsv", "good\tvery nice\nbad\tnot\tnice\ngood\t\n"));
  EXPECT_THAT(all.classes, ElementsAre("bad", "good"));
  EXPECT_THAT(all.labels, ElementsAre(1, 0, 1));
  EXPECT_THAT(all.texts, ElementsAre("very nice", "not\tnice", ""));
  EXPECT_THAT(
      fulgur::testing::message_of<fulgur::UsageError>([&] { read_labelled_texts(write("no_tab", "a\tb\na b\n")); }),
      HasSubstr("no_tab:2: a line is a class, a tab and a text"));
  EXPECT_THAT(
      fulgur::testing::message_of<fulgur::UsageError>([&] { read_labelled_texts(write("one", "a\tb\na\tc\n")); }),
      HasSubstr("has 2 texts of 1 class; two classes"));
  EXPECT_THAT(fulgur::testing::message_of<fulgur::UsageError>([&] { read_labelled_texts(dir_.path() / "none"); }),
              HasSubstr("there is no file or folder"));
}

// Paragraphs of words that occur in no other, of 62 bytes each.
std::vector<std::string> paragraphs(char first, int count) {
  std::vector<std::string> all;
  for (int i = 0; i < count; ++i) all.push_back(std::string(57, first) + " " + std::to_string(1000 + i));
  return all;
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += text + "\n\n";
  return all;
}

TEST_F(BertText, AFolderHasAClassForTheBeginningOfEachName) {
  const auto gpl_1 = paragraphs('a', 12), gpl_2 = paragraphs('b', 8), bsd = paragraphs('c', 20);
  write("GPL-1", joined(gpl_1) + "short\n");
  write("GPL-2", "  " + joined(gpl_2) + joined(gpl_1));
  write("BSD", joined(bsd) + std::string(60, 'd') + "\n  e\n");
  write("MIT", joined(paragraphs('f', 19)));  // too few
  fs::create_symlink(dir_.path() / "BSD", dir_.path() / "LINK");
  const LabelledTexts all = read_labelled_texts(dir_.path());
  EXPECT_THAT(all.classes, ElementsAre("BSD", "GPL"));
  ASSERT_EQ(all.texts.size(), 41u);
  EXPECT_EQ(all.texts[0], bsd[0]);
  EXPECT_EQ(all.texts[20], std::string(60, 'd') + " e");
  EXPECT_EQ(all.texts[21], gpl_1[0]);
  EXPECT_EQ(all.texts[40], gpl_2[7]);
  EXPECT_EQ(std::ranges::count(all.labels, 0), 21);
  EXPECT_TRUE(std::ranges::is_sorted(all.labels));
}

TEST_F(BertText, ParagraphsThatAnotherClassHasAlmostWordForWordAreLeftOut) {
  const std::string program = "This program is free and you may copy it under the terms of this very license";
  const std::string library = "This library is free and you may copy it under the terms of this very license";
  const std::string own = "Nobody promises that it works or that it is of any use for anything whatsoever, ever";
  const std::string again = "Nobody promises that it works or that it is of any use for anything whatsoever, now";
  write("GPL-1", joined(paragraphs('a', 20)) + joined({program, own}));
  write("GPL-2", again);
  write("LGPL-2", joined(paragraphs('b', 20)) + joined({library}));
  const LabelledTexts all = read_labelled_texts(dir_.path());
  EXPECT_THAT(all.classes, ElementsAre("GPL", "LGPL"));
  EXPECT_EQ(std::ranges::count(all.labels, 1), 20);
  EXPECT_THAT(all.texts, Not(Contains(program)));
  EXPECT_THAT(all.texts, Not(Contains(library)));
  EXPECT_THAT(all.texts, AllOf(Contains(own), Contains(again)));  // both are the GPL's
}

constexpr std::string_view kConfig =
    R"({"model_type": "bert", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 32, "max_position_embeddings": 8, "vocab_size": 20)";

TEST_F(BertText, NormsAreThoseOfTheConfigAndAnotherActivationThanGeluIsRefused) {
  const auto read = [&](const std::string& name, const std::string& more) {
    return BertSizes::read(write(name, std::string(kConfig) + more + "}"));
  };
  EXPECT_EQ(read("neither", "").norm_eps, 1e-12);
  EXPECT_EQ(read("both", R"(, "layer_norm_eps": 1e-5, "hidden_act": "gelu")").norm_eps, 1e-5);
  EXPECT_THAT(fulgur::testing::message_of<fulgur::UsageError>([&] { read("other", R"(, "hidden_act": "relu")"); }),
              HasSubstr("other has the hidden_act 'relu'; only 'gelu' is known"));
}

TEST_F(BertText, MoreTokensThanPositionsAreNotAskedFor) {
  write("config.json", std::string(kConfig) + "}");
  write("vocab.txt", kVocabulary);
  BertClassifierOptions model{.weights = dir_.path()};
  LabelledTextsOptions data;
  data.path = write("texts.tsv", "a\tb\nc\td\ne\tf\n");
  data.max_length = 9;
  link_options(model, data);
  EXPECT_EQ(data.max_length, 8);
  EXPECT_EQ(data.vocabulary, (dir_.path() / "vocab.txt").string());
  EXPECT_EQ(model.num_classes, 3);
}

TEST_F(BertText, PaddingChangesNothing) {
  fulgur::seed_everything(0);
  Bert bert(
      BertSizes{.hidden = 24, .num_layers = 2, .num_heads = 3, .intermediate = 32, .max_length = 8, .vocab_size = 20});
  bert->eval();
  const at::Tensor ids = torch::randint(20, {2, 5}, at::kLong), mask = torch::ones_like(ids);
  const auto expected = bert->forward(ids, mask);
  const auto padded = bert->forward(torch::constant_pad_nd(ids, {0, 3}, 7), torch::constant_pad_nd(mask, {0, 3}, 0));
  EXPECT_TRUE(padded.hidden.slice(1, 0, 5).allclose(expected.hidden, 1e-5, 1e-6));
  EXPECT_TRUE(padded.pooled.allclose(expected.pooled, 1e-5, 1e-6));
}

// 109,482,240 is what the transformers package counts in bert-base-uncased.
TEST(Bert, OfTheArticlesSizeHasAsManyParametersAsBertBase) {
  const BertClassifier model({.weights = "", .size = "article", .num_classes = 2});
  int64_t count = 0;
  for (const at::Tensor& parameter : model.parameters()) count += parameter.numel();
  EXPECT_EQ(count, 109'482'240 + 2 * 768 + 2);
}

// The names of BertForPreTraining, and those that norms had before 2019.
TEST_F(BertText, WeightsOfPretrainingAreRead) {
  const BertSizes sizes{
      .hidden = 8, .num_layers = 2, .num_heads = 2, .intermediate = 16, .max_length = 4, .vocab_size = 6};
  Bert saved(sizes), bare(sizes), pretraining(sizes);
  const auto file = [&](const std::string& name, const std::string& prefix, bool is_old) {
    fulgur::NamedTensors tensors;
    for (const auto& item : saved->named_parameters())
      tensors.emplace_back(hub_name(item.key(), prefix, is_old), item.value().detach());
    if (!prefix.empty()) tensors.emplace_back("cls.predictions.bias", torch::zeros({6}));
    fulgur::write_safetensors(dir_.path() / name, tensors);
    return dir_.path() / name;
  };
  bare->load_huggingface(file("bare.safetensors", "", false));
  pretraining->load_huggingface(file("pretraining.safetensors", "bert.", true));
  for (const auto& item : saved->named_parameters()) {
    EXPECT_TRUE(at::equal(bare->named_parameters()[item.key()], item.value())) << item.key();
    EXPECT_TRUE(at::equal(pretraining->named_parameters()[item.key()], item.value())) << item.key();
  }
}

}  // namespace
}  // namespace bert_classifier
