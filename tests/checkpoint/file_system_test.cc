#include "fulgur/checkpoint/file_system.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>

#include "fulgur/base/error.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using testing::FileSizeLimit;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

std::string noise(size_t num_bytes) {
  std::string bytes;
  uint32_t state = 1;
  while (bytes.size() < num_bytes) bytes += static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  return bytes;
}

TEST(FileWriter, GivesSizeAndHashOfWhatItWrote) {
  const TempDir dir;
  for (const size_t size : {0, 1, 1000, 262143, 262144, 262145, 1000000}) {
    const std::string bytes = noise(size);
    for (const size_t piece : {7, 4096, 262144, 1000000}) {
      const fs::path path = dir.path() / std::to_string(size).append("-").append(std::to_string(piece));
      FileWriter file(path);
      for (size_t i = 0; i < size; i += piece) file.write(bytes.data() + i, std::min(piece, size - i));
      const FileDigest expected{static_cast<int64_t>(size), XXH3_64bits(bytes.data(), size)};
      EXPECT_EQ(file.sync_and_close(), expected) << path;
      EXPECT_EQ(testing::read_file(path), bytes);
      EXPECT_EQ(digest_of(path), expected);
    }
  }
}

TEST(DigestOf, TellsHowFarItIs) {
  const TempDir dir;
  write_file(dir.path() / "f", noise(1'000'000));
  std::vector<int64_t> so_far;
  digest_of(dir.path() / "f", [&](int64_t num_bytes) { so_far.push_back(num_bytes); });
  EXPECT_GT(so_far.size(), 1U);
  EXPECT_TRUE(std::ranges::is_sorted(so_far));
  EXPECT_EQ(so_far.back(), 1'000'000);
}

TEST(FileWriter, HashIsThatOfXxh3) {  // XXH3 of no bytes, https://github.com/Cyan4973/xxHash
  const TempDir dir;
  EXPECT_EQ(write_file(dir.path() / "f", "").xxh3, 0x2d06800538d394c2U);
}

TEST(FileWriter, RefusesAFileThatExists) {
  const TempDir dir;
  write_file(dir.path() / "f", "first");
  EXPECT_THAT(message_of<CheckpointError>([&] { write_file(dir.path() / "f", "second"); }), HasSubstr("File exists"));
  EXPECT_EQ(testing::read_file(dir.path() / "f"), "first");
}

TEST(FileWriter, SaysThatThereIsNoRoom) {
  const TempDir dir;
  const FileSizeLimit limit(1000);
  EXPECT_THAT(message_of<CheckpointError>([&] { write_file(dir.path() / "f", noise(5000)); }),
              HasSubstr("cannot write '" + (dir.path() / "f").string() + "': File too large"));
}

TEST(MakeFolders, TakesEveryWayToWriteAPath) {
  const TempDir dir;
  for (const char* path : {"a/b/c", "d/e/", "f/./g", "a/b/../h", "a"}) {
    make_folders(dir.path() / path);
    EXPECT_TRUE(fs::is_directory(dir.path() / path)) << path;
  }
  write_file(dir.path() / "file", "");
  EXPECT_THAT(message_of<CheckpointError>([&] { make_folders(dir.path() / "file/a"); }),
              HasSubstr("cannot make the folder '" + (dir.path() / "file/a").string() + "'"));
}

TEST(ReadTextFile, ReadsUpToTheLimit) {
  const TempDir dir;
  write_file(dir.path() / "f", "12345");
  EXPECT_EQ(read_text_file(dir.path() / "f", 5), "12345");
  EXPECT_THAT(message_of<CheckpointError>([&] { read_text_file(dir.path() / "f", 4); }),
              HasSubstr("/f' has 5 bytes; such a file has at most 4"));
  EXPECT_THAT(message_of<CheckpointError>([&] { read_text_file(dir.path(), 4); }), HasSubstr("is not a file"));
  EXPECT_THAT(message_of<CheckpointError>([&] { read_text_file(dir.path() / "g", 4); }),
              HasSubstr("cannot open '" + (dir.path() / "g").string() + "': No such file or directory"));
}

TEST(ReadTextFile, DoesNotWaitForAPipeThatNobodyWritesInto) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo((dir.path() / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of<CheckpointError>([&] { read_text_file(dir.path() / "pipe", 4); }), HasSubstr("is not a file"));
  EXPECT_EQ(digest_of(dir.path() / "pipe").num_bytes, 0);
}

TEST(WriteTextFile, RefusesWhatCouldNotBeRead) {
  const TempDir dir;
  write_text_file(dir.path() / "f", "12345", 5);
  EXPECT_EQ(read_text_file(dir.path() / "f", 5), "12345");
  EXPECT_THAT(message_of<CheckpointError>([&] { write_text_file(dir.path() / "g", "12345", 4); }),
              HasSubstr("/g' has 5 bytes; such a file has at most 4"));
  EXPECT_FALSE(fs::exists(dir.path() / "g"));
}

}  // namespace
}  // namespace fulgur
