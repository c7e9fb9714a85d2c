#include "fulgur/checkpoint/formats/huggingface.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

std::vector<std::string> names_of(const NamedTensors& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  return names;
}

void write_two_parts(const std::filesystem::path& folder, const std::string& weight_map) {
  write_safetensors(folder / "model-00001-of-00002.safetensors",
                    {{"h.0.w", torch::zeros(2)}, {"h.1.w", torch::ones(2)}});
  write_safetensors(folder / "model-00002-of-00002.safetensors", {{"wte", torch::arange(3)}});
  write_file(folder / "model.safetensors.index.json",
             R"({"metadata": {"total_size": 40}, "weight_map": )" + weight_map + "}");
}

const char* const kWeightMap = R"({"h.0.w": "model-00001-of-00002.safetensors",
    "h.1.w": "model-00001-of-00002.safetensors", "wte": "model-00002-of-00002.safetensors"})";

TEST(NameMap, FirstRuleThatFitsDecides) {
  const NameMap names{.rules = {{"transformer.wte.weight", "embedding.weight"},
                                {"transformer.h.0.", "first."},
                                {"transformer.h.", "blocks."},
                                {"transformer.", "rest.transformer."},
                                {"lm_head.weight", std::nullopt}}};
  EXPECT_EQ(names("transformer.wte.weight"), "embedding.weight");
  EXPECT_EQ(names("transformer.wte.weights"), "rest.transformer.wte.weights");
  EXPECT_EQ(names("transformer.h.0.w"), "first.w");
  EXPECT_EQ(names("transformer.h.11.w"), "blocks.11.w");
  EXPECT_EQ(names("lm_head.weight"), std::nullopt);
  EXPECT_EQ(names("other"), "other");
  const NameMap all{.rules = {{"", "model."}}};
  EXPECT_EQ(all("w"), "model.w");
}

TEST(ReadHuggingface, TakesAFileAFolderOrAnIndex) {
  const TempDir one, many;
  write_safetensors(one.path() / "model.safetensors", {{"wte", torch::arange(3)}});
  EXPECT_THAT(names_of(read_huggingface(one.path())), ElementsAre("wte"));
  EXPECT_THAT(names_of(read_huggingface(one.path() / "model.safetensors")), ElementsAre("wte"));
  write_two_parts(many.path(), kWeightMap);
  const NamedTensors tensors = read_huggingface(many.path(), NameMap{.rules = {{"h.", "blocks."}}});
  EXPECT_THAT(names_of(tensors), ElementsAre("blocks.0.w", "blocks.1.w", "wte"));
  EXPECT_TRUE(torch::equal(tensors[1].second, torch::ones(2)));
  EXPECT_TRUE(torch::equal(tensors[2].second, torch::arange(3)));
  EXPECT_EQ(read_huggingface(many.path() / "model.safetensors.index.json").size(), 3U);
}

TEST(ReadHuggingface, RefusesTwoNamesThatBecomeOne) {
  const TempDir dir;
  write_two_parts(dir.path(), kWeightMap);
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { read_huggingface(dir.path(), NameMap{.rules = {{"h.0.", "x."}, {"h.1.", "x."}}}); }),
              HasSubstr("tensors 'h.0.w' and 'h.1.w' both become 'x.w'"));
}

TEST(ReadHuggingface, RefusesBadIndices) {
  const auto refusal = [](const std::string& weight_map) {
    const TempDir dir;
    write_two_parts(dir.path(), weight_map);
    return message_of<CheckpointError>([&] { read_huggingface(dir.path()); });
  };
  EXPECT_THAT(refusal("[]"), HasSubstr("model.safetensors.index.json: has no weight_map"));
  EXPECT_THAT(refusal(R"({"a": 3})"), HasSubstr("the file of 'a' is no text"));
  EXPECT_THAT(refusal(R"({"a": "../x.safetensors"})"), HasSubstr("is not the name of a file beside it"));
  EXPECT_THAT(refusal(R"({"a": ".."})"), HasSubstr("is not the name of a file beside it"));
  EXPECT_THAT(refusal(R"({"a": "model-00002-of-00002.safetensors"})"), HasSubstr("tensor 'a' is not there"));
  EXPECT_THAT(refusal(R"({"a": "none.safetensors"})"), HasSubstr("No such file or directory"));
}

}  // namespace
}  // namespace fulgur
