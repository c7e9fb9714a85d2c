// A config file is refused, or what the options then are, printed as a file, gives the same options again.
#include "fulgur/cli/config.h"

#include <cstdint>
#include <filesystem>

#include "fulgur/base/toml_file.h"
#include "tests/checkpoint/fuzz/require.h"

namespace {

using namespace fulgur;
using fulgur::testing::require;

enum class Shape { round, square };

struct Place {
  int64_t row = 0;
  void describe(FieldVisitor& visit) { visit({.name = "row", .help = "row of the item"}, &row); }
};

struct Item {
  Place place{};
  std::string name = "a";
  int64_t size = 1;
  void describe(FieldVisitor& visit) {
    visit({.name = "place", .help = "a section in an element of a list"}, &place);
    visit({.name = "name", .help = "name of the item"}, &name);
    visit({.name = "size", .help = "size of the item", .min = 1, .max = 9}, &size);
  }
};

struct Inner {
  std::pair<double, double> betas{0.9, 0.99};
  std::vector<Item> items{};
  void describe(FieldVisitor& visit) {
    visit({.name = "betas", .help = "a pair", .min = 0, .max = 1}, &betas);
    visit.list({.name = "items", .help = "a list of tables"}, list_of(items));
  }
};

struct Options {
  bool flag = false;
  int count = 3;
  int64_t whole = 2;
  uint64_t seed = 1;
  float half = 0.5F;
  double real = 1e-3;
  std::string text = "x";
  std::filesystem::path path{};
  Shape shape = Shape::round;
  std::optional<bool> maybe{};
  std::optional<int64_t> limit{};
  std::optional<double> rate{};
  std::vector<int64_t> widths{1, 2};
  std::vector<Shape> shapes{};
  Inner trainer{};
  void describe(FieldVisitor& visit) {
    visit({.name = "flag", .help = "a switch"}, &flag);
    visit({.name = "count", .help = "an int", .min = 0, .max = 100}, &count);
    visit({.name = "whole", .help = "an int64"}, &whole);
    visit({.name = "seed", .help = "a uint64"}, &seed);
    visit({.name = "half", .help = "a float"}, &half);
    visit({.name = "real", .help = "a double", .min = 0}, &real);
    visit({.name = "text", .help = "a text"}, &text);
    visit({.name = "path", .help = "a path"}, &path);
    visit({.name = "shape", .help = "an enum", .choices = {"round", "square"}}, &shape);
    visit({.name = "maybe", .help = "an optional bool"}, &maybe);
    visit({.name = "limit", .help = "an optional int64"}, &limit);
    visit({.name = "rate", .help = "an optional double"}, &rate);
    visit({.name = "widths", .help = "a list"}, &widths);
    visit({.name = "shapes", .help = "a list of enums", .choices = {"round", "square"}}, &shapes);
    visit({.name = "trainer", .help = "a section"}, &trainer);
  }
};

// The options as a file without the origins in its comments; empty if the text is refused.
std::string options_of(std::string_view text, bool& is_refused) {
  Options options;
  Config config([&](FieldVisitor& visit) { options.describe(visit); });
  std::vector<Setting> settings;
  std::vector<std::string> problems;
  read_toml_text(text, "f.toml", settings, problems);
  config.set(settings, problems);
  config.check(problems);
  config.make_objects(problems);
  is_refused = !problems.empty();
  for (const std::string& problem : problems) require(!problem.empty());
  return is_refused ? std::string() : config.to_toml();
}

// All that stands before the comments, which are the last thing of a line and have no quotation mark.
std::string without_comments(const std::string& text) {
  std::string result;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const std::string line = text.substr(begin, end - begin);
    const size_t comment = line.rfind("  # ");
    result += (comment == std::string::npos ? line : line.substr(0, line.find_last_not_of(' ', comment) + 1)) + "\n";
    begin = end + 1;
  }
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.find("include") != std::string_view::npos) return 0;  // reads other files
  bool is_refused = false, is_refused_again = false;
  const std::string printed = options_of(text, is_refused);
  if (is_refused) return 0;
  const std::string again = options_of(printed, is_refused_again);
  require(!is_refused_again);
  require(without_comments(again) == without_comments(printed));
  return 0;
}
