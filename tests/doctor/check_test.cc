#include "fulgur/doctor/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace fulgur::doctor {
namespace {

const Checks kChecks{
    {.topic = "memory", .found = "8 GiB"},
    {.topic = "disk",
     .found = "0.1 GiB free in \"here\"",
     .verdict = Verdict::warning,
     .advice = "name another folder"},
    {.topic = "master", .found = "nowhere", .verdict = Verdict::problem, .advice = "check MASTER_ADDR"}};

TEST(Check, HasALineAndItsAdviceBelow) {
  EXPECT_EQ(to_text(kChecks, 80),
            "memory  8 GiB\n"
            "disk    warning: 0.1 GiB free in \"here\"\n"
            "        name another folder\n"
            "master  problem: nowhere\n"
            "        check MASTER_ADDR\n");
}

TEST(Check, FitsInOneLine) {
  EXPECT_EQ(to_line(kChecks[0]), "8 GiB");
  EXPECT_EQ(to_line(kChecks[1]), "warning: 0.1 GiB free in \"here\"; name another folder");
  EXPECT_EQ(to_line({.topic = "launcher", .found = "RANK is not set", .verdict = Verdict::problem}),
            "problem: RANK is not set");
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

TEST(Check, IsNoWiderThanTheTerminal) {
  for (const size_t width : {20, 30}) {
    const std::string text = to_text(kChecks, width);
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), width) << line;
    EXPECT_EQ(words_of(text), words_of(to_text(kChecks, 80)));
  }
}

TEST(Check, JsonHasTheSame) {
  const auto json = nlohmann::json::parse(to_json(kChecks));
  EXPECT_EQ(json["works"], false);
  ASSERT_EQ(json["checks"].size(), 3u);
  EXPECT_EQ(json["checks"][1]["found"], kChecks[1].found);
  EXPECT_EQ(json["checks"][1]["verdict"], "warning");
  EXPECT_EQ(json["checks"][1]["advice"], kChecks[1].advice);
  EXPECT_EQ(nlohmann::json::parse(to_json({kChecks[0], kChecks[1]}))["works"], true);
}

}  // namespace
}  // namespace fulgur::doctor
