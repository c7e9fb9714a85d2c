#include "fulgur/checkpoint/formats/flat_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/largest_allocation.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using Limits = std::numeric_limits<double>;

FlatValues there_and_back(const FlatValues& values) { return parse_flat_json(to_flat_json(values), "state.json"); }

std::string refusal(const std::string& text) {
  return message_of<CheckpointError>([&] { parse_flat_json(text, "state.json"); });
}

FlatValues small() {
  return {{"a/best", 0.93},
          {"a/count", int64_t{3}},
          {"b", true},
          {"lr", 2.0},
          {"name", "x"},
          {"rng", TensorReference{"rng"}},
          {"worst", -Limits::infinity()}};
}

TEST(FlatJson, IsForPeople) {
  EXPECT_EQ(to_flat_json(small()), R"({
  "a/best": 0.93,
  "a/count": 3,
  "b": true,
  "lr": 2.0,
  "name": "x",
  "rng": {"tensor":"rng"},
  "worst": {"double":"-inf"}
}
)");
}

TEST(FlatJson, KeepsTypes) {
  EXPECT_EQ(there_and_back(small()), small());
  EXPECT_EQ(there_and_back({}), FlatValues());
}

TEST(FlatJson, KeepsEveryBitOfNumbers) {
  for (const double value : {0.1, 1.0 / 3, 1e300, -1e-300, Limits::min(), Limits::denorm_min(), Limits::max(), -0.0,
                             123456789012345678.0, Limits::infinity(), 1e16, 5e-324}) {
    const FlatValues back = there_and_back({{"x", value}});
    EXPECT_EQ(std::bit_cast<uint64_t>(std::get<double>(back.at("x"))), std::bit_cast<uint64_t>(value)) << value;
  }
  EXPECT_TRUE(std::isnan(std::get<double>(there_and_back({{"x", Limits::quiet_NaN()}}).at("x"))));
  for (const int64_t value : {std::numeric_limits<int64_t>::min(), int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(std::get<int64_t>(there_and_back({{"x", value}}).at("x")), value);
  }
}

TEST(FlatJson, KeepsEveryString) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  for (const std::string& text : {std::string(), all, std::string("\0", 1), std::string("\u00e9\n\"\\\u2028")}) {
    EXPECT_EQ(std::get<std::string>(there_and_back({{"x", text}}).at("x")), text);
  }
  EXPECT_EQ(there_and_back({{"\"/\n\u00e9", true}, {"", false}}).size(), 2U);
  EXPECT_THAT(message_of<CheckpointError>([] { to_flat_json({{"\xff", true}}); }), HasSubstr("not UTF-8"));
}

TEST(FlatJson, RefusesAnythingElse) {
  EXPECT_EQ(refusal(R"({"a": 1, "a": 2})"), "state.json: a second value at 'a'");
  EXPECT_THAT(refusal(R"({"a": null})"), HasSubstr("null at 'a'"));
  EXPECT_THAT(refusal(R"({"a": [1]})"), HasSubstr("an array at 'a'"));
  EXPECT_THAT(refusal(R"({"a": {}})"), HasSubstr("an empty object at 'a'"));
  EXPECT_THAT(refusal(R"({"a": {"b": 1}})"), HasSubstr("at 'a'"));
  EXPECT_THAT(refusal(R"({"a": {"b": "c"}})"), HasSubstr("'b' is none of double, hex, tensor"));
  EXPECT_THAT(refusal(R"({"a": {"double": "one"}})"), HasSubstr("'one' is none of nan, inf, -inf"));
  EXPECT_THAT(refusal(R"({"a": {"hex": "f"}})"), HasSubstr("not hexadecimal"));
  EXPECT_THAT(refusal(R"({"a": {"hex": "-1"}})"), HasSubstr("not hexadecimal"));
  EXPECT_THAT(refusal(R"({"a": {"tensor": "b", "hex": ""}})"), HasSubstr("the name 'hex' at 'a'"));
  EXPECT_THAT(refusal(R"({"a": {"tensor": {"tensor": "b"}}})"), HasSubstr("an object at 'a'"));
  EXPECT_THAT(refusal(R"({"a": 18446744073709551615})"), HasSubstr("an integer beyond 2^63 at 'a'"));
  EXPECT_THAT(refusal(R"({"a": -9223372036854775809})"), HasSubstr("an integer beyond 2^63 at 'a'"));
  for (const char* text : {"", "[]", "3", "true", "\"a\"", "{", "{\"a\"}", "{\"a\": 1e999}", "{\"a\": NaN}", "{} {}"}) {
    EXPECT_THAT(refusal(text), ::testing::StartsWith("state.json: ")) << text;
  }
}

TEST(FlatJson, RefusesBombsBeforeItMakesRoomForThem) {
  std::string nested;
  for (int i = 0; i < 100000; ++i) nested += "{\"a\":";
  for (const std::string& text : {nested, "{\"a\":" + std::string(1 << 20, '[')}) {
    const testing::LargestAllocation largest;
    EXPECT_THROW(parse_flat_json(text, "state.json"), CheckpointError);
    EXPECT_LT(largest.num_bytes(), 10000U);
  }
}

TEST(FlatJson, WritesAndReadsNoMoreValuesThanItsLimit) {
  const std::string text = to_flat_json(small(), 7);
  EXPECT_EQ(parse_flat_json(text, "state.json", 7), small());
  EXPECT_THAT(message_of<CheckpointError>([&] { parse_flat_json(text, "state.json", 6); }),
              "state.json: more than 6 values");
  EXPECT_THAT(message_of<CheckpointError>([&] { to_flat_json(small(), 6); }),
              HasSubstr("the state has 7 values; a checkpoint can hold 6"));
}

TEST(FlatJson, EveryCutAndEveryFlippedBitIsRefusedOrLeavesValidValues) {
  const std::string text = to_flat_json(small());
  for (size_t size = 0; size + 2 < text.size(); ++size) {
    EXPECT_THROW(parse_flat_json(text.substr(0, size), "s"), CheckpointError) << size;
  }
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    try {
      EXPECT_GE(there_and_back(parse_flat_json(flipped, "s")).size(), 1U);
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith("s: ")) << bit;
    }
  }
}

}  // namespace
}  // namespace fulgur
