#include "fulgur/checkpoint/formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/types.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/limits.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

// A file parsed by the format's description alone.
struct Parsed {
  nlohmann::json header;
  std::string data;
};

Parsed parse(const std::filesystem::path& file) {
  const std::string bytes = testing::read_file(file);
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), sizeof(header_size));
  EXPECT_EQ(header_size % 8, 0U);
  return {nlohmann::json::parse(bytes.substr(8, header_size)), bytes.substr(8 + header_size)};
}

TEST(Safetensors, WritesHeaderAndDataAsTheFormatSays) {
  const TempDir dir;
  const at::Tensor a = torch::tensor({{1.0F, 2.0F}, {3.0F, 4.0F}}), b = torch::tensor({7, 8}, torch::kShort);
  write_safetensors(dir.path() / "f", {{"b", b}, {"a", a.t()}}, {{"format", "pt"}});
  const Parsed file = parse(dir.path() / "f");
  EXPECT_EQ(file.header, nlohmann::json::parse(R"({"__metadata__": {"format": "pt"},
      "b": {"dtype": "I16", "shape": [2], "data_offsets": [16, 20]},
      "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}})"));
  const float transposed[] = {1, 3, 2, 4};
  EXPECT_EQ(std::memcmp(file.data.data(), transposed, sizeof(transposed)), 0);
  EXPECT_EQ(file.data.size(), 20U);
}

TEST(Safetensors, BringsBackEveryDtypeAndShape) {
  const TempDir dir;
  NamedTensors tensors = {{"empty", torch::zeros({0, 3})},
                          {"scalar", torch::tensor(1.5)},
                          {"a/b \"quoted\" \n \u00e9", torch::arange(6).view({1, 2, 3})}};
  for (const auto dtype : {torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong,
                           torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble, torch::kComplexFloat,
                           torch::kUInt16, torch::kUInt32, torch::kUInt64, torch::kFloat8_e4m3fn}) {
    tensors.emplace_back(c10::toString(dtype), torch::arange(3).to(dtype));
  }
  write_safetensors(dir.path() / "f", tensors, {{"k", "v"}});
  const SafetensorsFile file(dir.path() / "f");
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"k", "v"}}));
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor read = file.tensor(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(read.sizes(), tensor.sizes());
    if (tensor.numel() == 0) continue;  // an empty tensor may have no memory
    EXPECT_EQ(std::memcmp(read.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()), 0) << name;
  }
}

// libtorch keeps such a tensor as the memory of the original and a mark.
TEST(Safetensors, WritesTheValuesOfConjugatesAndTheirParts) {
  const testing::TempDir dir;
  const at::Tensor z = at::complex(torch::randn({3}), torch::randn({3})), conjugate = z.conj(),
                   part = at::imag(conjugate);
  write_safetensors(dir.path() / "f", {{"conjugate", conjugate}, {"part", part}});
  const SafetensorsFile file(dir.path() / "f");
  EXPECT_TRUE(file.tensor("conjugate").equal(conjugate.resolve_conj()));
  EXPECT_TRUE(file.tensor("part").equal(part.resolve_neg()));
}

TEST(Safetensors, ReturnsTheDigestOfTheFile) {
  const TempDir dir;
  const FileDigest digest = write_safetensors(dir.path() / "f", {{"a", torch::rand({100})}});
  EXPECT_EQ(digest, digest_of(dir.path() / "f"));
}

