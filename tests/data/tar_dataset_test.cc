#include "fulgur/data/files/tar_dataset.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <fstream>
#include <future>
#include <latch>
#include <stdexcept>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/data/files/tar_index.h"
#include "tests/testing/errors.h"
#include "tests/testing/largest_allocation.h"
#include "tests/testing/temp_dir.h"

// Archives of Python's tarfile are read in files_test.py; here they are made by hand, mostly wrong.
namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

void put(std::string& block, size_t place, const std::string& text) { block.replace(place, text.size(), text); }

std::string with_sum(std::string block) {
  put(block, 148, "        ");
  int64_t sum = 0;
  for (const char c : block) sum += static_cast<uint8_t>(c);
  put(block, 148, fmt::format("{:06o}", sum) + std::string("\0 ", 2));
  return block;
}

// A header and the content; `num_bytes`: what the header says of its size.
std::string entry(const std::string& path, const std::string& content, char type = '0', int64_t num_bytes = -1) {
  std::string block(512, '\0');
  put(block, 0, path.substr(0, 100));
  put(block, 124, fmt::format("{:011o}", num_bytes < 0 ? std::ssize(content) : num_bytes));
  block[156] = type;
  put(block, 257,
      std::string("ustar\0"
                  "00",
                  8));
  return with_sum(block) + content + std::string((512 - content.size() % 512) % 512, '\0');
}

const std::string kEnd(1024, '\0');

std::vector<std::string> paths(const std::string& archive) {
  std::vector<std::string> found;
  for (const TarEntry& each : read_tar_index(archive, "a.tar")) found.push_back(each.path);
  return found;
}

