#include "fulgur/base/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/errors.h"

namespace fulgur {
namespace {

Registry<int> animals() {
  Registry<int> registry("animal");
  registry.add("snow_leopard", [] { return std::make_unique<int>(4); });
  registry.add("crane", [] { return std::make_unique<int>(2); });
  return registry;
}

TEST(Registry, CreatesByNameHoweverItIsWritten) {
  EXPECT_EQ(*animals().create("snow-leopard"), 4);
  EXPECT_EQ(*animals().create("Crane"), 2);
}

TEST(Registry, RefusesAnUnknownNameWithTheNearestAndTheList) {
  EXPECT_EQ(testing::message_of<UsageError>([] { animals().create("crame"); }),
            "unknown animal 'crame'; did you mean 'crane'? known: crane, snow_leopard");
}

TEST(Registry, RefusesANameThatIsTaken) {
  auto registry = animals();
  EXPECT_THAT(testing::message_of<UsageError>([&] { registry.add("snow-leopard", nullptr); }),
              ::testing::HasSubstr("registered already"));
}

}  // namespace
}  // namespace fulgur