TEST(Safetensors, RefusesWhatTheFormatCannotExpress) {
  const TempDir dir;
  const auto refusal = [&](const NamedTensors& tensors) {
    return message_of<CheckpointError>([&] { write_safetensors(dir.path() / "f", tensors); });
  };
  EXPECT_THAT(refusal({{"x", torch::zeros({1}, torch::kComplexDouble)}}), HasSubstr("ComplexDouble"));
  EXPECT_THAT(refusal({{"x", torch::zeros(1)}, {"x", torch::zeros(1)}}), HasSubstr("'x' is taken"));
  EXPECT_THAT(refusal({{"__metadata__", torch::zeros(1)}}), HasSubstr("is taken"));
  EXPECT_THAT(refusal({{"\xff", torch::zeros(1)}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(message_of<CheckpointError>([&] {
                write_safetensors(dir.path() / "f", {}, {{"k", std::string(limits::kSafetensorsHeaderBytes, 'v')}});
              }),
              HasSubstr("/f: the names and the metadata make a header of 100000"));
  EXPECT_FALSE(std::filesystem::exists(dir.path() / "f"));
}

TEST(Safetensors, SaysWhichFileCannotBeWrittenAndWhy) {
  EXPECT_THAT(message_of<CheckpointError>([] { write_safetensors("/nowhere/f", {}); }),
              HasSubstr("cannot create '/nowhere/f': No such file or directory"));
}

TEST(Safetensors, LeavesNothingWhereThereIsNoRoom) {
  const TempDir dir;
  {
    const testing::FileSizeLimit no_more(1000);
    EXPECT_THAT(message_of<CheckpointError>([&] { write_safetensors(dir.path() / "f", {{"a", torch::ones({1000})}}); }),
                HasSubstr("/f': File too large"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

at::Tensor three_rows() { return torch::arange(12, torch::kFloat).view({3, 4}); }

TEST(SafetensorsFile, GivesAViewThatOutlivesIt) {
  const TempDir dir;
  write_safetensors(dir.path() / "f", {{"a", three_rows()}});
  at::Tensor tensor;
  {
    const SafetensorsFile file(dir.path() / "f");
    tensor = file.tensor("a");
    EXPECT_EQ(file.tensor("a").data_ptr(), tensor.data_ptr());
  }
  std::filesystem::remove(dir.path() / "f");
  EXPECT_TRUE(torch::equal(tensor, three_rows()));
}

TEST(SafetensorsFile, WritingToATensorLeavesTheFile) {
  const TempDir dir;
  const FileDigest digest = write_safetensors(dir.path() / "f", {{"a", three_rows()}});
  SafetensorsFile(dir.path() / "f").tensor("a").zero_();
  EXPECT_EQ(digest_of(dir.path() / "f"), digest);
}

TEST(SafetensorsFile, CopiesWhatIsNotAligned) {  // other writers may leave tensors unaligned
  const TempDir dir;
  const std::string header = R"({"c":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})";
  const uint64_t size = header.size();
  const float values[] = {1.5F, -2.0F};
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof(size));
  bytes += header + "\x07" + std::string(reinterpret_cast<const char*>(values), sizeof(values));
  write_file(dir.path() / "f", bytes);
  const SafetensorsFile file(dir.path() / "f");
  EXPECT_TRUE(torch::equal(file.tensor("a"), torch::tensor({1.5F, -2.0F})));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensor("a").data_ptr()) % 4, 0U);
}

TEST(SafetensorsFile, RefusesAnUnknownDtypeOnlyWhereItIsAskedFor) {
  const TempDir dir;
  const std::string header = R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                             R"("b":{"dtype":"Q3","shape":[2],"data_offsets":[2,3]}})";
  const uint64_t size = header.size();
  write_file(dir.path() / "f", std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + header + "123");
  const SafetensorsFile file(dir.path() / "f");
  EXPECT_TRUE(torch::equal(file.tensor("a"), torch::tensor({'1', '2'}, torch::kByte)));
  EXPECT_THAT(message_of<CheckpointError>([&] { file.tensor("b"); }),
              HasSubstr("/f: tensor 'b' has dtype Q3, which is not supported"));
  EXPECT_THAT(message_of<CheckpointError>([&] { file.tensor("c"); }), HasSubstr("/f: tensor 'c' is not there"));
  EXPECT_EQ(file.find("c"), nullptr);
}

TEST(SafetensorsFile, RefusesWhatItCannotMap) {
  const TempDir dir;
  write_file(dir.path() / "empty", "");
  const auto refusal = [](const std::filesystem::path& path) {
    return message_of<CheckpointError>([&] { SafetensorsFile file(path); });
  };
  EXPECT_THAT(refusal(dir.path() / "empty"), HasSubstr("/empty: 0 bytes are too few for a header"));
  EXPECT_THAT(refusal(dir.path()), HasSubstr("Is a directory"));
  EXPECT_THAT(refusal(dir.path() / "none"), HasSubstr("No such file or directory"));
  ASSERT_EQ(::mkfifo((dir.path() / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(refusal(dir.path() / "pipe"), HasSubstr("/pipe: 0 bytes are too few for a header"));
}

TEST(SafetensorsFile, RefusesAFileThatIsCutAnywhere) {
  const TempDir dir;
  write_safetensors(dir.path() / "f", {{"a", three_rows()}, {"b", torch::arange(3)}}, {{"format", "pt"}});
  for (auto size = static_cast<int64_t>(std::filesystem::file_size(dir.path() / "f")) - 1; size >= 0; --size) {
    std::filesystem::resize_file(dir.path() / "f", static_cast<size_t>(size));
    EXPECT_THROW(SafetensorsFile(dir.path() / "f"), CheckpointError) << size;
  }
}

}  // namespace
}  // namespace fulgur
