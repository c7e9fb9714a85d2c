#include "fulgur/checkpoint/atomic_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/file_system.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::KilledBySignal;
using testing::message_of;
using testing::TempDir;
using ::testing::UnorderedElementsAre;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const fs::path& entry : list_folder(folder)) names.push_back(entry.filename().string());
  return names;
}

auto writes(const std::string& text) {
  return [text](FileWriter& file) { file.write(text.data(), text.size()); };
}

// Creates a folder whose files `fill` writes into `temporary`.
void create_folder(const fs::path& folder, const std::function<void(const fs::path& temporary)>& fill) {
  TemporaryFolder temporary(folder);
  fill(temporary.path());
  temporary.commit();
}

// Forks a child process that makes a temporary folder with a file in it, and is killed.
void be_killed_while_filling(const fs::path& target) {
  EXPECT_EXIT(
      {
        const TemporaryFolder temporary(target);
        write_file(temporary.path() / "f", "half");
        std::raise(SIGKILL);
      },
      KilledBySignal(SIGKILL), "");
}

TEST(TemporaryFolder, AppearsUnderItsNameWithParents) {
  const TempDir dir;
  create_folder(dir.path() / "a/b", [](const fs::path& temporary) { write_file(temporary / "f", "text"); });
  EXPECT_EQ(testing::read_file(dir.path() / "a/b/f"), "text");
  EXPECT_THAT(names_in(dir.path() / "a"), ElementsAre("b"));
  EXPECT_THAT(names_in(dir.path() / "a/b"), ElementsAre("f"));
}

TEST(TemporaryFolder, TakesANameWithASlashAtTheEnd) {
  const TempDir dir;
  create_folder(dir.path() / "a/", [](const fs::path& temporary) { write_file(temporary / "f", "text"); });
  EXPECT_EQ(testing::read_file(dir.path() / "a/f"), "text");
}

TEST(TemporaryFolder, TakesAPathThroughALinkAsTheSystemReadsIt) {
  const TempDir dir, elsewhere;
  fs::create_directories(elsewhere.path() / "deep");
  fs::create_directory_symlink(elsewhere.path() / "deep", dir.path() / "link");
  const fs::path target = dir.path() / "link/../new";
  create_folder(target, [](const fs::path& temporary) { write_file(temporary / "f", "text"); });
  EXPECT_EQ(testing::read_file(target / "f"), "text");
  EXPECT_THAT(names_in(dir.path()), ElementsAre("link"));
}

TEST(TemporaryFolder, IsNotThereWhileItIsFilled) {
  const TempDir dir;
  create_folder(dir.path() / "a", [&](const fs::path& temporary) {
    write_file(temporary / "f", "text");
    EXPECT_FALSE(fs::exists(dir.path() / "a"));
  });
}

TEST(TemporaryFolder, LeavesNothingBehindAFailure) {
  const TempDir dir;
  EXPECT_THROW(create_folder(dir.path() / "a",
                             [](const fs::path& temporary) {
                               write_file(temporary / "f", "half");
                               throw std::runtime_error("disk full");
                             }),
               std::runtime_error);
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

TEST(TemporaryFolder, RefusesAFolderThatExists) {
  const TempDir dir;
  fs::create_directory(dir.path() / "a");
  EXPECT_THAT(message_of<CheckpointError>([&] { create_folder(dir.path() / "a", [](const fs::path&) {}); }),
              HasSubstr("File exists"));
}

TEST(TemporaryFolder, ReplacesNothingThatAppearsMeanwhile) {
  const TempDir dir;
  EXPECT_THAT(message_of<CheckpointError>([&] {
                create_folder(dir.path() / "a", [&](const fs::path&) { fs::create_directory(dir.path() / "a"); });
              }),
              HasSubstr("/a': File exists"));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("a"));
}