std::string refusal(const std::string& archive) {
  const testing::LargestAllocation allocated;
  std::string message = testing::message_of<std::runtime_error>([&] { read_tar_index(archive, "a.tar"); });
  EXPECT_LT(allocated.sum_of_all(), 4'000 + 2 * archive.size());
  EXPECT_THAT(message, ::testing::StartsWith("a.tar: "));
  return message.substr(std::min<size_t>(message.size(), 7));
}

TEST(TarIndex, FindsTheFilesAndTheirBytes) {
  const std::string archive = entry("a", "", '5') + entry("./a/1.txt", "one") + entry("2.txt", std::string(512, 'x')) +
                              entry("3.txt", "") + kEnd;
  const auto entries = read_tar_index(archive, "a.tar");
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_THAT(paths(archive), ElementsAre("a/1.txt", "2.txt", "3.txt"));
  EXPECT_EQ(archive.substr(static_cast<size_t>(entries[0].begin), static_cast<size_t>(entries[0].num_bytes)), "one");
  EXPECT_EQ(entries[1].begin, 4 * 512);
  EXPECT_EQ(entries[2].num_bytes, 0);
  EXPECT_TRUE(read_tar_index(kEnd, "a.tar").empty());
}

TEST(TarIndex, AFolderHasNoBlocksWhateverItsSizeIs) {
  EXPECT_THAT(paths(entry("a", "", '5', 4096) + entry("a/1.txt", "one") + kEnd), ElementsAre("a/1.txt"));
  EXPECT_THAT(paths(entry("pax", "13 size=4096\n", 'x') + entry("a", "", '5') + entry("a/1.txt", "one") + kEnd),
              ElementsAre("a/1.txt"));
}

TEST(TarIndex, ALongTargetOfALinkIsPassedOverAndTheLinkRefused) {
  EXPECT_EQ(refusal(entry("././@LongLink", std::string(200, 't') + '\0', 'K') + entry("a", "", '2') + kEnd),
            "its entry 'a' is no file but of type '2' (1 and 2 are links); pack it with --dereference");
}

TEST(TarIndex, ReadsLongPathsAndLargeSizes) {
  const std::string path = std::string(150, 'd') + "/" + std::string(120, 'f') + ".txt";
  EXPECT_THAT(paths(entry("././@LongLink", path + '\0', 'L') + entry("short", "x") + kEnd), ElementsAre(path));
  EXPECT_THAT(paths(entry("pax", "13 path=é.a\n", 'x') + entry("other", "x") + entry("b", "") + kEnd),
              ElementsAre("é.a", "b"));
  EXPECT_THAT(paths(entry("global", "19 comment=whatever\n", 'g').replace(512, 20, "20 comment=whatever\n") +
                    entry("a", "x") + kEnd),
              ElementsAre("a"));
  std::string prefixed = entry("name", "x");
  put(prefixed, 345, "folder");
  EXPECT_THAT(paths(with_sum(prefixed.substr(0, 512)) + prefixed.substr(512) + kEnd), ElementsAre("folder/name"));
  std::string binary = entry("a", "xyz");
  put(binary, 124, std::string("\x80\0\0\0\0\0\0\0\0\0\0\3", 12));
  EXPECT_EQ(read_tar_index(with_sum(binary.substr(0, 512)) + binary.substr(512) + kEnd, "a")[0].num_bytes, 3);
}

TEST(TarIndex, RefusesWhatIsNoWholeArchive) {
  const std::string no_end =
      "it ends without the blocks of zeros that end an archive: it is cut off, or no tar archive";
  EXPECT_EQ(refusal(""), no_end);
  EXPECT_EQ(refusal(entry("a", "x")), no_end);
  EXPECT_EQ(refusal(entry("a", std::string(2000, 'x')).substr(0, 1500)),
            "it is cut off: 'a' has 2000 bytes, but 988 follow");
  EXPECT_EQ(refusal(entry("a", "x", '0', 1L << 32) + kEnd), "it is cut off: 'a' has 4294967296 bytes, but 1536 follow");
  EXPECT_EQ(refusal(entry("a", "x", 'L', 1L << 32) + kEnd),
            "it is cut off: a long name has 4294967296 bytes, but 1536 follow");
  EXPECT_EQ(refusal(std::string(2048, 'x')), "a number in a header is not octal: it is no tar archive, or damaged");
  std::string changed = entry("a", "x") + kEnd;
  changed[0] = 'b';
  EXPECT_EQ(refusal(changed), "the checksum of a header in it is wrong: it is no tar archive, or damaged");
  for (const auto& [size, message] : {std::pair{std::string(12, '\xff'), "a size in it is negative"},
                                      std::pair{"\x80" + std::string(11, '\xff'), "a size in it is too large"}}) {
    std::string binary = entry("a", "x");
    put(binary, 124, size);
    EXPECT_EQ(refusal(with_sum(binary.substr(0, 512)) + kEnd), message);
  }
}

TEST(TarIndex, RefusesBytesAfterTheEnd) {
  const std::string file = entry("a", "x"), hole(512, '\0');
  EXPECT_THAT(paths(file + kEnd + std::string(9000, '\0')), ElementsAre("a"));
  const auto expected = [](int64_t next, int64_t end) {
    return fmt::format(
        "it has bytes at {} after the block of zeros at {}, which ends an archive: a part was overwritten by zeros, or "
        "several archives are in one file; copy it anew, or give each archive a file of its own",
        next, end);
  };
  EXPECT_EQ(refusal(file + kEnd + entry("b", "y") + kEnd), expected(2048, 1024));
  EXPECT_EQ(refusal(file + hole + entry("b", "y").substr(512) + entry("c", "z") + kEnd), expected(1536, 1024));
}

TEST(TarIndex, RefusesPathsAndTypesThatAreNoFilesOfTheArchive) {
  EXPECT_EQ(refusal(entry("../a", "x") + kEnd), "its entry '../a' has a path that leaves the archive");
  EXPECT_EQ(refusal(entry("b/../../a", "x") + kEnd), "its entry 'b/../../a' has a path that leaves the archive");
  EXPECT_EQ(refusal(entry("/etc/a", "x") + kEnd), "its entry '/etc/a' has a path that leaves the archive");
  EXPECT_EQ(refusal(entry("a", "x") + entry("./a", "y") + kEnd), "its entry 'a' is there twice");
  EXPECT_EQ(refusal(entry("a", "", '2') + kEnd),
            "its entry 'a' is no file but of type '2' (1 and 2 are links); pack it with --dereference");
  const std::string sparse = "it has a sparse file, whose holes are not stored; pack it without";
  EXPECT_EQ(refusal(entry("a", "", 'S') + kEnd), sparse);
  EXPECT_EQ(refusal(entry("pax", "22 GNU.sparse.major=1\n", 'x') + entry("a", "") + kEnd), sparse);
}

TEST(TarIndex, RefusesDamagedPaxHeaders) {
  for (const std::string records : {"x", "99 path=a\n", "2 ", "9 path=ab", "7 path\n", "18446744073709551616 a=b\n"}) {
    EXPECT_EQ(refusal(entry("pax", records, 'x') + kEnd), "a pax header in it is damaged") << records;
  }
  EXPECT_EQ(refusal(entry("pax", "11 size=-1\n", 'x') + kEnd), "a pax header in it has a size that is no number");
  EXPECT_EQ(refusal(entry("pax", "20 size=99999999999\n", 'x') + entry("a", "x") + kEnd),
            "it is cut off: 'a' has 99999999999 bytes, but 1536 follow");
}

class TarDatasetTest : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    const auto file = folder_.path() / name;
    std::ofstream(file, std::ios::binary) << bytes;
    return file;
  }

  // `mode` is one of gzopen(): "wb0" does not compress, "ab" appends a member.
  std::filesystem::path write_gz(const std::string& name, const std::string& bytes, const char* mode = "wb") const {
    const auto file = folder_.path() / name;
    gzFile gz = ::gzopen(file.c_str(), mode);
    ::gzwrite(gz, bytes.data(), static_cast<unsigned>(bytes.size()));
    ::gzclose(gz);
    return file;
  }

  testing::TempDir folder_;
  Random random_{0};
};

