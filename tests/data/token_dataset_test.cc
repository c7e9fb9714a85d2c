#include "fulgur/data/files/token_dataset.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/data/files/token_writer.h"
#include "tests/testing/errors.h"
#include "tests/testing/largest_allocation.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;

class TokenFile : public ::testing::Test {
 protected:
  // The tokens 0, ..., num_tokens - 1.
  std::string write_range(int64_t num_tokens, int64_t vocab_size) const {
    std::vector<uint32_t> tokens(static_cast<size_t>(num_tokens));
    std::iota(tokens.begin(), tokens.end(), 0u);
    TokenWriter writer(folder_.path() / "range.tokens", vocab_size);
    const auto half = tokens.size() / 2;
    writer.write(std::span(tokens).first(half));
    writer.write(std::span(tokens).subspan(half));
    writer.commit();
    return writer.path().string();
  }

  std::string write(const std::string& bytes) const {
    const auto file = folder_.path() / "bad.tokens";
    std::ofstream(file, std::ios::binary) << bytes;
    return file.string();
  }

  std::string refusal(const std::string& bytes) const {
    const std::string file = write(bytes);
    const testing::LargestAllocation allocated;
    const std::string message = testing::message_of<std::runtime_error>([&] { TokenDataset(file, {.length = 1}); });
    EXPECT_LT(allocated.num_bytes(), 1'000u);
    EXPECT_THAT(message, ::testing::StartsWith(file + ": "));
    return message.substr(std::min(message.size(), file.size() + 2));
  }

  testing::TempDir folder_;
};

TEST_F(TokenFile, HasTheBytesThatItsHeaderDescribes) {
  const std::string bytes = testing::read_file(write_range(3, 300));
  EXPECT_EQ(bytes.substr(0, 32), std::string("FULGURTK\x01\0\0\0\x02\0\0\0\x03\0\0\0\0\0\0\0\x2c\x01\0\0\0\0\0\0", 32));
  EXPECT_EQ(bytes.substr(40), std::string(24, '\0') + std::string("\0\0\1\0\2\0", 6));
}

TEST_F(TokenFile, WindowsBeginEveryStride) {
  const std::string file = write_range(100'000, 100'000);  // four bytes each
  for (const bool keeps_width : {false, true}) {
    const TokenDataset dataset(file, {.length = 8, .stride = 5, .keeps_width = keeps_width});
    EXPECT_EQ(dataset.size(), (100'000 - 8) / 5 + 1);
    const at::Tensor batch = dataset.get_batch(at::arange(0, dataset.size(), 1999, at::kLong), {})["tokens"];
    EXPECT_EQ(batch.scalar_type(), keeps_width ? at::kUInt32 : at::kLong);
    const at::Tensor expected = at::arange(0, dataset.size(), 1999, at::kLong).unsqueeze(1).mul(5).add(at::arange(8));
    EXPECT_TRUE(batch.to(at::kLong).equal(expected));
    const at::Tensor strided = at::arange(6, at::kLong).view({3, 2}).select(1, 0);
    EXPECT_TRUE(dataset.get_batch(strided, {})["tokens"].equal(dataset.get_batch(strided.clone(), {})["tokens"]));
    Random random(0);
    EXPECT_TRUE(dataset.get(3, random)["tokens"].to(at::kLong).equal(at::arange(15, 23)));
  }
}

TEST_F(TokenFile, TokensOfASmallVocabularyTakeTwoBytes) {
  const std::string file = write_range(1000, 65'536);
  EXPECT_EQ(std::filesystem::file_size(file), 64u + 2'000u);
  const TokenDataset wide(file, {.length = 7}), narrow(file, {.length = 7, .keeps_width = true});
  EXPECT_EQ(wide.size(), 142);
  EXPECT_EQ(wide.vocab_size(), 65'536);
  const at::Tensor indices = at::tensor({141, 0}, at::kLong);
  EXPECT_TRUE(wide.get_batch(indices, {})["tokens"].equal(at::tensor({987, 0}).unsqueeze(1).add(at::arange(7))));
  const at::Tensor batch = narrow.get_batch(indices, {})["tokens"];
  EXPECT_EQ(batch.scalar_type(), at::kUInt16);
  EXPECT_TRUE(batch.slice(1, 1).to(at::kLong).equal(at::tensor({988, 1}).unsqueeze(1).add(at::arange(6))));
}

TEST_F(TokenFile, AnIndexThatIsNotThereIsRefused) {
  const TokenDataset dataset(write_range(10, 10), {.length = 2});
  EXPECT_THAT(testing::message_of<c10::IndexError>([&] { dataset.get_batch(at::tensor({5}, at::kLong), {}); }),
              HasSubstr("sample 5 of 5"));
  EXPECT_THROW(dataset.get_batch(at::tensor({-1}, at::kLong), {}), c10::IndexError);
}

TEST_F(TokenFile, OptionsOutOfRangeAreRefused) {
  const std::string file = write_range(10, 10);
  EXPECT_EQ(testing::message_of<UsageError>([&] { TokenDataset(file, {.length = 11}); }),
            file + ": it has 10 tokens, but a window needs 11; give a longer text, or a smaller length");
  EXPECT_THROW(TokenDataset(file, {.length = 0}), UsageError);
  EXPECT_THROW(TokenDataset(file, {.length = 2, .stride = 0}), UsageError);
}

TEST_F(TokenFile, ADigestTellsContentAndWindowsApart) {
  const std::string digest = TokenDataset(write_range(10, 10), {.length = 2}).digest();
  EXPECT_EQ(TokenDataset(write_range(10, 10), {.length = 2, .keeps_width = true}).digest(), digest);
  EXPECT_NE(TokenDataset(write_range(10, 10), {.length = 2, .stride = 1}).digest(), digest);
  std::string bytes = testing::read_file(write_range(10, 10));
  bytes[32] = static_cast<char>(bytes[32] + 1);
  EXPECT_NE(TokenDataset(write(bytes), {.length = 2}).digest(), digest);
}

TEST_F(TokenFile, RefusesAHeaderThatTheFileDoesNotMatch) {
  const std::string whole = testing::read_file(write_range(10, 300));
  const auto with = [&](size_t place, auto value) {
    std::string bytes = whole;
    std::memcpy(bytes.data() + place, &value, sizeof(value));
    return refusal(bytes);
  };
  EXPECT_EQ(refusal(""), "it is no token file; //tools:tokens makes one of text");
  EXPECT_EQ(refusal("some text"), "it is no token file; //tools:tokens makes one of text");
  EXPECT_EQ(refusal(whole.substr(0, 40)), "its header is cut off");
  EXPECT_EQ(refusal(whole.substr(0, 80)), "its header counts 10 tokens of 2 bytes, but 16 bytes follow");
  EXPECT_EQ(refusal(whole + "x"), "its header counts 10 tokens of 2 bytes, but 21 bytes follow");
  EXPECT_EQ(with(8, uint32_t{2}), "it has format version 2; 1 is known");
  EXPECT_EQ(with(12, uint32_t{3}), "its tokens have 3 bytes; 2 and 4 are known");
  EXPECT_EQ(with(12, uint32_t{4}), "its header counts 10 tokens of 4 bytes, but 20 bytes follow");
  EXPECT_EQ(with(16, ~uint64_t{0}), "its header counts 18446744073709551615 tokens of 2 bytes, but 20 bytes follow");
  EXPECT_EQ(with(24, uint64_t{0}), "its vocabulary size of 0 does not fit tokens of 2 bytes");
  EXPECT_EQ(with(24, uint64_t{65'537}), "its vocabulary size of 65537 does not fit tokens of 2 bytes");
}

TEST_F(TokenFile, VerifyFindsDamage) {
  const std::string file = write_range(10, 10);
  TokenDataset(file, {.length = 2}).verify();
  std::string bytes = testing::read_file(file);
  bytes.back() = '\1';
  const std::string damaged = write(bytes);
  const TokenDataset dataset(damaged, {.length = 2});
  EXPECT_THAT(
      testing::message_of<std::runtime_error>([&] { dataset.verify(); }),
      ::testing::MatchesRegex(".*bad.tokens: it is damaged: the hash of its tokens is [0-9a-f]+, but its header "
                              "says [0-9a-f]+"));
  bytes = testing::read_file(file);
  bytes[24] = '\7';
  const std::string smaller = write(bytes);
  EXPECT_EQ(testing::message_of<std::runtime_error>([&] { TokenDataset(smaller, {.length = 2}).verify(); }),
            smaller + ": token 9 is not below the vocabulary size of 7");
}

TEST_F(TokenFile, AppearsCompleteOrNotAtAll) {
  const auto path = folder_.path() / "new.tokens";
  {
    TokenWriter abandoned(path, 10);
    abandoned.write(std::vector<uint32_t>{1, 2, 3});
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  TokenWriter writer(path, 10);
  EXPECT_EQ(testing::message_of<std::invalid_argument>([&] { writer.write(std::vector<uint32_t>{10}); }),
            "token 10 is not below vocab_size (10)");
  EXPECT_THROW(TokenWriter(path, 0), std::invalid_argument);
  EXPECT_THAT(testing::message_of<std::runtime_error>([&] { TokenWriter(folder_.path() / "none" / "x", 10); }),
              ::testing::MatchesRegex("cannot create '.*/none/x': there is no folder '.*/none'"));
}

}  // namespace
}  // namespace fulgur
