#include "fulgur/checkpoint/formats/zip_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;

template <class T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// A zip file with one stored entry of 4 bytes, whose sizes stand in a zip64 field, as libtorch writes all of its
// entries.
std::string zip64(uint64_t claimed_bytes) {
  const std::string name = "a/data.pkl", content = "abcd";
  std::string zip;
  const auto append_entry = [&](bool is_central) {
    append<uint32_t>(zip, is_central ? 0x02014b50 : 0x04034b50);
    if (is_central) append<uint16_t>(zip, 45);                                   // version that made it
    for (const uint16_t field : {45, 0, 0, 0, 0}) append<uint16_t>(zip, field);  // version, flags, stored, time, date
    append<uint32_t>(zip, 0);                                                    // CRC
    append<uint32_t>(zip, 0xffffffff);                                           // compressed and whole size: zip64
    append<uint32_t>(zip, 0xffffffff);
    append<uint16_t>(zip, static_cast<uint16_t>(name.size()));
    append<uint16_t>(zip, 20);  // bytes of the extra field
    if (is_central) {
      for (int i = 0; i < 3; ++i) append<uint16_t>(zip, 0);  // comment, disk, attributes
      append<uint32_t>(zip, 0);                              // attributes
      append<uint32_t>(zip, 0);                              // place of the entry
    }
    zip += name;
    append<uint16_t>(zip, 1);
    append<uint16_t>(zip, 16);
    append<uint64_t>(zip, claimed_bytes);
    append<uint64_t>(zip, claimed_bytes);
  };
  append_entry(/*is_central=*/false);
  zip += content;
  const auto directory = static_cast<uint32_t>(zip.size());
  append_entry(/*is_central=*/true);
  const auto directory_bytes = static_cast<uint32_t>(zip.size()) - directory;
  append<uint32_t>(zip, 0x06054b50);
  for (const uint16_t field : {0, 0, 1, 1}) append<uint16_t>(zip, field);
  append<uint32_t>(zip, directory_bytes);
  append<uint32_t>(zip, directory);
  append<uint16_t>(zip, 0);
  return zip;
}

void check(const std::string& zip) {
  const auto read = [&](uint64_t begin, uint64_t num_bytes) { return zip.substr(begin, num_bytes); };
  check_zip_directory(read, zip.size(), "model.pt");
}

TEST(ZipDirectory, ReadsTheSizesOfZip64) {
  check(zip64(4));
  for (const uint64_t claimed : {uint64_t{1} << 20, uint64_t{1} << 40, ~uint64_t{0}}) {
    EXPECT_THAT(testing::message_of<CheckpointError>([&] { check(zip64(claimed)); }), HasSubstr("model.pt")) << claimed;
  }
}

}  // namespace
}  // namespace fulgur
