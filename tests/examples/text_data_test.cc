#include "examples/transformer_lm/text_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <stdexcept>

#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace transformer_lm {
namespace {

using fulgur::testing::message_of;
using fulgur::testing::TempDir;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void write(const std::filesystem::path& file, const std::string& text) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

at::Tensor all_tokens(fulgur::Loader& loader, int64_t epoch) {
  std::vector<at::Tensor> batches;
  loader.begin_epoch(epoch);
  while (const auto batch = loader.next()) batches.push_back((*batch)["tokens"]);
  return at::cat(batches);
}

std::string numbers(int64_t count) {  // each window of four characters or more occurs once
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += std::to_string(1000 + i);
  return text;
}

TEST(ReadTexts, FilesComeInTheOrderOfTheirPathsWithoutLinksAndHiddenOnes) {
  const TempDir dir;
  write(dir.path() / "b", "2");
  write(dir.path() / "a" / "z", "1");
  write(dir.path() / "c", "3");
  write(dir.path() / "empty", "");
  write(dir.path() / ".hidden" / "x", "no");
  std::filesystem::create_symlink(dir.path() / "b", dir.path() / "link");
  EXPECT_THAT(read_texts(dir.path()), ElementsAre("1", "2", "3"));
  EXPECT_THAT(read_texts(dir.path() / "link"), ElementsAre("2"));
}

TEST(ReadTexts, WhatIsNotThereIsNamed) {
  const TempDir dir;
  EXPECT_THAT(message_of<std::runtime_error>([&] { read_texts(dir.path() / "missing"); }),
              HasSubstr("there is no file or folder '" + (dir.path() / "missing").string() + "'"));
  EXPECT_THAT(message_of<std::runtime_error>([&] { read_texts(dir.path()); }), HasSubstr("there is no text in '"));
}

TEST(SplitTexts, TheLastTenthOfEveryFileIsHeldOut) {
  const TextSplit split = split_texts({"abcdefghij", "0123456789ABCDEFGHIJ", "short"});
  EXPECT_EQ(split.train, "abcdefghi0123456789ABCDEFGHshort");
  EXPECT_EQ(split.val, "jIJ");
}

TEST(Order0Bpc, IsTheCrossEntropyOfTheFrequencies) {
  const TextSplit split{.train = std::string(256, 'a'), .val = "aab"};
  EXPECT_NEAR(order_0_bpc(split), -(2 * std::log2(257.0 / 512) + std::log2(1.0 / 512)) / 3, 1e-12);
}

TEST(TextWindows, BeginEveryStrideCharacters) {
  const TextWindows windows("abcdefg", 3, 2);
  ASSERT_EQ(windows.size(), 3);
  fulgur::Random unused(0);
  EXPECT_TRUE(windows.get(2, unused)["tokens"].equal(torch::tensor({'e', 'f', 'g'}, at::kByte)));
  EXPECT_TRUE(windows.get_batch(torch::tensor({1, 0}), {})["tokens"].equal(
      torch::tensor({{'c', 'd', 'e'}, {'a', 'b', 'c'}}, at::kByte)));
  EXPECT_THAT(message_of<fulgur::UsageError>([] { TextWindows("ab", 3); }),
              HasSubstr("has 2 characters, but a window of context + 1 needs 3"));
}

TEST(TextData, AnEpochIsADrawThatTheSeedAndTheEpochDecide) {
  const TempDir dir;
  write(dir.path() / "text", numbers(500));
  const auto train = [&](uint64_t seed, int64_t epoch) {
    TextData data({.path = dir.path(), .batch_size = 4, .batches_per_epoch = 5, .context = 16}, seed);
    data.setup(fulgur::EntryPoint::fit);
    return all_tokens(*data.train_dataloader(), epoch);
  };
  EXPECT_EQ(train(1, 0).sizes(), at::IntArrayRef({20, 17}));
  EXPECT_TRUE(train(1, 0).equal(train(1, 0)));
  EXPECT_FALSE(train(1, 0).equal(train(1, 1)));
  EXPECT_FALSE(train(1, 0).equal(train(2, 0)));
}

TEST(TextData, ValidationPredictsTheHeldOutTextOnce) {
  const TempDir dir;
  const std::string text = numbers(500);
  write(dir.path() / "text", text);
  TextData data({.path = dir.path(), .batch_size = 4, .context = 16}, /*seed=*/1);
  data.setup(fulgur::EntryPoint::fit);
  const at::Tensor predicted = all_tokens(*data.val_dataloader()[0], 0).slice(1, 1).flatten();
  std::string characters;
  for (int64_t i = 0; i < predicted.numel(); ++i) characters += static_cast<char>(predicted[i].item<uint8_t>());
  const std::string held_out = text.substr(1800);
  EXPECT_EQ(characters, held_out.substr(1, (held_out.size() - 1) / 16 * 16));
  EXPECT_EQ(data.text().train + data.text().val, text);
}

}  // namespace
}  // namespace transformer_lm
