#include "fulgur/loops/checkpoint_saver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <fstream>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/distributed/local_collective.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

class EarlierFailure : public ::testing::TestWithParam<bool> {};

// A save in the background has failed, unnoticed, when a signal or a callback requests the next one.
TEST_P(EarlierFailure, KeepsNoLaterOneFromBeingWritten) {
  const TempDir dir;
  std::ofstream(dir.path() / "taken") << "mine";
  std::vector<fs::path> saved;
  LocalCollective alone;
  CheckpointSaver saver(
      alone,
      [](bool, const auto& use) {
        CheckpointContent content{.weights = {{"w", torch::ones({2})}}};
        use(content);
      },
      [&](const fs::path& folder, const SaveOptions&) { saved.push_back(folder); });
  saver.save(dir.path() / "taken", {.async = true});
  const bool in_training = GetParam();
  saver.set_in_training(in_training);
  EXPECT_THAT(message_of<CheckpointError>([&] {
                saver.save(dir.path() / "next", {});
                if (in_training) saver.finish();
              }),
              HasSubstr((dir.path() / "taken").string()));
  EXPECT_THAT(saved, ElementsAre(dir.path() / "next"));
  EXPECT_TRUE(is_checkpoint(dir.path() / "next"));
}

INSTANTIATE_TEST_SUITE_P(, EarlierFailure, ::testing::Bool());

// A tensor on the meta device cannot be copied to the host.
TEST(CheckpointSaver, OnlyRankZeroCopiesWhatOnlyRankZeroWrites) {
  const TempDir dir;
  testing::run_ranks(2, [&](World& world) {
    const at::Tensor tensor = torch::ones({2}, world.rank() == 0 ? at::kCPU : at::kMeta);
    const auto with_content = [&](bool, const auto& use) {
      CheckpointContent made{.weights = {{"w", tensor}}, .aliases = {{"tied", "w"}}};
      made.run.set("of_the_run", tensor);
      use(made);
    };
    CheckpointSaver saver(world.control(), with_content, [](const fs::path&, const SaveOptions&) {});
    saver.save(dir.path() / "a", {.async = true});
    saver.finish();
  });
  verify(dir.path() / "a", read_manifest(dir.path() / "a"));
  EXPECT_NE(read_manifest(dir.path() / "a").find_parameter("tied"), nullptr);
}

}  // namespace
}  // namespace fulgur