TEST(TemporaryFolder, SaysThatItsFolderHasVanished) {
  const TempDir dir;
  EXPECT_THAT(message_of<CheckpointError>([&] {
                create_folder(dir.path() / "a/b", [&](const fs::path&) { fs::remove_all(dir.path() / "a"); });
              }),
              HasSubstr("No such file or directory"));
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

TEST(RemoveTemporaryFolders, ClearsAwayWhatAKilledSaveHasLeft) {
  const TempDir dir;
  be_killed_while_filling(dir.path() / "a");
  EXPECT_EQ(names_in(dir.path()).size(), 2U);  // the folder and its lock file
  remove_temporary_folders(dir.path());
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

TEST(RemoveTemporaryFolders, IsDoneByTheNextSave) {
  const TempDir dir;
  be_killed_while_filling(dir.path() / "a");
  create_folder(dir.path() / "b", [](const fs::path&) {});
  EXPECT_THAT(names_in(dir.path()), ElementsAre("b"));
  be_killed_while_filling(dir.path() / "a");
  TemporaryFile(dir.path() / "c").commit();
  EXPECT_THAT(names_in(dir.path()), UnorderedElementsAre("b", "c"));
}

TEST(TemporaryFile, IsThereOnceItIsWholeAndReplacesNothing) {
  const TempDir dir;
  TemporaryFile first(dir.path() / "f"), second(dir.path() / "f");
  first.writer().write("first", 5);
  second.writer().write("second", 6);
  EXPECT_FALSE(fs::exists(dir.path() / "f"));
  const FileDigest digest = first.commit();
  EXPECT_EQ(digest, digest_of(dir.path() / "f"));
  EXPECT_THAT(message_of<CheckpointError>([&] { second.commit(); }), HasSubstr("/f': File exists"));
  EXPECT_EQ(testing::read_file(dir.path() / "f"), "first");
}

TEST(RemoveTemporaryFolders, LeavesASaveThatIsUnderWay) {
  const TempDir dir;
  create_folder(dir.path() / "a", [&](const fs::path& temporary) {
    remove_temporary_folders(dir.path());
    write_file(temporary / "f", "text");
  });
  EXPECT_EQ(testing::read_file(dir.path() / "a/f"), "text");
}

TEST(RemoveTemporaryFolders, LeavesAFolderWhileAnyRankWritesIntoIt) {
  const TempDir dir;
  be_killed_while_filling(dir.path() / "a");
  fs::path temporary;
  for (const fs::path& path : list_folder(dir.path())) {
    if (fs::is_directory(path)) temporary = path;
  }
  {
    const TemporaryName shared = TemporaryName::share(temporary);
    remove_temporary_folders(dir.path());
    EXPECT_TRUE(fs::exists(temporary / "f"));
  }
  remove_temporary_folders(dir.path());
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

TEST(RemoveTemporaryFolders, TouchesNoOtherName) {
  const TempDir dir;
  const std::vector<std::string> names = {".fulgur-tmp-",
                                          ".fulgur-tmp-0123456789ABCDEF",
                                          ".fulgur-tmp-0123456789abcde",
                                          "fulgur-tmp-0123456789abcdef",
                                          ".fulgur-tmp-0123456789abcdef.txt",
                                          "epoch=1-step=10"};
  for (const std::string& name : names) fs::create_directory(dir.path() / name);
  remove_temporary_folders(dir.path());
  EXPECT_THAT(names_in(dir.path()), ::testing::UnorderedElementsAreArray(names));
}

TEST(RemoveTemporaryFolders, ClearsAwayHalfOfAPairAsAPowerCutMayLeaveIt) {
  const TempDir dir;
  fs::create_directory(dir.path() / ".fulgur-tmp-0123456789abcdef");
  write_file(dir.path() / ".fulgur-tmp-0123456789abcdef/f", "half");
  write_file(dir.path() / ".fulgur-tmp-fedcba9876543210.lock", "");
  remove_temporary_folders(dir.path());
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

TEST(RemoveTemporaryFolders, FollowsNoLink) {
  const TempDir dir, elsewhere;
  write_file(elsewhere.path() / "f", "text");
  fs::create_symlink(elsewhere.path(), dir.path() / ".fulgur-tmp-0123456789abcdef");
  remove_temporary_folders(dir.path());
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
  EXPECT_TRUE(fs::exists(elsewhere.path() / "f"));
}

TEST(RemoveTemporaryFolders, TakesAFolderThatIsNotThere) {
  EXPECT_NO_THROW(remove_temporary_folders("/nowhere/at/all"));
}

TEST(TemporaryName, CannotBeSharedOnceItIsGone) {
  const TempDir dir;
  EXPECT_THAT(message_of<CheckpointError>([&] { TemporaryName::share(dir.path() / ".fulgur-tmp-0123456789abcdef"); }),
              HasSubstr("No such file or directory"));
}

TEST(ReplaceFileAtomically, MakesOrReplacesAndLeavesNothingElse) {
  const TempDir dir;
  replace_file_atomically(dir.path() / "last", writes("first"));
  EXPECT_EQ(testing::read_file(dir.path() / "last"), "first");
  replace_file_atomically(dir.path() / "last", writes("second"));
  EXPECT_EQ(testing::read_file(dir.path() / "last"), "second");
  EXPECT_THAT(names_in(dir.path()), ElementsAre("last"));
}

TEST(ReplaceFileAtomically, LeavesWhatItCannotReplace) {
  const TempDir dir;
  fs::create_directory(dir.path() / "last");
  EXPECT_THAT(message_of<CheckpointError>([&] { replace_file_atomically(dir.path() / "last", writes("text")); }),
              HasSubstr("cannot replace '" + (dir.path() / "last").string() + "': Is a directory"));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("last"));
}

}  // namespace
}  // namespace fulgur
