#include "fulgur/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/migrations.h"
#include "tests/testing/errors.h"
#include "tests/testing/largest_allocation.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

Manifest small() {
  return {.world_size = 2,
          .files = {{"model.safetensors", 160, 0x0123456789abcdef}, {"optimizer-0-of-2.safetensors", 7, 1}},
          .parameters = {{"w", "F32", {3, 4}, ""}, {"head.w", "F32", {3, 4}, "w"}, {"step", "I64", {}, ""}},
          .ranges = {{"w", 5, 12, "optimizer-0-of-2.safetensors"}, {"w", 0, 5, "optimizer-0-of-2.safetensors"}}};
}

// The text of small() with one part of it replaced.
std::string with(const std::string& part, const std::string& replacement) {
  std::string text = to_json(small());
  const size_t position = text.find(part);
  EXPECT_NE(position, text.npos) << part;
  return text.replace(position, part.size(), replacement);
}

std::string refusal(const std::string& text) {
  return message_of<CheckpointError>([&] { parse_manifest(text, "manifest.json"); });
}

std::string refusal(const Manifest& manifest) {
  return message_of<CheckpointError>([&] { to_json(manifest); });
}

TEST(Manifest, ComesBackFromItsText) { EXPECT_EQ(parse_manifest(to_json(small()), "m"), small()); }

TEST(Manifest, TextIsForPeople) {
  EXPECT_EQ(to_json(small()), R"({
  "format_version": 1,
  "world_size": 2,
  "files": [
    {"name":"model.safetensors","num_bytes":160,"xxh3":"0123456789abcdef"},
    {"name":"optimizer-0-of-2.safetensors","num_bytes":7,"xxh3":"0000000000000001"}
  ],
  "parameters": [
    {"name":"w","dtype":"F32","shape":[3,4]},
    {"name":"head.w","dtype":"F32","shape":[3,4],"alias_of":"w"},
    {"name":"step","dtype":"I64","shape":[]}
  ],
  "ranges": [
    {"parameter":"w","begin":5,"end":12,"file":"optimizer-0-of-2.safetensors"},
    {"parameter":"w","begin":0,"end":5,"file":"optimizer-0-of-2.safetensors"}
  ]
}
)");
}

TEST(Manifest, SaysWhichFulgurWroteIt) {
  Manifest written = small();
  written.fulgur_version = "0.1.0";
  const std::string text = to_json(written);
  EXPECT_THAT(text, HasSubstr("\"format_version\": 1,\n  \"fulgur_version\": \"0.1.0\",\n  \"world_size\": 2,"));
  EXPECT_EQ(parse_manifest(text, "m"), written);
  EXPECT_EQ(parse_manifest(to_json(small()), "m").fulgur_version, "");  // as before 0.1.0
}

TEST(Manifest, OfAnEmptyCheckpoint) {
  const Manifest empty;
  EXPECT_EQ(parse_manifest(to_json(empty), "m"), empty);
}

TEST(Manifest, RefusesALaterVersionAndSaysWhatToDo) {
  const std::string message = refusal(with("\"format_version\": 1", "\"format_version\": 2"));
  EXPECT_THAT(message, HasSubstr("manifest.json: the checkpoint has format version 2, from a later fulgur"));
  EXPECT_THAT(message, HasSubstr("this one reads versions up to 1"));
  EXPECT_THAT(refusal(R"({"format_version": 18446744073709551615, "new": [[[1]]]})"), HasSubstr("later fulgur"));
  EXPECT_THAT(refusal(with("\"format_version\": 1", "\"format_version\": 0")),
              HasSubstr("there is no format version 0"));
}

TEST(Manifest, MigrationsRunOneAfterTheOther) {
  const Migrations migrations = {{1, [](nlohmann::json& json) { json["path"].push_back("1 to 2"); }},
                                 {2, [](nlohmann::json& json) { json["path"].push_back("2 to 3"); }}};
  nlohmann::json json;
  migrate(json, 1, 3, migrations);
  EXPECT_EQ(json["path"], nlohmann::json({"1 to 2", "2 to 3"}));
  EXPECT_THROW(migrate(json, 0, 3, migrations), BadJson);
}