std::string shard(int first) {
  return entry(fmt::format("x/{}.jpg", first), "pic") + entry(fmt::format("x/{}.cls", first), std::to_string(first)) +
         entry(fmt::format("x/{}.seg.png", first), "mask") + entry("x/README", "none") + entry("x/.hidden", "none") +
         entry(fmt::format("x/{}.jpg", first + 1), "pig") + entry(fmt::format("x/{}.cls", first + 1), "-7\n") + kEnd;
}

TEST_F(TarDatasetTest, ASampleHasTheFilesOfOneBasename) {
  const auto dataset = TarDataset::make({write("a.tar", shard(3)), write("b.tar", shard(8))});
  EXPECT_EQ(dataset->size(), 4);
  EXPECT_THAT(dataset->shard_sizes(), ElementsAre(2, 2));
  EXPECT_EQ(dataset->sample(2).key(), "x/8");
  const Batch sample = dataset->get(2, random_);
  EXPECT_EQ(sample.size(), 3u);
  EXPECT_TRUE(sample["jpg"].equal(at::tensor({'p', 'i', 'c'}, at::kByte)));
  EXPECT_EQ(sample["cls"].item<int64_t>(), 8);
  EXPECT_EQ(sample["seg.png"].numel(), 4);
  EXPECT_EQ(dataset->sample(1).number("cls"), -7);
  EXPECT_NE(dataset->digest(), TarDataset::make({folder_.path() / "a.tar"})->digest());
}

TEST_F(TarDatasetTest, TheUsersDecoderMakesTheSamples) {
  const auto decode = [](const TarSample& sample, Random& random) {
    return Batch{{"first", at::scalar_tensor(sample.text("jpg")[0] + random.below(1), at::kLong)},
                 {"label", at::scalar_tensor(sample.number("cls"), at::kLong)}};
  };
  const auto dataset = TarDataset::make({write("a.tar", shard(3))}, decode);
  std::vector<Random> random{Random(1), Random(2)};
  const Batch batch = dataset->get_batch(at::tensor({1, 0}, at::kLong), random);
  EXPECT_TRUE(batch["label"].equal(at::tensor({-7, 3}, at::kLong)));
  EXPECT_TRUE(batch["first"].equal(at::tensor({'p', 'p'}, at::kLong)));
}

TEST_F(TarDatasetTest, ACompressedShardIsUnpackedOnce) {
  const std::string bytes = shard(3);
  const auto file = write_gz("a.tar.gz", bytes), cache = folder_.path() / "cache";
  const auto dataset = TarDataset::make({file}, undecoded, {.cache = cache});
  EXPECT_EQ(dataset->get(0, random_)["cls"].item<int64_t>(), 3);
  const auto unpacked = std::filesystem::directory_iterator(cache)->path();
  EXPECT_EQ(testing::read_file(unpacked), bytes);
  const auto written = std::filesystem::last_write_time(unpacked);
  TarDataset::make({file}, undecoded, {.cache = cache});
  EXPECT_EQ(std::filesystem::last_write_time(unpacked), written);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(cache), {}), 1);

  std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  EXPECT_EQ(testing::message_of<std::runtime_error>([&] { TarDataset::make({file}, undecoded, {.cache = cache}); }),
            file.string() + ": it cannot be unpacked: truncated gzip input");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(cache), {}), 1);
  EXPECT_EQ(testing::message_of<UsageError>([&] { TarDataset::make({file}); }),
            "'" + file.string() +
                "' is not named .tar, so it must be a compressed archive; give `cache`, a folder into which it is "
                "unpacked once, or unpack it yourself");
}

