#include "checkpoint/file_system.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "core/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::TempDir;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  return names;
}

void write(const fs::path& file, const std::string& text) {
  FileWriter writer(file);
  writer.write(text.data(), text.size());
  writer.sync_and_close();
}

TEST(CreateFolderAtomically, AppearsUnderItsNameWithParents) {
  const TempDir dir;
  create_folder_atomically(dir.path() / "a/b", [](const fs::path& temporary) { write(temporary / "f", "text"); });
  EXPECT_EQ(testing::read_file(dir.path() / "a/b/f"), "text");
  EXPECT_THAT(names_in(dir.path() / "a"), ::testing::ElementsAre("b"));
}

TEST(CreateFolderAtomically, IsNotThereWhileItIsFilled) {
  const TempDir dir;
  create_folder_atomically(dir.path() / "a", [&](const fs::path& temporary) {
    write(temporary / "f", "text");
    EXPECT_FALSE(fs::exists(dir.path() / "a"));
  });
}

TEST(CreateFolderAtomically, LeavesNothingBehindAFailure) {
  const TempDir dir;
  EXPECT_THROW(create_folder_atomically(dir.path() / "a",
                                        [](const fs::path& temporary) {
                                          write(temporary / "f", "half");
                                          throw std::runtime_error("disk full");
                                        }),
               std::runtime_error);
  EXPECT_THAT(names_in(dir.path()), ::testing::IsEmpty());
}

TEST(CreateFolderAtomically, RefusesAFolderThatExists) {
  const TempDir dir;
  fs::create_directory(dir.path() / "a");
  EXPECT_THAT(
      testing::message_of<CheckpointError>([&] { create_folder_atomically(dir.path() / "a", [](const fs::path&) {}); }),
      HasSubstr("File exists"));
}

TEST(FileWriter, RefusesAFileThatExists) {
  const TempDir dir;
  write(dir.path() / "f", "first");
  EXPECT_THAT(testing::message_of<CheckpointError>([&] { write(dir.path() / "f", "second"); }),
              HasSubstr("File exists"));
  EXPECT_EQ(testing::read_file(dir.path() / "f"), "first");
}

}  // namespace
}  // namespace fulgur
