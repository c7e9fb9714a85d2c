#include "fulgur/data/files/npy.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/data/files/array_dataset.h"
#include "fulgur/data/files/npy_header.h"
#include "tests/testing/errors.h"
#include "tests/testing/largest_allocation.h"
#include "tests/testing/temp_dir.h"

// Files of numpy itself are read in files_test.py; here they are made by hand, mostly wrong.
namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
void append(std::string& bytes, T value) {
  bytes += bytes_of<T>({value});
}

std::string npy(const std::string& dictionary, const std::string& data = "") {
  std::string file = "\x93NUMPY\x01";
  file += '\0';
  append(file, static_cast<uint16_t>(dictionary.size()));
  return file + dictionary + data;
}

std::string npy_of(const std::string& dtype, const std::string& shape, const std::string& data) {
  return npy(fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}\n", dtype, shape), data);
}

struct ZipPart {
  std::string name, stored;
  uint16_t method = 0;
  uint32_t num_bytes = 0, crc = 0;
  uint16_t flags = 0;
};

uint32_t crc_of(const std::string& bytes) {
  return static_cast<uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<uInt>(bytes.size())));
}

ZipPart stored(const std::string& name, const std::string& bytes) {
  return {.name = name, .stored = bytes, .num_bytes = static_cast<uint32_t>(bytes.size()), .crc = crc_of(bytes)};
}