TEST_F(TarDatasetTest, AChangedByteOfAGzipIsNoticed) {
  const auto cache = folder_.path() / "cache";
  const auto refusal = [&](const std::string& name, const std::string& bytes) {
    const auto file = write(name, bytes);
    const std::string message =
        testing::message_of<std::runtime_error>([&] { TarDataset::make({file}, undecoded, {.cache = cache}); });
    EXPECT_TRUE(std::filesystem::is_empty(cache)) << "nothing damaged is kept";
    return message.substr(std::min(message.size(), file.string().size()));
  };
  const std::string whole = testing::read_file(write_gz("a.tar.gz", shard(3), "wb0"));
  std::string changed = whole;
  changed[changed.find("pic")] ^= 1;
  EXPECT_EQ(refusal("b.tar.gz", changed),
            ": it cannot be unpacked: it is damaged (incorrect data check); copy or pack it anew");
  changed = whole;
  changed.back() ^= 1;  // in the length
  EXPECT_EQ(refusal("c.tar.gz", changed),
            ": it cannot be unpacked: it is damaged (incorrect length check); copy or pack it anew");
  EXPECT_EQ(refusal("d.tar.gz", whole.substr(0, whole.size() - 3)), ": it cannot be unpacked: truncated gzip input");
  EXPECT_EQ(refusal("e.tar.gz", whole + "xyz"),
            ": it cannot be unpacked: it is damaged (incorrect header check); copy or pack it anew");
}

TEST_F(TarDatasetTest, SeveralMembersOfAGzipAreOneFile) {
  const std::string bytes = shard(3) + std::string(3 << 20, '\0');  // larger than the buffers
  write_gz("a.tar.gz", bytes.substr(0, 700));
  const auto file = write_gz("a.tar.gz", bytes.substr(700), "ab"), cache = folder_.path() / "cache";
  std::ofstream(file, std::ios::binary | std::ios::app) << std::string(2 << 20, '\0');  // fills up a block of a tape
  EXPECT_EQ(TarDataset::make({file}, undecoded, {.cache = cache})->get(1, random_)["cls"].item<int64_t>(), -7);
  EXPECT_EQ(testing::read_file(std::filesystem::directory_iterator(cache)->path()), bytes);
}

TEST_F(TarDatasetTest, SeveralMayUnpackAShardAtOnce) {
  std::string bytes;
  for (int i = 0; i < 100; ++i) bytes += entry(fmt::format("{}.bin", i), std::string(100'000, static_cast<char>(i)));
  const auto file = write_gz("a.tar.gz", bytes + kEnd), cache = folder_.path() / "cache";
  std::latch start(4);
  std::vector<std::future<int64_t>> sizes;
  for (int i = 0; i < 4; ++i) {
    sizes.push_back(std::async(std::launch::async, [&] {
      start.arrive_and_wait();
      return TarDataset::make({file}, undecoded, {.cache = cache})->size();
    }));
  }
  for (auto& size : sizes) EXPECT_EQ(size.get(), 100);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(cache), {}), 1);
}

TEST_F(TarDatasetTest, ErrorsNameTheShardAndTheSample) {
  const auto file = write("a.tar", shard(3));
  const auto dataset = TarDataset::make({file});
  EXPECT_EQ(testing::message_of<std::runtime_error>([&] { dataset->sample(0).bytes("jpeg"); }),
            file.string() + ": sample 'x/3': unknown file 'jpeg'; did you mean 'jpg'? known: jpg, cls, seg.png");
  EXPECT_EQ(testing::message_of<std::runtime_error>([&] { dataset->sample(0).number("jpg"); }),
            file.string() + ": file 'jpg' of sample 'x/3' is no whole number: 'pic'");
  EXPECT_THROW(dataset->get(2, random_), c10::IndexError);
  const auto none = write("none.tar", entry("README", "x") + kEnd);
  EXPECT_EQ(testing::message_of<std::runtime_error>([&] { TarDataset::make({none}); }),
            none.string() + ": it has no sample");
  EXPECT_EQ(testing::message_of<UsageError>([] { TarDataset::make({}); }), "TarDataset: no shard is given");
  EXPECT_EQ(testing::message_of<UsageError>([&] { TarDataset::make({file}, TarDecoder()); }),
            "TarDataset: the decoder is an empty function");
  EXPECT_THAT(testing::message_of<std::runtime_error>([&] { TarDataset::make({folder_.path() / "x.tar"}); }),
              HasSubstr("No such file"));
}

}  // namespace
}  // namespace fulgur
