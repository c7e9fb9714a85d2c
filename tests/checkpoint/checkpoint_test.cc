// Checkpoints that several ranks write and any number of ranks reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/checkpoint/checkpoint_writer.h"
#include "fulgur/checkpoint/layout.h"
#include "fulgur/checkpoint/limits.h"
#include "fulgur/distributed/local_collective.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using ::testing::ThrowsMessage;

constexpr int64_t kSize = 96;

at::Tensor weight() { return at::arange(kSize, at::kFloat).reshape({8, 12}); }
at::Tensor moment() { return at::arange(kSize, at::kFloat).mul(0.5); }

// What one rank contributes: its part of one parameter's state.
CheckpointContent content_of(int64_t rank, int64_t world_size) {
  CheckpointContent content{.weights = {{"w", weight()}, {"empty", at::empty({0})}}, .aliases = {{"tied", "w"}}};
  content.run.set("loops/epoch", int64_t{3});
  content.run.set("module/table", at::ones({2}));
  content.rank.set("random", at::full({4}, rank));
  const ElementRange range = rank_range(kSize, rank, world_size);
  content.ranges.push_back({"w", range.begin, range.end, {{"exp_avg", range.of(moment())}}});
  return content;
}

void write_all(const fs::path& folder, int64_t world_size) {
  if (world_size == 1) {
    LocalCollective alone;
    return write_checkpoint(folder, content_of(0, 1), alone);
  }
  run_ranks(world_size,
            [&](World& world) { write_checkpoint(folder, content_of(world.rank(), world_size), world.control()); });
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

TEST(Checkpoint, IsReadWhoeverHasWrittenIt) {
  for (const int64_t world_size : {1, 2, 3}) {
    SCOPED_TRACE(world_size);
    const testing::TempDir dir;
    write_all(dir.path() / "c", world_size);
    EXPECT_EQ(names_in(dir.path()), std::vector<std::string>{"c"});
    const CheckpointReader reader(dir.path() / "c");
    EXPECT_EQ(reader.manifest().world_size, world_size);
    EXPECT_EQ(reader.run().get<int64_t>("loops/epoch"), 3);
    EXPECT_TRUE(reader.run().get<at::Tensor>("module/table").equal(at::ones({2})));
    EXPECT_EQ(reader.manifest().find_parameter("tied")->alias_of, "w");
    const NamedTensors weights = reader.weights();
    const auto found = std::ranges::find(weights, "w", &NamedTensors::value_type::first);
    ASSERT_NE(found, weights.end());
    EXPECT_TRUE(found->second.equal(weight()));
    for (int64_t rank = 0; rank < world_size; ++rank) {
      EXPECT_TRUE(reader.rank(rank).get<at::Tensor>("random").equal(at::full({4}, rank)));
    }
    for (const ElementRange range : {ElementRange{0, kSize}, {0, 1}, {30, 70}, {95, 96}, {32, 64}}) {
      EXPECT_TRUE(reader.read("w", range.begin, range.end).at("exp_avg").equal(range.of(moment())));
    }
    EXPECT_THAT(message_of<CheckpointError>([&] { reader.read("empty", 0, 1); }), HasSubstr("'empty' are missing"));
  }
}

TEST(Checkpoint, IsNotThereIfOneRankFails) {
  const testing::TempDir dir;
  const std::string message = message_of<CheckpointError>([&] {
    run_ranks(3, [&](World& world) {
      CheckpointContent content = content_of(world.rank(), 3);
      if (world.rank() == 1) content.ranges.push_back(content.ranges.front());  // the same range twice
      write_checkpoint(dir.path() / "c", content, world.control());
    });
  });
  EXPECT_THAT(message, HasSubstr("exp_avg[32:64]"));
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

TEST(Checkpoint, ReplacesNothing) {
  const testing::TempDir dir;
  write_all(dir.path() / "c", 1);
  EXPECT_THAT(message_of<CheckpointError>([&] { write_all(dir.path() / "c", 1); }),
              HasSubstr((dir.path() / "c").string()));
  EXPECT_EQ(CheckpointReader(dir.path() / "c").run().get<int64_t>("loops/epoch"), 3);
}

TEST(Checkpoint, IsNotThereIfItsStateCouldNotBeRead) {
  const testing::TempDir dir;
  LocalCollective alone;
  CheckpointContent content = content_of(0, 1);
  content.run.set("module/text", std::string(limits::kRunStateBytes, 'x'));
  EXPECT_THAT(message_of<CheckpointError>([&] { write_checkpoint(dir.path() / "c", content, alone); }),
              HasSubstr("state.json' has 2684"));
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

TEST(Checkpoint, FindsDamageInWhatIsRead) {
  const testing::TempDir dir;
  write_all(dir.path() / "c", 2);
  {
    std::fstream file(dir.path() / "c" / layout::rank_file(1, 2), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('x');
  }
  const CheckpointReader reader(dir.path() / "c");
  EXPECT_EQ(reader.read("w", 0, 10).size(), 1U);
  EXPECT_THAT(message_of<CheckpointError>([&] { reader.read("w", 0, kSize); }),
              AllOf(HasSubstr("is damaged"), HasSubstr("optimizer-1-of-2.safetensors")));
}

// The strides in state.json are the memory order of a parameter whose state does not lie row by row.
TEST(Checkpoint, RefusesStridesThatLeadOutOfTheState) {
  const testing::TempDir dir;
  LocalCollective alone;
  const auto finished = [&](const std::string& strides) {
    CheckpointContent content = content_of(0, 1);
    content.ranges = {{"w", 0, kSize, {{"master", moment()}}}};
    content.run.set("strategy/state/strides/w", strides);
    fs::remove_all(dir.path() / "c");
    write_checkpoint(dir.path() / "c", content, alone);
    return CheckpointReader(dir.path() / "c").finished_weights();
  };
  const NamedTensors weights = finished("1,8");
  const auto found = std::ranges::find(weights, "w", &NamedTensors::value_type::first);
  EXPECT_TRUE(found->second.equal(moment().view({12, 8}).t()));
  for (const char* bad : {"", "12", "12,1,1", "13,1", "12,2", "-12,1", "12,", "12;1", "12,x", " 12,1", "12,1 ",
                          "9223372036854775807,9223372036854775807", "99999999999999999999,1"}) {
    EXPECT_THAT([&] { finished(bad); },
                ThrowsMessage<CheckpointError>(AllOf(HasSubstr((dir.path() / "c").string()),
                                                     HasSubstr(std::string("of shape [8,12], are '") + bad + "'"))))
        << bad;
  }
}

TEST(RangeName, IsReadBackWhateverTheParameterIsCalled) {
  for (const char* parameter : {"w", "net.0.weight", "a:b", "x[0:1]", ""}) {
    const auto name = layout::parse_range_name(layout::to_string({parameter, "exp_avg", 3, 20}));
    ASSERT_TRUE(name);
    EXPECT_EQ(name->parameter, parameter);
    EXPECT_EQ(name->tensor, "exp_avg");
    EXPECT_EQ(name->begin, 3);
    EXPECT_EQ(name->end, 20);
  }
  for (const char* other : {"", "w", "w:m", "w:m[", "w:m[1]", "w:m[2:1]", "w:m[-1:1]", "m[0:1]", "w:m[0:1] "}) {
    EXPECT_FALSE(layout::parse_range_name(other)) << other;
  }
}

}  // namespace
}  // namespace fulgur
