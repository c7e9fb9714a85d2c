#include "fulgur/data/images/exif.h"

#include <gtest/gtest.h>

#include <string>

namespace {

using fulgur::exif_orientation;
using namespace std::string_literals;

int orientation_of(const std::string& jpeg) {
  return exif_orientation({reinterpret_cast<const uint8_t*>(jpeg.data()), jpeg.size()});
}

std::string segment(char marker, const std::string& content) {
  const size_t length = content.size() + 2;
  return "\xff"s + marker + static_cast<char>(length >> 8) + static_cast<char>(length) + content;
}

const std::string kBegin = "\xff\xd8", kScan = segment('\xda', std::string(10, '\0'));

std::string big_endian(char orientation) {
  return "Exif\0\0MM\0\x2a\0\0\0\x08\0\x02"s   // two entries
         "\x01\x0f\0\x02\0\0\0\x04"s           // the maker, four letters
         "abc\0\x01\x12\0\x03\0\0\0\x01\0"s +  // the orientation, one short number
         orientation +
         "\0\0\0\0\0\0"s;
}

std::string little_endian(char orientation) {
  return "Exif\0\0II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0"s + orientation + "\0\0\0\0\0\0\0"s;
}

TEST(Exif, BothByteOrdersAreRead) {
  for (char orientation = 1; orientation <= 8; ++orientation) {
    EXPECT_EQ(orientation_of(kBegin + segment('\xe1', big_endian(orientation)) + kScan), orientation);
    EXPECT_EQ(orientation_of(kBegin + segment('\xe1', little_endian(orientation)) + kScan), orientation);
  }
}

TEST(Exif, OtherSegmentsAndFillBytesBeforeItArePassed) {
  const std::string before = segment('\xe0', "JFIF") + segment('\xe1', "http://ns.adobe.com/xap/1.0/") + "\xff\xff";
  EXPECT_EQ(orientation_of(kBegin + before + segment('\xe1', big_endian(6)) + kScan), 6);
}

TEST(Exif, WhatFollowsTheFirstScanIsNotRead) {
  EXPECT_EQ(orientation_of(kBegin + kScan + segment('\xe1', big_endian(6))), 1);
}

TEST(Exif, NothingThatCanBeUnderstoodIsUpright) {
  for (const std::string& exif : {
           "Exif\0\0"s,
           "Exif\0\0MM"s,
           big_endian(0),
           big_endian(9),
           "Exif\0\0MM\0\x2b\0\0\0\x08"s,                                          // another version
           "Exif\0\0MM\0\x2a\xff\xff\xff\xff\0\x01"s,                              // the entries lie outside
           "Exif\0\0MM\0\x2a\0\0\0\x08\xff\xff"s,                                  // more entries than there are bytes
           "Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x04\0\0\0\x01\0\0\0\x06"s,  // a number of another type
       }) {
    EXPECT_EQ(orientation_of(kBegin + segment('\xe1', exif) + kScan), 1);
  }
  EXPECT_EQ(orientation_of(""), 1);
  EXPECT_EQ(orientation_of(kBegin), 1);
  EXPECT_EQ(orientation_of(kBegin + "\xff\xe1\0\0"s), 1);      // a length that does not count itself
  EXPECT_EQ(orientation_of(kBegin + "\xff\xe1\xff\xff"s), 1);  // a segment that is longer than the file
}

TEST(Exif, EveryCutOfAFileIsUprightOrTurned) {
  const std::string whole = kBegin + segment('\xe1', big_endian(6)) + kScan;
  for (size_t length = 0; length <= whole.size(); ++length) {
    const int orientation = orientation_of(whole.substr(0, length));
    EXPECT_TRUE(orientation == 1 || orientation == 6) << length;
  }
}

}  // namespace
