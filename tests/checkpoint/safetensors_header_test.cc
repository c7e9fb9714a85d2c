#include "fulgur/checkpoint/formats/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/largest_allocation.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

std::string file_of(const std::string& header, size_t data_bytes = 0) {
  const uint64_t size = header.size();
  std::string bytes(sizeof(size), '\0');
  std::memcpy(bytes.data(), &size, sizeof(size));
  return bytes + header + std::string(data_bytes, 'x');
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors_header(file, static_cast<int64_t>(file.size()), "m.safetensors");
}

std::string refusal(const std::string& header, size_t data_bytes = 0) {
  return message_of<CheckpointError>([&] { parse(file_of(header, data_bytes)); });
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a": {"dtype": ")" + dtype + R"(", "shape": )" + shape + R"(, "data_offsets": )" + offsets + "}}";
}

const char* const kSmall = R"({"__metadata__": {"format": "pt"}, "b": {"dtype": "I16", "shape": [2], "data_offsets":
[24, 28]}, "a": {"shape": [2, 3], "data_offsets": [0, 24], "dtype": "F32"}}  )";

TEST(SafetensorsHeader, GivesEntriesInTheOrderOfTheirBytes) {
  const std::string file = file_of(kSmall, 28);
  const SafetensorsHeader header = parse(file);
  ASSERT_EQ(header.entries.size(), 2U);
  EXPECT_EQ(header.entries[0].name, "a");
  EXPECT_EQ(header.entries[0].dtype, "F32");
  EXPECT_THAT(header.entries[0].shape, ::testing::ElementsAre(2, 3));
  EXPECT_EQ(header.entries[0].numel(), 6);
  EXPECT_EQ(header.entries[1].begin, 24);
  EXPECT_EQ(header.entries[1].end, 28);
  EXPECT_EQ(header.metadata.at("format"), "pt");
  EXPECT_EQ(header.data_begin, static_cast<int64_t>(file.size()) - 28);
}

TEST(SafetensorsHeader, TakesEmptyOnes) {
  EXPECT_TRUE(parse(file_of("{}")).entries.empty());
  EXPECT_EQ(parse(file_of(entry("F32", "[0, 7]", "[0, 0]"))).entries[0].numel(), 0);
  EXPECT_EQ(parse(file_of(entry("F64", "[]", "[0, 8]"), 8)).entries[0].numel(), 1);
}

TEST(SafetensorsHeader, TakesDtypesThatItDoesNotKnowOrThatAreNoBytes) {
  EXPECT_EQ(parse(file_of(entry("Q3", "[8]", "[0, 5]"), 5)).entries[0].dtype, "Q3");
  EXPECT_EQ(parse(file_of(entry("F4", "[8]", "[0, 4]"), 4)).entries[0].dtype, "F4");
  EXPECT_THAT(refusal(entry("F4", "[7]", "[0, 4]"), 4), HasSubstr("takes 28 bits, but has 4 bytes"));
}

TEST(SafetensorsHeader, NamesFileTensorAndReason) {
  EXPECT_EQ(refusal(entry("F32", "[2]", "[0, 4]"), 4),
            "m.safetensors: tensor 'a' of F32 takes 64 bits, but has 4 bytes");
}

TEST(SafetensorsHeader, RefusesBadSizes) {
  EXPECT_THAT(message_of<CheckpointError>([] { parse("1234567"); }), HasSubstr("7 bytes are too few"));
  EXPECT_EQ(
      message_of<CheckpointError>([] { parse("alcohol,proline\n14.2,1065\n"); }),
      "m.safetensors: this is no safetensors file: its first 8 bytes would make a header of 3201055929489648737 bytes, "
      "and one has at most 100000000");
  EXPECT_EQ(message_of<CheckpointError>([] { parse(file_of("{}").substr(0, 9)); }),
            "m.safetensors: this is no safetensors file, or its end is missing: the header has 2 bytes, the file 9");
}

TEST(SafetensorsHeader, RefusesBadRanges) {
  EXPECT_THAT(refusal(entry("U8", "[4]", "[0, 4]"), 3), HasSubstr("ends at byte 4 of 3"));
  EXPECT_THAT(refusal(entry("U8", "[4]", "[0, 4]"), 5), HasSubstr("the tensors end at byte 4 of 5"));
  EXPECT_THAT(refusal(entry("U8", "[4]", "[1, 5]"), 5), HasSubstr("begins at byte 1 and not at 0: there is a hole"));
  EXPECT_THAT(refusal(entry("U8", "[4]", "[4, 0]"), 4), HasSubstr("ends before it begins"));
  EXPECT_THAT(refusal(entry("U8", "[4]", "[-4, 0]"), 4), HasSubstr("a negative number"));
  EXPECT_THAT(refusal(entry("U8", "[4]", "[18446744073709551612, 0]"), 4), HasSubstr("a number above 2^63"));
  EXPECT_THAT(refusal(entry("U8", "[1]", "[9223372036854775806, 9223372036854775807]"), 4), HasSubstr("ends at byte"));
  EXPECT_THAT(refusal(R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                          "b": {"dtype": "U8", "shape": [4], "data_offsets": [3, 7]}})",
                      7),
              HasSubstr("tensor 'b' begins at byte 3 and not at 4: there is an overlap"));
  EXPECT_THAT(refusal("{}", 1), HasSubstr("the tensors end at byte 0 of 1"));
}