TEST(Manifest, RefusesNamesThatLeaveTheFolder) {
  for (const std::string name :
       {"../model.safetensors", "a/b", "/etc/passwd", "..", ".", "", "manifest.json", "a\\u0000b"}) {
    EXPECT_THAT(refusal(with("\"model.safetensors\"", "\"" + name + "\"")), HasSubstr("is not the name of a file"))
        << name;
  }
}

TEST(Manifest, RefusesWrongTypesAndNumbers) {
  EXPECT_THAT(refusal(with("\"world_size\": 2", "\"world_size\": 0")), HasSubstr("world_size is 0"));
  EXPECT_THAT(refusal(with("\"world_size\": 2", "\"world_size\": \"2\"")), HasSubstr("'world_size' of the manifest"));
  EXPECT_THAT(refusal(with("160", "-160")), HasSubstr("'num_bytes' of a file is not a number from 0 to 2^63"));
  EXPECT_THAT(refusal(with("160", "9223372036854775808")), HasSubstr("is not a number from 0 to 2^63"));
  EXPECT_THAT(refusal(with("160", "1.5")), HasSubstr("is not a number from 0 to 2^63"));
  EXPECT_THAT(refusal(with("[3,4]", "[3,-4]")), HasSubstr("'shape' of a parameter"));
  EXPECT_THAT(refusal(with("[3,4]", "[3,[4]]")), HasSubstr("nested more than 4 deep"));
  EXPECT_THAT(refusal(with("[3,4]", "{}")), HasSubstr("'shape' of a parameter is not a list"));
  EXPECT_THAT(refusal(with("[]", "[4294967296,4294967296]")), HasSubstr("the shape of parameter 'step' is too large"));
  for (const char* hex : {"\"123456789abcdef\"", "\"0123456789ABCDEF\"", "\"0x23456789abcdef\"", "\"\""}) {
    EXPECT_THAT(refusal(with("\"0123456789abcdef\"", hex)), HasSubstr("is not 16 hexadecimal digits")) << hex;
  }
}

TEST(Manifest, RefusesWhatIsThereTwiceOrMissingOrUnknown) {
  EXPECT_THAT(refusal(with("\"optimizer-0-of-2.safetensors\"", "\"model.safetensors\"")),
              HasSubstr("file 'model.safetensors' is there twice"));
  EXPECT_THAT(refusal(with("\"head.w\"", "\"w\"")), HasSubstr("parameter 'w' is there twice"));
  EXPECT_THAT(refusal(with("\"world_size\": 2", "\"world_size\": 2, \"world_size\": 2")),
              HasSubstr("the name 'world_size' is there twice"));
  EXPECT_THAT(refusal(with("\"dtype\":\"F32\",", "")), HasSubstr("a parameter has no 'dtype'"));
  EXPECT_THAT(refusal(with("\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"new\":1")), HasSubstr("other fields"));
  EXPECT_THAT(refusal("[]"), HasSubstr("this is no manifest"));
  EXPECT_THAT(refusal(""), HasSubstr("is not JSON"));
}

TEST(Manifest, RefusesRangesThatDoNotCoverTheirParameterOnce) {
  const auto refusal_of = [](std::vector<std::pair<int64_t, int64_t>> ranges, const std::string& parameter = "w") {
    Manifest manifest = small();
    manifest.ranges.clear();
    for (const auto& [begin, end] : ranges) manifest.ranges.push_back({parameter, begin, end, "model.safetensors"});
    return refusal(manifest);
  };
  EXPECT_THAT(refusal_of({{0, 6}, {5, 12}}), HasSubstr("the ranges of parameter 'w' overlap at element 5"));
  EXPECT_THAT(refusal_of({{0, 12}, {0, 12}}), HasSubstr("overlap at element 0"));
  EXPECT_THAT(refusal_of({{0, 5}, {6, 12}}), HasSubstr("leave a hole at element 5"));
  EXPECT_THAT(refusal_of({{1, 12}}), HasSubstr("leave a hole at element 0"));
  EXPECT_THAT(refusal_of({{0, 13}}), HasSubstr("end at element 13 of 12"));
  EXPECT_THAT(refusal_of({{0, 11}}), HasSubstr("end at element 11 of 12"));
  EXPECT_THAT(refusal_of({{0, 12}, {12, 12}}), HasSubstr("range [12, 12) of 'w' is empty"));
  EXPECT_THAT(refusal_of({{0, 12}}, "head.w"), HasSubstr("that is an alias"));
  EXPECT_THAT(refusal_of({{0, 12}}, "v"), HasSubstr("there is no such parameter"));
  EXPECT_THAT(refusal(with("\"file\":\"optimizer-0-of-2.safetensors\"", "\"file\":\"other\"")),
              HasSubstr("there is no file 'other'"));
}

