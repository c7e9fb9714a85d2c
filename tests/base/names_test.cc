#include "fulgur/base/names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace fulgur {
namespace {

const std::vector<std::string> kKnown{"ddp", "ddp_sharded", "max_epochs", "single_device"};

TEST(Names, DashUnderscoreAndCaseAreTheSame) { EXPECT_EQ(canonical_name("Max-Epochs"), "max_epochs"); }

TEST(Names, NearestForgivesASlip) {
  EXPECT_EQ(nearest_name("dpp", kKnown), "ddp");
  EXPECT_EQ(nearest_name("single-devise", kKnown), "single_device");
  EXPECT_EQ(nearest_name("max_epohcs", kKnown), "max_epochs");  // two swapped neighbours count as one edit
}

TEST(Names, NearestFindsAPartOfAName) { EXPECT_EQ(nearest_name("epochs", kKnown), "max_epochs"); }

TEST(Names, NearestKnowsWhatLightningSays) {
  EXPECT_EQ(nearest_name("fsdp", kKnown), "ddp_sharded");
  EXPECT_EQ(nearest_name("gpus", kKnown), std::nullopt);  // it would be devices, which is not known here
}

TEST(Names, NearestIsNothingForSomethingElse) {
  EXPECT_EQ(nearest_name("horovod", kKnown), std::nullopt);
  EXPECT_EQ(nearest_name("", kKnown), std::nullopt);
}

TEST(Names, MessageSaysWhatWasAskedAndWhatIsKnown) {
  EXPECT_EQ(unknown_name_message("strategy", "dpp", kKnown),
            "unknown strategy 'dpp'; did you mean 'ddp'? known: ddp, ddp_sharded, max_epochs, single_device");
}

}  // namespace
}  // namespace fulgur
