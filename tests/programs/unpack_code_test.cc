// Where compiled code is unpacked to, and who must not be able to change it there.
#include "fulgur/programs/unpack_code.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/file_system.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Files = std::map<std::string, std::string_view>;

const Files kFiles = {{"net.so", "code"}, {"net.json", "{}"}};

class UnpackCode : public ::testing::Test {
 protected:
  UnpackCode() { ::setenv("XDG_CACHE_HOME", dir_.path().c_str(), /*overwrite=*/1); }
  ~UnpackCode() override { ::unsetenv("XDG_CACHE_HOME"); }

  fs::path all() const { return dir_.path() / "fulgur" / "compiled"; }

  testing::TempDir dir_;
};

std::string text_of(const fs::path& file) { return read_text_file(file, /*max_bytes=*/1 << 20); }

TEST_F(UnpackCode, TheSameCodeIsUnpackedOnce) {
  const fs::path folder = unpack_code(kFiles, "a.pt2");
  EXPECT_EQ(folder.parent_path(), all());
  EXPECT_EQ(text_of(folder / "net.so"), "code");
  EXPECT_EQ(text_of(folder / "net.json"), "{}");
  struct stat before{}, after{};
  ASSERT_EQ(::stat((folder / "net.so").c_str(), &before), 0);
  EXPECT_EQ(unpack_code(kFiles, "b.pt2"), folder);
  ASSERT_EQ(::stat((folder / "net.so").c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino);
  EXPECT_NE(unpack_code({{"net.so", "edoc"}, {"net.json", "{}"}}, "c.pt2"), folder);
}

TEST_F(UnpackCode, ChangedCodeIsReplacedByThatOfTheArchive) {
  const fs::path folder = unpack_code(kFiles, "a.pt2");
  for (const std::string_view other : {"edoc", "longer code", ""}) {
    fs::remove(folder / "net.so");
    write_file(folder / "net.so", other);
    unpack_code(kFiles, "a.pt2");
    EXPECT_EQ(text_of(folder / "net.so"), "code");
  }
  fs::remove(folder / "net.so");
  fs::create_symlink(folder / "net.json", folder / "net.so");
  unpack_code(kFiles, "a.pt2");
  EXPECT_FALSE(fs::is_symlink(folder / "net.so"));
  EXPECT_EQ(text_of(folder / "net.json"), "{}");
}

TEST_F(UnpackCode, OthersCannotEnterTheFolder) {
  const fs::path folder = unpack_code(kFiles, "a.pt2");
  for (const fs::path& path : {folder, all()}) {
    EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_all) << path;
    for (const fs::perms open : {fs::perms::group_write, fs::perms::others_write, fs::perms::others_read}) {
      fs::permissions(path, fs::perms::owner_all | open);
      EXPECT_THAT(testing::message_of<CheckpointError>([] { unpack_code(kFiles, "a.pt2"); }),
                  AllOf(HasSubstr("a.pt2: "), HasSubstr(path.string() + " is open to other users"),
                        HasSubstr("run chmod 700"), HasSubstr("--compiled_code=false")));
    }
    fs::permissions(path, fs::perms::owner_all);
  }
  unpack_code(kFiles, "a.pt2");
}

TEST_F(UnpackCode, OthersCannotExchangeTheFolder) {
  unpack_code(kFiles, "a.pt2");
  for (const fs::path& above : {dir_.path(), dir_.path() / "fulgur"}) {
    fs::permissions(above, fs::perms::all);
    EXPECT_THAT(testing::message_of<CheckpointError>([] { unpack_code(kFiles, "a.pt2"); }),
                HasSubstr("other users can write to " + above.string() + ", and so exchange code"));
    fs::permissions(above, fs::perms::all | fs::perms::sticky_bit);  // where others can only add
    unpack_code(kFiles, "a.pt2");
    fs::permissions(above, fs::perms::owner_all);
  }
}

