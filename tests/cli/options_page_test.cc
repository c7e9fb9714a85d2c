#include "fulgur/cli/options_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <sstream>

namespace fulgur {
namespace {

TEST(OptionsPage, IsTheOneInDocs) {
  std::ifstream file("docs/options.md");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_TRUE(text.str() == options_page()) << "write it anew: ./bazelw run //tools:options_page > docs/options.md";
}

TEST(OptionsPage, EveryOptionSaysWhatItMeans) {
  const std::string page = options_page();
  const std::regex row(R"(\| `([^`]+)` \|(?: `[^`]*`)? \| (.*) \|)"), any_row(R"(\| `.*\n)");
  int64_t num_options = 0;
  for (std::sregex_iterator found(page.begin(), page.end(), row), end; found != end; ++found) {
    ++num_options;
    const std::string help = (*found)[2];
    EXPECT_GE(help.size(), 5u) << (*found)[1] << " has no help";
    EXPECT_FALSE(help.ends_with('.')) << (*found)[1] << ": help is one clause, without a full stop";
  }
  EXPECT_EQ(num_options, std::distance(std::sregex_iterator(page.begin(), page.end(), any_row), {}));
  EXPECT_GE(num_options, 150);
}

}  // namespace
}  // namespace fulgur
