#include "checkpoint/torch_archive.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>

#include "core/error.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

// What Python makes of these files, and we of Python's: formats_test.py.
namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

TEST(TorchArchive, ComesBackWithDtypesShapesAndTies) {
  const TempDir dir;
  const at::Tensor weight = torch::arange(6, torch::kFloat).view({2, 3});
  const NamedTensors tensors = {{"w", weight},
                                {"tied", weight},
                                {"row", weight[1]},
                                {"transposed", weight.t()},
                                {"half", torch::ones({3}, torch::kBFloat16)},
                                {"step", torch::tensor(int64_t{7})},
                                {"empty", torch::zeros({0, 2})}};
  const FileDigest digest = write_torch_file(dir.path() / "m.pt", tensors);
  EXPECT_EQ(digest, digest_of(dir.path() / "m.pt"));
  const NamedTensors read = read_torch_file(dir.path() / "m.pt");
  ASSERT_EQ(read.size(), tensors.size());
  for (size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(read[i].first, tensors[i].first);
    EXPECT_EQ(read[i].second.scalar_type(), tensors[i].second.scalar_type());
    EXPECT_TRUE(torch::equal(read[i].second, tensors[i].second)) << read[i].first;
  }
  EXPECT_EQ(read[0].second.data_ptr(), read[1].second.data_ptr());
  EXPECT_FALSE(read[2].second.is_alias_of(read[0].second));
}

TEST(TorchArchive, NamesFileAndReason) {
  const TempDir dir;
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { write_torch_file(dir.path() / "m.pt", {{"x", torch::zeros({1}, torch::kUInt16)}}); }),
              HasSubstr("/m.pt: tensor 'x' has dtype UInt16"));
  EXPECT_THAT(message_of<CheckpointError>([&] { write_torch_file("/nowhere/m.pt", {}); }),
              HasSubstr("cannot create '/nowhere/m.pt'"));
  EXPECT_THAT(message_of<CheckpointError>([&] { read_torch_file("/nowhere/m.pt"); }),
              HasSubstr("cannot open '/nowhere/m.pt': No such file or directory"));
  write_file(dir.path() / "text", "no zip");
  EXPECT_THAT(message_of<CheckpointError>([&] { read_torch_file(dir.path() / "text"); }), HasSubstr("/text: "));
}

TEST(TorchArchive, SaysThatThereIsNoRoomAndLeavesNothing) {
  const TempDir dir;
  const at::Tensor large = torch::ones({300'000});
  for (const rlim_t limit : {0, 1000, 300'000, 1'200'000, 1'300'000}) {  // in each part of the archive
    const testing::FileSizeLimit no_more(limit);
    EXPECT_THAT(
        message_of<CheckpointError>([&] { write_torch_file(dir.path() / "m.pt", {{"w", large}, {"v", -large}}); }),
        HasSubstr("/m.pt': File too large"))
        << limit;
    EXPECT_TRUE(std::filesystem::is_empty(dir.path())) << limit;
  }
  write_file(dir.path() / "m.pt", "mine");
  EXPECT_THAT(message_of<CheckpointError>([&] { write_torch_file(dir.path() / "m.pt", {}); }),
              HasSubstr("/m.pt': File exists"));
  EXPECT_EQ(testing::read_file(dir.path() / "m.pt"), "mine");
}

TEST(TorchArchive, RefusesAFileThatIsCutAnywhere) {
  const TempDir dir;
  write_torch_file(dir.path() / "m.pt", {{"w", torch::ones({2})}});
  for (auto size = std::filesystem::file_size(dir.path() / "m.pt"); size-- > 0;) {
    std::filesystem::resize_file(dir.path() / "m.pt", size);
    EXPECT_THROW(read_torch_file(dir.path() / "m.pt"), CheckpointError) << size;
  }
}

TEST(TorchArchive, AFlippedBitOfAnyByteIsRefusedOrLeavesAStateDict) {
  const TempDir dir;
  write_torch_file(dir.path() / "m.pt", {{"w", torch::ones({2})}});
  const std::string bytes = testing::read_file(dir.path() / "m.pt");
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string flipped = bytes;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << i % 8));
    std::filesystem::remove(dir.path() / "flipped.pt");
    write_file(dir.path() / "flipped.pt", flipped);
    try {
      for (const auto& [name, tensor] : read_torch_file(dir.path() / "flipped.pt")) {
        EXPECT_LE(tensor.numel(), 2) << i;  // libtorch reads zip files without their checksums
      }
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("flipped.pt")) << i;
    }
  }
}

}  // namespace
}  // namespace fulgur