ZipPart deflated(const std::string& name, const std::string& bytes) {
  z_stream stream{};
  ::deflateInit2(&stream, 9, Z_DEFLATED, -MAX_WBITS, 9, Z_DEFAULT_STRATEGY);
  std::string out(::deflateBound(&stream, bytes.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  ::deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  ::deflateEnd(&stream);
  ZipPart part = stored(name, bytes);
  part.stored = out;
  part.method = 8;
  return part;
}

std::string zip(const std::vector<ZipPart>& parts) {
  std::string file, directory;
  for (const ZipPart& part : parts) {
    const auto begin = static_cast<uint32_t>(file.size());
    const auto append_common = [&](std::string& to) {
      for (const int field : {20, int{part.flags}, int{part.method}, 0, 0}) append(to, static_cast<uint16_t>(field));
      append(to, part.crc);
      append(to, static_cast<uint32_t>(part.stored.size()));
      append(to, part.num_bytes);
      append(to, static_cast<uint16_t>(part.name.size()));
      append(to, uint16_t{0});
    };
    append<uint32_t>(file, 0x04034b50);
    append_common(file);
    file += part.name + part.stored;
    append<uint32_t>(directory, 0x02014b50);
    append<uint16_t>(directory, 20);
    append_common(directory);
    directory.append(10, '\0');
    append(directory, begin);
    directory += part.name;
  }
  const auto begin = static_cast<uint32_t>(file.size());
  file += directory;
  append<uint32_t>(file, 0x06054b50);
  append<uint32_t>(file, 0);
  for (int i = 0; i < 2; ++i) append(file, static_cast<uint16_t>(parts.size()));
  append(file, static_cast<uint32_t>(directory.size()));
  append(file, begin);
  append<uint16_t>(file, 0);
  return file;
}

class Npy : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes) const {
    const auto file = folder_.path() / name;
    std::ofstream(file, std::ios::binary) << bytes;
    return file.string();
  }

  // What is wrong with the file, without its name.
  std::string refusal(const std::string& name, const std::string& bytes) const {
    const std::string file = write(name, bytes);
    const testing::LargestAllocation allocated;
    std::string message = testing::message_of<std::runtime_error>([&] { read_arrays(file); });
    EXPECT_LT(allocated.num_bytes(), 4'000 + 4 * bytes.size());
    EXPECT_THAT(message, ::testing::StartsWith(file + ": ")) << message;
    return message.substr(std::min(message.size(), file.size() + 2));
  }

  testing::TempDir folder_;
};

TEST_F(Npy, AnArrayIsAViewOfTheFileInEitherOrder) {
  const std::string data = bytes_of<float>({1, 2, 3, 4, 5, 6});
  std::string dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
  dictionary.resize(118, ' ');  // aligned, as numpy writes it
  const at::Tensor c = read_npy(write("c.npy", npy(dictionary, data)));
  EXPECT_TRUE(c.equal(at::arange(1, 7, at::kFloat).view({2, 3})));
  EXPECT_TRUE(c.is_contiguous());
  dictionary.replace(dictionary.find("False"), 5, "True ");
  const at::Tensor fortran = read_npy(write("f.npy", npy(dictionary, data)));
  EXPECT_TRUE(fortran.equal(at::arange(1, 7, at::kFloat).view({3, 2}).t()));
  EXPECT_THAT(fortran.strides(), ElementsAre(1, 2));

  const testing::LargestAllocation allocated;
  read_npy(folder_.path() / "c.npy");
  EXPECT_LT(allocated.num_bytes(), 1'000u);
}

TEST_F(Npy, SizesMayBeLongsOfPython2) {
  EXPECT_THAT(read_npy(write("a.npy", npy_of("<i8", "(2L, 1L)", bytes_of<int64_t>({7, 8})))).sizes(),
              ElementsAre(2, 1));
}

TEST_F(Npy, AnArrayOutlivesItsFile) {
  const std::string file = write("a.npy", npy_of("<i8", "(3,)", bytes_of<int64_t>({7, 8, 9})));
  const at::Tensor array = read_npy(file);
  std::filesystem::remove(file);
  EXPECT_EQ(array.sum().item<int64_t>(), 24);
}

TEST_F(Npy, RefusesWhatIsNoArrayOfNumbers) {
  const auto of = [&](const std::string& dictionary) { return refusal("a.npy", npy(dictionary)); };
  EXPECT_EQ(refusal("a.npy", ""), "it is no .npy file");
  EXPECT_EQ(refusal("a.npy", "PK\x03\x04 and more"), "it is no .npy file");
  EXPECT_EQ(refusal("a.npy", "\x93NUMPY\x01"), "its header is cut off");
  EXPECT_EQ(refusal("a.npy", "\x93NUMPY\x09\x01\x01\x01\x01\x01"), "it has format 9; 1, 2 and 3 are known");
  EXPECT_EQ(refusal("a.npy", npy_of("<f4", "(3,)", "").substr(0, 30)), "its header is cut off");
  EXPECT_EQ(refusal("a.npy", std::string("\x93NUMPY\x02\0\xff\xff\xff\xff", 12)),
            "its header of 4294967295 bytes is longer than 65536");
  EXPECT_EQ(refusal("a.npy", npy_of("|O", "(3,)", "\x80\x04")),
            "it holds Python objects, a pickle that could run code; save an array of numbers instead");
  EXPECT_EQ(refusal("a.npy", npy_of(">f4", "(1,)", "abcd")),
            "its dtype '>f4' is big-endian; save array.astype('<f4') instead");
  EXPECT_EQ(refusal("a.npy", npy_of("f4", "(1,)", "abcd")),
            "its dtype 'f4' is none that torch has; convert it with array.astype()");
  EXPECT_EQ(refusal("a.npy", npy_of("|f4", "(1,)", "abcd")), "its dtype '|f4' has no byte order");
  EXPECT_EQ(refusal("a.npy", npy_of("<U1", "(1,)", "abcd")),
            "its dtype '<U1' is none that torch has; convert it with array.astype()");
  EXPECT_EQ(of("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }"),
            "its elements are records of several fields; save each field as an array of its own");
  EXPECT_EQ(of("{'descr': '<f4', 'shape': (0,)}"), "its header lacks one of 'descr', 'fortran_order' and 'shape'");
  EXPECT_EQ(of("{'descr': '<f4', 'descr': '<f4'}"), "its header has an unknown or second key 'descr'");
  EXPECT_EQ(of("{'fortran_order': 1}"), "its 'fortran_order' is neither True nor False");
  EXPECT_EQ(of("{'shape': (-1,)}"), "its shape has something that is no size");
  EXPECT_EQ(of("{'shape': 3}"), "its header has no '(' where numpy writes one");
  EXPECT_EQ(of("{'descr': '<f4"), "its header ends within a text");
  EXPECT_EQ(of("os.system('x')"), "its header has no '{' where numpy writes one");
}

TEST_F(Npy, RefusesAShapeThatTheFileDoesNotHave) {
  EXPECT_EQ(refusal("a.npy", npy_of("<f4", "(2, 3)", std::string(20, 'x'))),
            "its shape takes 24 bytes, but 20 follow the header");
  EXPECT_EQ(refusal("a.npy", npy_of("<f4", "(2, 3)", std::string(28, 'x'))),
            "its shape takes 24 bytes, but 28 follow the header");
  EXPECT_EQ(refusal("a.npy", npy_of("<f4", "(1099511627776,)", "")),
            "its shape takes 4398046511104 bytes, but 0 follow the header");
  EXPECT_EQ(refusal("a.npy", npy_of("<f4", "(4611686018427387904, 4)", "")), "its shape is too large");
  EXPECT_EQ(refusal("a.npy", npy_of("<f4", "(0, 4611686018427387904, 4)", "")), "its shape is too large");
  std::string dimensions;
  for (int i = 0; i < 65; ++i) dimensions += "1, ";
  EXPECT_EQ(refusal("a.npy", npy_of("<f4", "(" + dimensions + ")", "")), "its shape has more than 64 dimensions");
}

TEST_F(Npy, ReadsStoredAndDeflatedEntries) {
  const std::string a = npy_of("<i4", "(2,)", bytes_of<int32_t>({3, 4}));
  const std::string b = npy_of("|u1", "(300000,)", std::string(300'000, 'b'));
  const NamedTensors arrays = read_npz(write("x.npz", zip({stored("a.npy", a), deflated("b.npy", b)})));
  ASSERT_EQ(arrays.size(), 2u);
  EXPECT_EQ(arrays[0].first, "a");
  EXPECT_TRUE(arrays[0].second.equal(at::arange(3, 5, at::kInt)));
  EXPECT_EQ(arrays[1].first, "b");
  EXPECT_EQ(arrays[1].second.eq('b').sum().item<int64_t>(), 300'000);
}

TEST_F(Npy, RefusesDamagedArchives) {
  const std::string a = npy_of("|u1", "(4,)", "abcd");
  const auto of = [&](const std::vector<ZipPart>& parts) { return refusal("x.npz", zip(parts)); };
  const auto changed = [&](ZipPart part, auto change) {
    change(part);
    return refusal("x.npz", zip({part}));
  };
  EXPECT_EQ(refusal("x.npz", "no zip, but long enough for the end of one"), "it is no zip file");
  EXPECT_EQ(of({stored("../a.npy", a)}), "its entry '../a.npy' has a path that leaves the archive");
  EXPECT_EQ(of({stored("/a.npy", a)}), "its entry '/a.npy' has a path that leaves the archive");
  EXPECT_EQ(of({stored("a.txt", a)}), "its entry 'a.txt' is no .npy file");
  EXPECT_EQ(of({stored("a.npy", a), stored("a.npy", a)}), "its entry 'a.npy' is there twice");
  EXPECT_EQ(
      of({stored("a.npy", npy_of("|O", "(1,)", "x"))}),
      "its entry 'a.npy': it holds Python objects, a pickle that could run code; save an array of numbers instead");
  EXPECT_EQ(changed(stored("a.npy", a), [](ZipPart& part) { part.stored.back() = 'x'; }),
            "its entry 'a.npy' is damaged: its CRC-32 is another one");
  EXPECT_EQ(changed(deflated("a.npy", a), [](ZipPart& part) { ++part.crc; }),
            "its entry 'a.npy' is damaged: its CRC-32 is another one");
  EXPECT_EQ(changed(deflated("a.npy", a), [](ZipPart& part) { part.stored[0] = '\xff'; }),
            "its entry 'a.npy' is damaged: it cannot be inflated");
  EXPECT_EQ(changed(deflated("a.npy", a), [](ZipPart& part) { part.num_bytes = 0x7fffffff; }),
            "its entry 'a.npy' claims 2147483647 bytes, more than deflate makes of " +
                std::to_string(deflated("a.npy", a).stored.size()));
  EXPECT_EQ(changed(deflated("a.npy", a), [](ZipPart& part) { part.num_bytes += 1; }),
            "its entry 'a.npy' has fewer bytes than the directory says");
  EXPECT_EQ(changed(deflated("a.npy", a + "more"), [&](ZipPart& part) { part.num_bytes = a.size(); }),
            "its entry 'a.npy' has more bytes than the directory says");
  EXPECT_EQ(changed(stored("a.npy", a), [](ZipPart& part) { part.num_bytes += 1; }),
            "its entry 'a.npy' is stored, but has two sizes");
  EXPECT_EQ(changed(stored("a.npy", a), [](ZipPart& part) { part.method = 12; }),
            "its entry 'a.npy' is compressed by method 12; 0 (stored) and 8 (deflate) are known");
  EXPECT_EQ(changed(stored("a.npy", a), [](ZipPart& part) { part.flags = 1; }), "its entry 'a.npy' is encrypted");
  std::string moved = zip({stored("a.npy", a)});
  moved[0] = 'X';
  EXPECT_EQ(refusal("x.npz", moved), "its entry 'a.npy' is not where the directory says");
  const std::string cut = zip({stored("a.npy", a)});
  EXPECT_EQ(refusal("x.npz", cut.substr(10)), "its directory is damaged");
  EXPECT_EQ(refusal("x.npz", cut.substr(cut.size() - 22)), "its directory is outside of it");
}

TEST_F(Npy, ADatasetJoinsTheArraysOfItsFiles) {
  const auto images = write("images.npy", npy_of("<i2", "(3, 2)", bytes_of<int16_t>({0, 1, 10, 11, 20, 21})));
  const auto labels = write("labels.npz", zip({deflated("label.npy", npy_of("|u1", "(3,)", "abc"))}));
  const auto dataset = ArrayDataset::make({images, labels});
  EXPECT_EQ(dataset->size(), 3);
  const Batch batch = dataset->get_batch(at::arange(2, -1, -2, at::kLong), {});
  EXPECT_TRUE(batch["images"].equal(at::tensor({20, 21, 0, 1}, at::kShort).view({2, 2})));
  EXPECT_EQ(batch["label"][1].item<int64_t>(), 'a');
  EXPECT_NE(dataset->digest(), ArrayDataset::make({images})->digest());
}

TEST_F(Npy, ADatasetHandsOutEveryDtype) {
  const at::Tensor indices = at::tensor({2, 0, 2}, at::kLong), numbers = at::tensor({1, 0, 3, 2, 5, 4}, at::kLong);
  for (const std::string dtype :
       {"|b1", "|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"}) {
    const std::string data(static_cast<size_t>(6 * std::stoi(dtype.substr(2))), '\1');
    const auto dataset = ArrayDataset::make({write("flat.npy", npy_of(dtype, "(3,)", data.substr(0, data.size() / 2))),
                                             write("rows.npy", npy_of(dtype, "(3, 2)", data))});
    for (const auto& [name, array] : dataset->samples()) {
      array.copy_(numbers.narrow(0, 0, array.numel()).view(array.sizes()));  // never reaches the file
      const at::Tensor found = dataset->get_batch(indices, {})[name];
      EXPECT_EQ(found.scalar_type(), array.scalar_type());
      const at::Tensor expected = array.to(at::kComplexDouble).index_select(0, indices);
      EXPECT_TRUE(found.to(at::kComplexDouble).equal(expected)) << dtype << " " << name;
    }
  }
}

TEST_F(Npy, ADatasetHandsOutEveryDtypeOfSafetensors) {
  NamedTensors tensors;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kUInt16, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    tensors.emplace_back(c10::toString(dtype), at::tensor({1., 2., 4.}).to(dtype));
  }
  const auto file = folder_.path() / "a.safetensors";
  write_safetensors(file, tensors);
  for (const auto& [name, found] : ArrayDataset::make({file})->get_batch(at::tensor({2, 0}, at::kLong), {})) {
    EXPECT_EQ(name, c10::toString(found.scalar_type()));
    EXPECT_TRUE(found.to(at::kDouble).equal(at::tensor({4., 1.}, at::kDouble))) << name;
  }
}

TEST_F(Npy, ADatasetRefusesArraysThatDoNotFitTogether) {
  const auto three = write("three.npy", npy_of("|u1", "(3,)", "abc"));
  const auto four = write("four.npy", npy_of("|u1", "(4,)", "abcd"));
  const auto number = write("number.npy", npy_of("|u1", "()", "a"));
  const auto refused = [](const std::vector<std::filesystem::path>& files) {
    return testing::message_of<std::runtime_error>([&] { ArrayDataset::make(files); });
  };
  EXPECT_EQ(refused({three, four}),
            four + ": array 'four' has 4 samples (dim 0), but array 'three' of " + three + " has 3");
  EXPECT_EQ(refused({number}), number + ": array 'number' is a single number, but dim 0 of each array counts samples");
  EXPECT_EQ(refused({three, three}), three + ": array 'three' is also in " + three + "; rename one");
  const auto empty = write("empty.npz", zip({}));
  EXPECT_EQ(refused({empty}), empty + ": it has no array");
  EXPECT_EQ(testing::message_of<UsageError>([] { ArrayDataset::make({"a.csv"}); }),
            "'a.csv' is no file of arrays by its name; .npy, .npz and .safetensors can be read");
  EXPECT_EQ(testing::message_of<UsageError>([] { ArrayDataset::make({}); }), "ArrayDataset: no file is given");
}

}  // namespace
}  // namespace fulgur