TEST_F(UnpackCode, SeveralAtOnceGetTheSame) {
  const std::string code(1'000'000, 'x');
  const Files large = {{"net.so", code}, {"net.json", "{}"}};
  std::vector<std::thread> threads;
  std::vector<fs::path> folders(8);
  for (fs::path& folder : folders) threads.emplace_back([&] { folder = unpack_code(large, "a.pt2"); });
  for (std::thread& thread : threads) thread.join();
  for (const fs::path& folder : folders) EXPECT_EQ(folder, folders[0]);
  EXPECT_EQ(text_of(folders[0] / "net.so"), code);
  EXPECT_EQ(std::distance(fs::directory_iterator(folders[0]), {}), 2);
}

TEST_F(UnpackCode, AFolderOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  const fs::path folder = unpack_code(kFiles, "a.pt2");
  ASSERT_EQ(::chown(folder.c_str(), /*nobody*/ 65534, 65534), 0);
  EXPECT_THAT(testing::message_of<CheckpointError>([] { unpack_code(kFiles, "a.pt2"); }),
              HasSubstr("belongs to another user"));
}

TEST_F(UnpackCode, ALinkInPlaceOfTheFolderIsRefused) {
  const fs::path folder = unpack_code(kFiles, "a.pt2");
  fs::rename(folder, dir_.path() / "elsewhere");
  fs::create_directory_symlink(dir_.path() / "elsewhere", folder);
  EXPECT_THAT(testing::message_of<CheckpointError>([] { unpack_code(kFiles, "a.pt2"); }),
              HasSubstr("is no folder: remove it"));
}

TEST_F(UnpackCode, NothingIsUnpackedElsewhere) {
  for (const std::string name : {"../net.so", "/tmp/net.so", "a/net.so", "..", ".", ""}) {
    EXPECT_THAT(testing::message_of<CheckpointError>([&] { unpack_code({{name, "code"}}, "a.pt2"); }),
                AllOf(HasSubstr("a.pt2: "), HasSubstr("would be unpacked elsewhere than in " + all().string())))
        << name;
  }
  EXPECT_FALSE(fs::exists(dir_.path() / "fulgur"));
}

TEST_F(UnpackCode, AFullDiskIsAnErrorAndLeavesNothingBehind) {
  const std::string code(100'000, 'x');
  const Files large = {{"net.so", code}};
  {
    const testing::FileSizeLimit full_disk(50'000);
    EXPECT_THAT(testing::message_of<CheckpointError>([&] { unpack_code(large, "a.pt2"); }),
                AllOf(HasSubstr("a.pt2: its compiled code cannot be unpacked: cannot write"), HasSubstr("net.so")));
  }
  const fs::path folder = unpack_code(large, "a.pt2");
  EXPECT_EQ(text_of(folder / "net.so"), code);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 1);
}

TEST(UnpackCodeWithoutCache, GoesHomeAndThenToTheFolderForTemporaryFiles) {
  const testing::TempDir home;
  ::unsetenv("XDG_CACHE_HOME");
  ::setenv("HOME", home.path().c_str(), /*overwrite=*/1);
  EXPECT_EQ(unpack_code(kFiles, "a.pt2").parent_path(), home.path() / ".cache/fulgur/compiled");
  ::setenv("XDG_CACHE_HOME", "not/absolute", /*overwrite=*/1);
  EXPECT_EQ(unpack_code(kFiles, "a.pt2").parent_path(), home.path() / ".cache/fulgur/compiled");
  ::unsetenv("XDG_CACHE_HOME");
  ::unsetenv("HOME");
  ::setenv("TMPDIR", home.path().c_str(), /*overwrite=*/1);
  EXPECT_EQ(unpack_code(kFiles, "a.pt2").parent_path(),
            home.path() / ("fulgur-compiled-" + std::to_string(::geteuid())));
}

}  // namespace
}  // namespace fulgur
