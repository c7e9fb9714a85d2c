#include "fulgur/checkpoint/state_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

TEST(StateJson, ComesBackWithItsTensors) {
  State state;
  state.set("fit_loop/epoch", int64_t{3});
  state.set("best", 2.0);
  state.set("name", std::string("x"));
  state.set("shuffled", true);
  state.set("rng/cpu", torch::arange(4));
  NamedTensors tensors;
  const std::string text = state_to_json(state, tensors);
  ASSERT_EQ(tensors.size(), 1U);
  EXPECT_EQ(tensors[0].first, "rng/cpu");
  const State back = state_from_json(text, "state.json", [&](const std::string& name) {
    EXPECT_EQ(name, "rng/cpu");
    return tensors[0].second;
  });
  EXPECT_EQ(back.values().size(), 5U);
  EXPECT_EQ(back.get<int64_t>("fit_loop/epoch"), 3);
  EXPECT_EQ(back.get<double>("best"), 2.0);
  EXPECT_EQ(back.get<std::string>("name"), "x");
  EXPECT_TRUE(back.get<bool>("shuffled"));
  EXPECT_TRUE(torch::equal(back.get<at::Tensor>("rng/cpu"), torch::arange(4)));
}

TEST(StateJson, NamesTheFileInErrors) {
  EXPECT_THAT(testing::message_of<CheckpointError>(
                  [] { state_from_json("[]", "folder/state.json", [](const std::string&) { return at::Tensor(); }); }),
              ::testing::StartsWith("folder/state.json: "));
}

}  // namespace
}  // namespace fulgur