TEST(Manifest, RefusesAliasesOfNothing) {
  for (const char* alias : {"\"none\"", "\"head.w\"", "\"step\""}) {
    EXPECT_THAT(refusal(with("\"alias_of\":\"w\"", std::string("\"alias_of\":") + alias)),
                HasSubstr("which is not such a parameter"));
  }
}

TEST(Manifest, RefusesBombsBeforeItMakesRoomForThem) {
  std::string nested, many = "[0";
  for (int i = 0; i < 100000; ++i) nested += "{\"a\":";
  for (int i = 0; i < 1 << 22; ++i) many += ",0";
  for (const std::string& text : {nested, std::string(1 << 20, '['), many}) {
    const testing::LargestAllocation largest;
    EXPECT_THROW(parse_manifest(text, "m"), CheckpointError);
    EXPECT_LT(largest.num_bytes(), 10000U);
  }
}

TEST(Manifest, EveryCutAndEveryFlippedBitIsRefusedOrLeavesAValidManifest) {
  const std::string text = to_json(small());
  for (size_t size = 0; size + 2 < text.size(); ++size) {  // leaves out cuts within the line's end
    EXPECT_THROW(parse_manifest(text.substr(0, size), "m"), CheckpointError) << size;
  }
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    try {
      to_json(parse_manifest(flipped, "m"));
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith("m: ")) << bit;
    }
  }
}

TEST(Manifest, FindsFilesAndParameters) {
  const Manifest manifest = small();
  EXPECT_EQ(manifest.find_file("model.safetensors")->num_bytes, 160);
  EXPECT_EQ(manifest.find_file("x"), nullptr);
  EXPECT_EQ(manifest.find_parameter("head.w")->alias_of, "w");
  EXPECT_EQ(manifest.find_parameter("x"), nullptr);
}

TEST(Verify, NamesEveryFileThatIsNotAsWritten) {
  const TempDir dir;
  Manifest manifest;
  for (const std::string name : {"whole", "cut", "changed", "gone"}) {
    const FileDigest digest = write_file(dir.path() / name, "12345678");
    manifest.files.push_back({name, digest.num_bytes, digest.xxh3});
  }
  EXPECT_FALSE(is_checkpoint(dir.path()));
  write_manifest(dir.path(), manifest);
  EXPECT_TRUE(is_checkpoint(dir.path()));
  EXPECT_NO_THROW(verify(dir.path(), read_manifest(dir.path())));

  for (const char* name : {"cut", "changed", "gone"}) std::filesystem::remove(dir.path() / name);
  write_file(dir.path() / "cut", "1234567");
  write_file(dir.path() / "changed", "12345679");
  const std::string message = message_of<CheckpointError>([&] { verify(dir.path(), manifest); });
  EXPECT_THAT(message, HasSubstr("the checkpoint '" + dir.path().string() + "' is damaged:\n"));
  EXPECT_THAT(message, HasSubstr("\n  cut has 7 bytes, the manifest says 8"));
  EXPECT_THAT(message, HasSubstr("\n  changed has xxh3 "));
  EXPECT_THAT(message, HasSubstr("\n  gone: No such file or directory"));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("whole")));
  const std::string sizes = message_of<CheckpointError>([&] { verify(dir.path(), manifest, {.digests = false}); });
  EXPECT_THAT(sizes, ::testing::Not(HasSubstr("changed")));
}

}  // namespace
}  // namespace fulgur
