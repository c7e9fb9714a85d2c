#include "fulgur/checkpoint/formats/torch_archive.h"

#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/pickle.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

// formats_test.py checks that Python reads these files, and that fulgur reads Python's.
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
  const at::Tensor one = torch::zeros({1});
  EXPECT_THAT(message_of<CheckpointError>([&] { write_torch_file(dir.path() / "m.pt", {{"x", one}, {"x", one}}); }),
              HasSubstr("there are two tensors 'x'"));
  EXPECT_THAT(message_of<CheckpointError>([&] { write_torch_file(dir.path() / "m.pt", {{"caf\xe9", one}}); }),
              HasSubstr("is not UTF-8, which Python needs"));
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
  for (const rlim_t limit : {0, 1000, 300'000, 1'200'000, 1'300'000}) {  // one limit in each part of the archive
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

// The bytes of a small file. `central` is the offset at which the directory begins to describe the named entry.
struct SmallFile {
  explicit SmallFile(const std::filesystem::path& folder) {
    write_torch_file(folder / "small.pt", {{"w", torch::ones({2})}});
    bytes = testing::read_file(folder / "small.pt");
  }
  size_t central(const std::string& name) const { return bytes.rfind(name) - 46; }
  void put(size_t at, uint32_t number) { std::memcpy(&bytes[at], &number, sizeof(number)); }
  std::string bytes;
};

std::string refusal(const std::filesystem::path& folder, const std::string& bytes) {
  std::filesystem::remove(folder / "bad.pt");
  write_file(folder / "bad.pt", bytes);
  return message_of<CheckpointError>([&] { read_torch_file(folder / "bad.pt"); });
}

TEST(TorchArchive, RefusesACompressedEntryBeforeAnythingIsUnpacked) {
  const TempDir dir;
  for (const std::string name : {"version", "data.pkl", "data/0", "byteorder"}) {
    SmallFile file(dir.path());
    std::filesystem::remove(dir.path() / "small.pt");
    file.bytes[file.central("archive/" + name) + 10] = 8;  // compression method deflate
    EXPECT_THAT(refusal(dir.path(), file.bytes), HasSubstr("its entry 'archive/" + name + "' is compressed"));
  }
  SmallFile file(dir.path());
  file.put(file.central("archive/version") + 24, 0x7fffffff);
  EXPECT_THAT(refusal(dir.path(), file.bytes), HasSubstr("its entry 'archive/version' is compressed"));
}

TEST(TorchArchive, RefusesEntriesThatOverlap) {
  const TempDir dir;
  SmallFile file(dir.path());
  const auto size = static_cast<uint32_t>(file.bytes.size() / 2);
  for (const std::string name : {"version", "data.pkl", "data/0"}) {
    for (const size_t field : {20, 24}) file.put(file.central("archive/" + name) + field, size);
  }
  EXPECT_THAT(refusal(dir.path(), file.bytes), HasSubstr("its entries have more bytes together than the file"));
}

// libtorch finds a record whatever case its name is written in.
TEST(TorchArchive, RefusesOneRecordUnderManyNames) {
  const TempDir dir;
  PickleWriter pickle;
  pickle.begin_dict();
  for (const std::string key : {"aa", "aA", "Aa", "AA"}) {
    pickle.text(key);
    pickle.tensor({"ByteStorage", key, 4096, 0, {4096}, {1}});
  }
  pickle.end_dict();
  const std::string bytes = pickle.finish(), data(4096, 'x');
  caffe2::serialize::PyTorchStreamWriter archive((dir.path() / "m.pt").string());
  archive.writeRecord("data.pkl", bytes.data(), bytes.size());
  archive.writeRecord("data/aa", data.data(), data.size());
  archive.writeEndOfFile();
  EXPECT_THAT(message_of<CheckpointError>([&] { read_torch_file(dir.path() / "m.pt"); }),
              HasSubstr("it names more bytes than it has"));
}

TEST(TorchArchive, SaysWhatIsNoFileOfTorchSave) {
  const TempDir dir;
  EXPECT_THAT(refusal(dir.path(), "text"), HasSubstr("/bad.pt: it is no zip file, as torch.save() of torch 1.6"));
  SmallFile file(dir.path());
  EXPECT_THAT(refusal(dir.path(), file.bytes + "abc"), HasSubstr("/bad.pt: it is no zip file"));
  std::string with_comment = file.bytes;
  with_comment[with_comment.size() - 2] = 3;
  EXPECT_THAT(refusal(dir.path(), with_comment), HasSubstr("/bad.pt: it is a zip file with a comment"));
  file.bytes[file.bytes.rfind("PK\x06\x07") + 8 + 6] = 1;
  EXPECT_THAT(refusal(dir.path(), file.bytes), HasSubstr("/bad.pt: its directory is outside of it"));
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
        EXPECT_LE(tensor.numel(), 2) << i;  // libtorch does not verify the checksums of zip files
      }
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("flipped.pt")) << i;
    }
  }
}

}  // namespace
}  // namespace fulgur
