#include "fulgur/programs/program_archive.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "fulgur/base/error.h"
#include "tests/programs/archive_file.h"
#include "tests/testing/errors.h"
#include "tests/testing/largest_allocation.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using Json = nlohmann::json;
using testing::archive_path;
using testing::ArchiveFile;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
const std::string kWeights = "data/weights/model_weights_config.json";
const std::string kNeeded = "; an archive of torch.export.save() is needed";

Json as_ints(const std::vector<int64_t>& numbers) {
  Json json = Json::array();
  for (const int64_t number : numbers) json.push_back({{"as_int", number}});
  return json;
}

class Archive : public ::testing::Test {
 protected:
  std::filesystem::path next_file() { return folder_.path() / (std::to_string(num_files_++) + ".pt2"); }

  // What is wrong with the file, without its name.
  static std::string refusal_of(const std::filesystem::path& file) {
    const testing::LargestAllocation allocated;
    const std::string message = testing::message_of<CheckpointError>([&] { const ProgramArchive archive(file); });
    EXPECT_LT(allocated.num_bytes(), 100'000u);
    EXPECT_THAT(message, ::testing::StartsWith(file.string() + ": "));
    return message.substr(std::min(message.size(), file.string().size() + 2));
  }

  std::string refusal(const std::string& bytes) {
    const auto file = next_file();
    std::ofstream(file, std::ios::binary) << bytes;
    return refusal_of(file);
  }

  std::string refusal(const ArchiveFile& archive) { return refusal_of(archive.write(next_file())); }

  // What is wrong with an archive "tiny" whose description of a weight of 8 x 4 is changed.
  std::string refusal(const ArchiveFile::Change& change_tensor) {
    const std::string message =
        refusal(ArchiveFile("tiny").change_weights([&](Json& config) { change_tensor(config["hidden.weight"]); }));
    const std::string begin = kWeights + ": tensor 'hidden.weight': ";
    EXPECT_THAT(message, ::testing::StartsWith(begin));
    return message.substr(std::min(message.size(), begin.size()));
  }

  // The same for its layout.
  std::string refusal(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset = 0) {
    return refusal([&](Json& tensor) {
      tensor["tensor_meta"]["sizes"] = as_ints(sizes);
      tensor["tensor_meta"]["strides"] = as_ints(strides);
      tensor["tensor_meta"]["storage_offset"]["as_int"] = offset;
    });
  }

 private:
  testing::TempDir folder_;
  int num_files_ = 0;
};

TEST_F(Archive, WeightsAreViewsOfTheFile) {
  const ProgramArchive archive(archive_path("mlp"));
  const auto weight = archive.weight("encode.weight"), tied = archive.weight("decode.weight");
  EXPECT_THAT(weight.tensor.sizes(), ElementsAre(4, 4));
  EXPECT_EQ(weight.entry, tied.entry);
  EXPECT_EQ(weight.tensor.data_ptr(), tied.tensor.data_ptr());
  EXPECT_TRUE(weight.requires_grad);
  EXPECT_FALSE(archive.weight("decode.bias").requires_grad);
  EXPECT_EQ(archive.weight("block.0.num_batches_tracked").tensor.scalar_type(), at::kLong);
  weight.tensor.zero_();
  EXPECT_FALSE(ProgramArchive(archive_path("mlp")).weight("encode.weight").tensor.equal(at::zeros({4, 4})));
  EXPECT_THAT(testing::message_of<CheckpointError>([&] { archive.weight("encode.wait"); }),
              HasSubstr("mlp.pt2: has no tensor 'encode.wait'"));
}

TEST_F(Archive, ConstantsAreApart) {
  const ProgramArchive archive(archive_path("sizes"));
  EXPECT_TRUE(archive.constant("table").tensor.equal(at::arange(6, at::kFloat)));
  EXPECT_TRUE(archive.constant("offset").tensor.equal(at::arange(1, 4, at::kFloat)));
  EXPECT_TRUE(archive.weight_names().empty());
}

TEST_F(Archive, ATensorOutlivesTheArchiveAndTheFile) {
  const auto file = next_file();
  std::filesystem::copy_file(archive_path("sizes"), file);
  at::Tensor table;
  {
    const ProgramArchive archive(file);
    table = archive.constant("table").tensor;
  }
  std::filesystem::remove(file);
  EXPECT_TRUE(table.equal(at::arange(6, at::kFloat)));
}

TEST_F(Archive, ReadsViewsAndEmptyTensors) {
  const auto layout = [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset) {
    return [=](Json& config) {
      Json& meta = config["hidden.weight"]["tensor_meta"];
      meta["sizes"] = as_ints(sizes);
      meta["strides"] = as_ints(strides);
      meta["storage_offset"]["as_int"] = offset;
    };
  };
  const auto read = [&](const ArchiveFile& archive) {
    return ProgramArchive(archive.write(next_file())).weight("hidden.weight").tensor;
  };
  const at::Tensor whole = read(ArchiveFile("tiny"));
  EXPECT_TRUE(read(ArchiveFile("tiny").change_weights(layout({4, 8}, {1, 4}, 0))).equal(whole.t()));
  EXPECT_TRUE(read(ArchiveFile("tiny").change_weights(layout({4}, {8}, 7))).equal(whole.flatten().slice(0, 7, 32, 8)));
  EXPECT_TRUE(read(ArchiveFile("tiny").change_weights(layout({3}, {0}, 31))).equal(whole[7][3].expand({3})));
  EXPECT_THAT(read(ArchiveFile("tiny").change_weights(layout({0, 5}, {5, 1}, 32))).sizes(), ElementsAre(0, 5));
}

TEST_F(Archive, WritesItselfWithOtherValues) {
  const ProgramArchive archive(archive_path("mlp"));
  std::map<std::string, at::Tensor> values;
  for (const std::string& name : archive.weight_names()) values[name] = archive.weight(name).tensor.clone().add_(1);
  const auto file = next_file();
  archive.write_with(file, values);
  const ProgramArchive again(file);
  EXPECT_EQ(again.weight_names(), archive.weight_names());
  for (const auto& [name, tensor] : values) EXPECT_TRUE(again.weight(name).tensor.equal(tensor)) << name;
  EXPECT_EQ(again.weight("encode.weight").entry, again.weight("decode.weight").entry);

  const auto message = [&](const std::map<std::string, at::Tensor>& wrong) {
    return testing::message_of<CheckpointError>([&] { archive.write_with(next_file(), wrong); });
  };
  auto wrong = values;
  wrong["encode.wait"] = at::zeros({1});
  EXPECT_THAT(message(wrong), HasSubstr("mlp.pt2: unknown weight 'encode.wait'; did you mean 'encode.weight'?"));
  wrong = values;
  wrong.erase("encode.bias");
  EXPECT_THAT(message(wrong), HasSubstr("mlp.pt2: no values were given for 'encode.bias'"));
  wrong = values;
  wrong["encode.bias"] = at::zeros({4}, at::kDouble);
  EXPECT_THAT(message(wrong), HasSubstr("'encode.bias' has Float of sizes [4] in the archive, but the values are "
                                        "Double of sizes [4]"));
}

TEST_F(Archive, RefusesWhatIsNoArchive) {
  EXPECT_EQ(refusal(""), "it is no zip file" + kNeeded);
  EXPECT_EQ(refusal("a text that is long enough for a zip file"), "it is no zip file" + kNeeded);
  EXPECT_THAT(testing::message_of<CheckpointError>([] { ProgramArchive("/nowhere/model.pt2"); }),
              HasSubstr("cannot open '/nowhere/model.pt2': No such file or directory"));
  EXPECT_THAT(testing::message_of<CheckpointError>([] { ProgramArchive("tests/programs/archives"); }),
              HasSubstr("Is a directory"));
  ArchiveFile other("tiny");
  other.entries.erase("models/model.json");
  EXPECT_EQ(refusal(other), "holds no program of torch.export.save(); torch 2.11 writes one as models/model.json");
  ArchiveFile two("tiny");
  two.entries["models/other.json"] = two.entries["models/model.json"];
  EXPECT_EQ(refusal(two), "holds several programs (model, other); one is read");
  ArchiveFile big_endian("tiny");
  big_endian.entries["byteorder"] = "big";
  EXPECT_EQ(refusal(big_endian), "was written on a machine with another byte order");
}

TEST_F(Archive, RefusesAFileThatIsCutAnywhere) {
  const auto file = next_file();
  std::filesystem::copy_file(archive_path("tiny"), file);
  for (auto size = std::filesystem::file_size(file); size > 0;) {
    size -= std::min<uintmax_t>(size, 29);
    std::filesystem::resize_file(file, size);
    EXPECT_THAT(refusal_of(file), ::testing::EndsWith(kNeeded)) << size;
  }
}

TEST_F(Archive, RefusesEntriesThatAreCompressedOrTwice) {
  const std::string bytes = testing::read_file(archive_path("tiny"));
  const auto central = [&](const std::string& name) { return bytes.rfind(name) - 46; };
  const auto changed = [&](size_t at, auto number) {
    std::string other = bytes;
    std::memcpy(&other[at], &number, sizeof(number));
    return refusal(other);
  };
  const std::string entry = "tiny/models/model.json",
                    reason = "its entry '" + entry + "' is compressed, which torch never does";
  EXPECT_EQ(changed(central(entry) + 10, uint16_t{8}), reason + kNeeded);
  EXPECT_EQ(changed(central(entry) + 8, uint16_t{1}), reason + kNeeded);  // encrypted
  EXPECT_EQ(changed(central(entry) + 24, uint32_t{0x7fffffff}), reason + kNeeded);
  std::string twice = bytes;
  twice.replace(twice.rfind("tiny/data/weights/weight_1"), 26, "tiny/data/weights/weight_0");
  EXPECT_EQ(refusal(twice), "two of its entries are called 'data/weights/weight_0'" + kNeeded);
}

TEST_F(Archive, RefusesEntriesThatOverlap) {
  std::string bytes = testing::read_file(archive_path("tiny"));
  const auto begin = [&](const std::string& name) { return bytes.rfind("tiny/data/weights/" + name) - 46 + 42; };
  const std::string first = bytes.substr(begin("weight_1"), 4);  // where its local header begins
  bytes.replace(begin("weight_2"), 4, first);
  EXPECT_EQ(refusal(bytes), "its entries 'data/weights/weight_1' and 'data/weights/weight_2' overlap" + kNeeded);
}

TEST_F(Archive, RefusesAnArchiveWithoutOneOfItsEntries) {
  for (const std::string& name : {kWeights, std::string("data/constants/model_constants_config.json")}) {
    ArchiveFile archive("tiny");
    archive.entries.erase(name);
    EXPECT_EQ(refusal(archive), "has no entry '" + name + "', which torch 2.11 writes");
  }
  ArchiveFile archive("tiny");
  archive.entries.erase("data/weights/weight_0");
  EXPECT_EQ(refusal(archive), "has no entry 'data/weights/weight_0', which torch 2.11 writes");
  EXPECT_EQ(refusal(ArchiveFile("tiny").change_weights([](Json& config) { config.erase("out.bias"); })),
            "has no tensor 'out.bias', which its graph uses");
  EXPECT_EQ(refusal(ArchiveFile("sizes").change("data/constants/model_constants_config.json",
                                                [](Json& json) { json["config"].erase("table"); })),
            "has no tensor 'table', which its graph uses");
}

TEST_F(Archive, RefusesPickledTensors) {
  EXPECT_EQ(refusal([](Json& tensor) { tensor["use_pickle"] = true; }),
            "it is pickled, and nothing is unpickled: only plain strided tensors are read");
}

TEST_F(Archive, RefusesTensorsThatLieOutsideTheirEntry) {
  const auto outside = [](const std::string& layout) {
    return "it lies outside its entry 'data/weights/weight_0' of 32 elements, with " + layout;
  };
  EXPECT_EQ(refusal({9, 4}, {4, 1}), outside("sizes [9, 4], strides [4, 1] and offset 0"));
  EXPECT_EQ(refusal({8, 4}, {4, 1}, 1), outside("sizes [8, 4], strides [4, 1] and offset 1"));
  EXPECT_EQ(refusal({8, 4}, {5, 1}), outside("sizes [8, 4], strides [5, 1] and offset 0"));
  EXPECT_EQ(refusal({0}, {1}, 33), outside("sizes [0], strides [1] and offset 33"));
  EXPECT_EQ(refusal({kMax}, {1}), outside("sizes [9223372036854775807], strides [1] and offset 0"));
  EXPECT_EQ(refusal({2}, {kMax}), outside("sizes [2], strides [9223372036854775807] and offset 0"));
  EXPECT_EQ(refusal({2}, {kMax}, kMax),
            outside("sizes [2], strides [9223372036854775807] and offset 9223372036854775807"));
  EXPECT_EQ(refusal({}, {}, kMax), outside("sizes [], strides [] and offset 9223372036854775807"));
  EXPECT_EQ(refusal({kMax, kMax}, {0, 0}),
            outside("sizes [9223372036854775807, 9223372036854775807], strides [0, 0] and offset 0"));
  EXPECT_EQ(refusal({int64_t{1} << 32, int64_t{1} << 32}, {0, 0}),
            outside("sizes [4294967296, 4294967296], strides [0, 0] and offset 0"));
  EXPECT_EQ(refusal({0, kMax, 2}, {1, 1, 1}),
            outside("sizes [0, 9223372036854775807, 2], strides [1, 1, 1] and offset 0"));
}

TEST_F(Archive, RefusesWhatIsNoLayout) {
  EXPECT_EQ(refusal({8, 4}, {-4, 1}), "'{\"as_int\":-4}' is no size, stride or offset");
  EXPECT_EQ(refusal({-8, 4}, {4, 1}), "'{\"as_int\":-8}' is no size, stride or offset");
  EXPECT_EQ(refusal({8, 4}, {4, 1}, -1), "'{\"as_int\":-1}' is no size, stride or offset");
  EXPECT_EQ(refusal({8, 4}, {4}), "it has 2 sizes and 1 strides");
  EXPECT_EQ(refusal(std::vector<int64_t>(65, 1), std::vector<int64_t>(65, 1)), "it has 65 sizes and 65 strides");
  EXPECT_EQ(refusal([](Json& tensor) { tensor["tensor_meta"]["sizes"] = nullptr; }), "'null' is no list of sizes");
  EXPECT_EQ(refusal([](Json& tensor) { tensor["tensor_meta"]["sizes"][0] = {{"as_expr", "s0"}}; }),
            "'{\"as_expr\":\"s0\"}' is no size, stride or offset");
  EXPECT_EQ(refusal([](Json& tensor) { tensor["tensor_meta"]["sizes"][0]["as_int"] = 9223372036854775808u; }),
            "'{\"as_int\":9223372036854775808}' is no size, stride or offset");
  EXPECT_EQ(refusal([](Json& tensor) { tensor["tensor_meta"]["dtype"] = 99; }), "data type 99 is unknown");
  EXPECT_THAT(refusal([](Json& tensor) { tensor.erase("tensor_meta"); }), HasSubstr("key 'tensor_meta' not found"));
  EXPECT_THAT(refusal([](Json& tensor) { tensor = 5; }), HasSubstr("cannot use at() with number"));
}

TEST_F(Archive, RefusesAnEntryOfAPartOfAnElement) {
  ArchiveFile archive("tiny");
  archive.entries["data/weights/weight_0"] += "abc";
  EXPECT_EQ(refusal(archive), kWeights +
                                  ": tensor 'hidden.weight': its entry 'data/weights/weight_0' has 131 bytes, no "
                                  "multiple of the 4 of an element");
}

TEST_F(Archive, RefusesWeightsThatOverlapWithoutBeingTheSame) {
  const auto share = [](const ArchiveFile::Change& change) {
    return ArchiveFile("tiny").change_weights([&](Json& config) {
      config["hidden.bias"]["path_name"] = config["hidden.weight"]["path_name"];
      change(config["hidden.bias"]["tensor_meta"]);
    });
  };
  const std::string reason =
      "parameters 'hidden.weight' and 'hidden.bias' share memory without being the same; clone one of them before the "
      "export";
  EXPECT_EQ(refusal(share([](Json&) {})), reason);
  EXPECT_EQ(refusal(share([](Json& meta) {
              meta["sizes"] = as_ints({8, 4});
              meta["strides"] = as_ints({4, 1});
              meta["requires_grad"] = false;
            })),
            reason);
  EXPECT_EQ(refusal(share([](Json& meta) { meta["dtype"] = 4; })),
            kWeights +
                ": tensor 'hidden.weight' has another data type than others of its entry "
                "'data/weights/weight_0'");
  ProgramArchive(share([](Json& meta) {
                   meta["sizes"] = as_ints({8, 4});
                   meta["strides"] = as_ints({4, 1});
                 }).write(next_file()));
}

TEST_F(Archive, RefusesAnIndexThatIsNestedOrNamesATensorTwice) {
  ArchiveFile archive("tiny");
  archive.entries[kWeights] = std::string(20, '[') + std::string(20, ']');
  EXPECT_EQ(refusal(archive), kWeights + ": nested more than 16 deep");
  archive.entries[kWeights] = R"({"config": {"a": 1, "a": 2}})";
  EXPECT_EQ(refusal(archive), kWeights + ": the name 'a' is there twice");
  archive.entries[kWeights] = "5";
  EXPECT_THAT(refusal(archive), HasSubstr("cannot use at() with number"));
}

// What is flipped is refused, or leaves an archive that can be read.
TEST_F(Archive, AFlippedBitIsRefusedOrHarmless) {
  const std::string bytes = testing::read_file(archive_path("tiny"));
  const auto file = next_file();
  for (size_t i = 0; i < bytes.size(); i += 13) {
    std::string flipped = bytes;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << i % 8));
    std::ofstream(file, std::ios::binary | std::ios::trunc) << flipped;
    try {
      const ProgramArchive archive(file);
      for (const std::string& name : archive.weight_names()) {
        EXPECT_LE(archive.weight(name).tensor.clone().numel(), 64) << i;
      }
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr(file.string())) << i;
    }
  }
}

}  // namespace
}  // namespace fulgur
