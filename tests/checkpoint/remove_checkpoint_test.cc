#include "fulgur/checkpoint/remove_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/manifest.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

fs::path make_checkpoint(const TempDir& dir) {
  const fs::path folder = dir.path() / "epoch=1-step=10";
  make_folders(folder);
  const FileDigest digest = write_file(folder / "state.json", "{}");
  write_manifest(folder, {.files = {{"state.json", digest.num_bytes, digest.xxh3}}, .parameters = {}, .ranges = {}});
  return folder;
}

TEST(RemoveCheckpoint, RemovesTheFolder) {
  const TempDir dir;
  remove_checkpoint(make_checkpoint(dir));
  EXPECT_TRUE(list_folder(dir.path()).empty());
}

TEST(RemoveCheckpoint, LeavesWhatIsNotOurs) {
  const TempDir dir;
  const fs::path folder = make_checkpoint(dir);
  write_file(folder / "notes.txt", "mine");
  ::testing::internal::CaptureStderr();
  remove_checkpoint(folder);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("it holds notes.txt, which fulgur has not written"));
  EXPECT_THAT(list_folder(folder), ::testing::ElementsAre(folder / "notes.txt"));
}

TEST(RemoveCheckpoint, TakesOneThatHasLostAFile) {
  const TempDir dir;
  const fs::path folder = make_checkpoint(dir);
  fs::remove(folder / "state.json");
  remove_checkpoint(folder);
  EXPECT_TRUE(list_folder(dir.path()).empty());
}

TEST(RemoveCheckpoint, RefusesAFolderWithoutAReadableManifest) {
  const TempDir dir;
  write_file(dir.path() / "f", "mine");
  EXPECT_THAT(message_of<CheckpointError>([&] { remove_checkpoint(dir.path()); }),
              HasSubstr("manifest.json': No such file or directory"));
  write_file(dir.path() / "manifest.json", "{}");
  EXPECT_THAT(message_of<CheckpointError>([&] { remove_checkpoint(dir.path()); }),
              HasSubstr("this is no manifest of a checkpoint"));
  EXPECT_EQ(list_folder(dir.path()).size(), 2U);
}

}  // namespace
}  // namespace fulgur