TEST(SafetensorsHeader, RefusesBadShapes) {
  EXPECT_THAT(refusal(entry("U8", "[-4]", "[0, 4]"), 4), HasSubstr("a negative number"));
  EXPECT_THAT(refusal(entry("U8", "[4.0]", "[0, 4]"), 4), HasSubstr("a fraction"));
  EXPECT_THAT(refusal(entry("U8", "[4e99]", "[0, 4]"), 4), HasSubstr("a fraction"));
  EXPECT_THAT(refusal(entry("U8", "[1e999]", "[0, 4]"), 4), HasSubstr("is not JSON"));
  EXPECT_THAT(refusal(entry("U8", "[4294967296, 4294967296]", "[0, 0]")),
              HasSubstr("shape of tensor 'a' is too large"));
  EXPECT_THAT(refusal(entry("F32", "[9223372036854775807, 0]", "[0, 0]")), HasSubstr("too large"));
  EXPECT_THAT(refusal(entry("U8", "[0,[0]]", "[0, 0]")), HasSubstr("an array"));
  EXPECT_THAT(refusal(entry("U8", "4", "[0, 4]"), 4), HasSubstr("a number at 'a'"));
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  EXPECT_THAT(refusal(entry("U8", ones + "]", "[0, 1]"), 1), HasSubstr("more than 64 sizes"));
}

TEST(SafetensorsHeader, RefusesNamesAndFieldsThatAreThereTwiceOrNotAtAll) {
  const std::string one = R"("a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})";
  EXPECT_THAT(refusal("{" + one + "," + one + "}"), HasSubstr("tensor 'a' is there twice"));
  EXPECT_THAT(refusal(R"({"__metadata__": {}, "__metadata__": {}})"), HasSubstr("a second '__metadata__'"));
  EXPECT_THAT(refusal(R"({"__metadata__": {"k": "1", "k": "2"}})"), HasSubstr("a second 'k'"));
  EXPECT_THAT(refusal(R"({"__metadata__": {"k": 1}})"), HasSubstr("a number"));
  EXPECT_THAT(refusal(R"({"a": {"dtype": "U8", "dtype": "U8"}})"), HasSubstr("a second field 'dtype'"));
  EXPECT_THAT(refusal(R"({"a": {"dtype": "U8", "shape": []}})"), HasSubstr("tensor 'a' has no data_offsets"));
  EXPECT_THAT(refusal(R"({"a": {"stride": 1}})"), HasSubstr("the field 'stride'"));
  EXPECT_THAT(refusal(entry("U8", "[]", "[0]")), HasSubstr("before the second"));
  EXPECT_THAT(refusal(entry("U8", "[]", "[0, 1, 2]"), 1), HasSubstr("a third offset"));
}

TEST(SafetensorsHeader, RefusesWhatIsNotSuchAnObject) {
  for (const char* text : {"", " {}", "[]", "3", "null", "{}{}", "{} x", "{\"a\"", "{\"a\": {", "{\"a\": [",
                           "{\"a\": 3}", "{\"a\": \"b\"}", "{\"a\": null}", "{\"a\": {}}", "{\"\\ud800\": {}}"}) {
    EXPECT_THAT(refusal(text), HasSubstr("m.safetensors: ")) << text;
  }
  EXPECT_THAT(refusal(std::string("{}\0", 3)), HasSubstr("a zero byte"));
  EXPECT_THAT(refusal("{\"\xff\": {}}"), HasSubstr("is not JSON"));
}

TEST(SafetensorsHeader, RefusesBombsBeforeItMakesRoomForThem) {
  const std::string deep = "{\"a\": " + std::string(1 << 20, '['),
                    in_shape = R"({"a": {"shape": )" + std::string(1 << 20, '[');
  const std::string nested = [] {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += "{\"a\":";
    return text;
  }();
  for (const std::string& text : {deep, nested, in_shape}) {
    const std::string file = file_of(text);
    const testing::LargestAllocation largest;
    EXPECT_THROW(parse(file), CheckpointError);
    EXPECT_LT(largest.num_bytes(), 10000U);
  }
}

TEST(SafetensorsHeader, IsWholeOrRefusedWhereverItIsCut) {
  const std::string file = file_of(kSmall, 28);
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_THROW(parse(file.substr(0, size)), CheckpointError) << size;
  }
}

TEST(SafetensorsHeader, EveryFlippedBitIsRefusedOrLeavesAValidHeader) {
  const std::string file = file_of(kSmall, 28);
  const size_t header_bytes = file.size() - 28;
  for (size_t bit = 0; bit < 8 * header_bytes; ++bit) {
    std::string flipped = file;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    const testing::LargestAllocation largest;
    try {
      const SafetensorsHeader header = parse(flipped);
      EXPECT_EQ(header.entries.back().end, 28) << bit;
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith("m.safetensors: "));
    }
    EXPECT_LT(largest.num_bytes(), 10000U) << bit;
  }
}

}  // namespace
}  // namespace fulgur
