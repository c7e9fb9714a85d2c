#include "checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

// The file read back by the format's description alone.
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
      "b": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]},
      "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [4, 20]}})"));
  const float transposed[] = {1, 3, 2, 4};
  EXPECT_EQ(std::memcmp(file.data.data() + 4, transposed, sizeof(transposed)), 0);
  EXPECT_EQ(file.data.size(), 20U);
}

TEST(Safetensors, KnowsEveryDtype) {
  const TempDir dir;
  NamedTensors tensors;
  for (const auto dtype : {torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong,
                           torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    tensors.emplace_back(c10::toString(dtype), torch::ones({3}, dtype));
  }
  write_safetensors(dir.path() / "f", tensors);
  EXPECT_EQ(parse(dir.path() / "f").header["BFloat16"]["dtype"], "BF16");
}

TEST(Safetensors, TakesEmptyTensorsAndScalars) {
  const TempDir dir;
  write_safetensors(dir.path() / "f", {{"empty", torch::zeros({0, 3})}, {"scalar", torch::tensor(1.0F)}});
  const Parsed file = parse(dir.path() / "f");
  EXPECT_EQ(file.header["empty"]["shape"], nlohmann::json({0, 3}));
  EXPECT_EQ(file.header["scalar"]["shape"], nlohmann::json::array());
}

TEST(Safetensors, RefusesWhatTheFormatCannotExpress) {
  const TempDir dir;
  const auto refusal = [&](const NamedTensors& tensors) {
    return message_of<CheckpointError>([&] { write_safetensors(dir.path() / "f", tensors); });
  };
  EXPECT_THAT(refusal({{"x", torch::zeros({1}, torch::kComplexFloat)}}), HasSubstr("ComplexFloat"));
  EXPECT_THAT(refusal({{"x", torch::zeros(1)}, {"x", torch::zeros(1)}}), HasSubstr("'x' is taken"));
  EXPECT_THAT(refusal({{"__metadata__", torch::zeros(1)}}), HasSubstr("is taken"));
}

TEST(Safetensors, SaysWhichFileCannotBeWrittenAndWhy) {
  EXPECT_THAT(message_of<CheckpointError>([] { write_safetensors("/nowhere/f", {}); }),
              HasSubstr("cannot create '/nowhere/f': No such file or directory"));
}

}  // namespace
}  // namespace fulgur
