#include "fulgur/checkpoint/formats/pickle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

PickledTensor small() { return {"FloatStorage", "0", 6, 0, {2, 3}, {3, 1}}; }

std::string small_pickle() {
  PickleWriter pickle;
  pickle.begin_dict();
  pickle.text("epoch");
  pickle.integer(int64_t{1} << 40);
  pickle.text("callbacks");
  pickle.begin_list();
  pickle.real(0.5);
  pickle.boolean(true);
  pickle.none();
  pickle.end_list();
  pickle.text("state_dict");
  pickle.begin_dict();
  pickle.text("w");
  pickle.tensor(small());
  pickle.end_dict();
  pickle.end_dict();
  return pickle.finish();
}

std::string of_tensor(const PickledTensor& tensor) {
  PickleWriter pickle;
  pickle.begin_dict();
  pickle.text("w");
  pickle.tensor(tensor);
  pickle.end_dict();
  return pickle.finish();
}

std::string refusal(const std::string& bytes) {
  return message_of<CheckpointError>([&] { read_pickled_state_dict(bytes, "m.pt"); });
}

TEST(Pickle, FindsTheStateDictAmongOtherThings) {
  const PickledTensors tensors = read_pickled_state_dict(small_pickle(), "m.pt");
  ASSERT_EQ(tensors.size(), 1U);
  EXPECT_EQ(tensors[0].first, "w");
  EXPECT_EQ(tensors[0].second.storage_type, "FloatStorage");
  EXPECT_EQ(tensors[0].second.storage_key, "0");
  EXPECT_EQ(tensors[0].second.storage_numel, 6);
  EXPECT_THAT(tensors[0].second.shape, ElementsAre(2, 3));
  EXPECT_THAT(tensors[0].second.strides, ElementsAre(3, 1));
}

TEST(Pickle, RefusesTensorsOutsideTheirStorage) {
  const auto refusal_of = [](int64_t numel, int64_t offset, std::vector<int64_t> shape, std::vector<int64_t> strides) {
    return refusal(of_tensor({"FloatStorage", "0", numel, offset, std::move(shape), std::move(strides)}));
  };
  EXPECT_THAT(refusal_of(5, 0, {2, 3}, {3, 1}), HasSubstr("a tensor is larger than its storage '0'"));
  EXPECT_THAT(refusal_of(6, 1, {2, 3}, {3, 1}), HasSubstr("larger than its storage"));
  EXPECT_THAT(refusal_of(6, 0, {2, 3}, {4, 1}), HasSubstr("larger than its storage"));
  EXPECT_THAT(refusal_of(6, 7, {0}, {1}), HasSubstr("larger than its storage"));
  EXPECT_THAT(refusal_of(6, 0, {int64_t{1} << 62, int64_t{1} << 62}, {0, 0}), HasSubstr("larger than its storage"));
  EXPECT_THAT(refusal_of(6, 0, {1, 3}, {1}), HasSubstr("not one stride for each size"));
  EXPECT_THAT(refusal_of(6, -1, {1}, {1}), HasSubstr("the offset of a tensor is negative"));
  EXPECT_THAT(refusal_of(6, 0, {-1}, {1}), HasSubstr("a size or stride is negative"));
  EXPECT_THAT(refusal_of(6, 0, std::vector<int64_t>(65, 1), std::vector<int64_t>(65, 1)), HasSubstr("more than 64"));
}

TEST(Pickle, RunsNothing) {
  EXPECT_THAT(refusal(std::string("\x80\x02"
                                  "cos\nsystem\n(U\x04"
                                  "exittR.")),
              HasSubstr("no dict of tensors"));
  EXPECT_THAT(refusal(std::string("\x80\x02}U\x01wcos\nsystem\n(U\x04"
                                  "exittRs.")),
              HasSubstr("'w' in the state dict is no tensor but 'os system'"));
}

TEST(Pickle, RefusesWhatIsNoPickle) {
  EXPECT_THAT(refusal(""), HasSubstr("m.pt: its pickle cannot be read: it is cut off"));
  EXPECT_THAT(refusal("."), HasSubstr("does not end with one value"));
  EXPECT_THAT(refusal("}}."), HasSubstr("does not end with one value"));
  EXPECT_THAT(refusal("R."), HasSubstr("a value is missing"));
  EXPECT_THAT(refusal("(R."), HasSubstr("a value is missing"));
  EXPECT_THAT(refusal("t."), HasSubstr("a mark is missing"));
  EXPECT_THAT(refusal("h\x05."), HasSubstr("there is no memo 5"));
  EXPECT_THAT(refusal("X\xff\xff\xff\xff."), HasSubstr("cut off"));
  EXPECT_THAT(refusal("cos"), HasSubstr("cut off"));
  EXPECT_THAT(refusal("\xff."), HasSubstr("opcode 0xff is not supported"));
  EXPECT_THAT(refusal("}N."), HasSubstr("does not end with one value"));
  EXPECT_THAT(refusal("]."), HasSubstr("no dict of tensors"));
  EXPECT_THAT(refusal("}(Nu."), HasSubstr("a name without a value"));
  EXPECT_THAT(refusal("}NNs."), HasSubstr("a name in the state dict is no text"));
}

TEST(Pickle, RefusesBombs) {
  EXPECT_THAT(refusal(std::string(5 << 20, 'N')), HasSubstr("more than 4194304 values"));
  EXPECT_THAT(refusal(std::string(3 << 20, ']') + std::string(3 << 20, 'a') + "."), HasSubstr("a value is missing"));
  // A list that contains itself, and one long list from which a dict is made many times.
  EXPECT_THAT(refusal("]q\x01h\x01"
                      "a."),
              HasSubstr("no dict of tensors"));
  std::string copies = "ccollections\nOrderedDict\nq\x01(";
  for (int i = 0; i < 10000; ++i) copies += "NN\x86";
  copies += "lq\x02";
  for (int i = 0; i < 10000; ++i) copies += "h\x01h\x02\x85R";
  EXPECT_THAT(refusal(copies), HasSubstr("it copies one value too often"));
}

std::string repeated(const std::string& bytes, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += bytes;
  return all;
}

// Opcodes that make the small tensor, remember it as 2 and pop it.
std::string remembered_tensor() {
  PickleWriter pickle;
  pickle.tensor(small());
  std::string bytes = pickle.finish().substr(2);  // drops the protocol opcode
  bytes.back() = 'q';                             // remembers the tensor instead of ending
  return bytes + "\x02" + "0";
}

std::string long_text(size_t num_bytes) {
  PickleWriter pickle;
  pickle.text(std::string(num_bytes, 'w'));
  std::string bytes = pickle.finish().substr(2);
  bytes.pop_back();
  return bytes;
}

std::string refusal(const std::string& bytes, PickleLimits limits) {
  return message_of<CheckpointError>([&] { read_pickled_state_dict(bytes, "m.pt", limits); });
}

TEST(Pickle, ALongNameThatIsOftenThereIsNoBomb) {
  const std::string bytes =
      long_text(1 << 20) + "q\x01" + "0" + remembered_tensor() + "}(" + repeated("h\x01h\x02", 64) + "u.";
  EXPECT_THAT(refusal(bytes), HasSubstr("' is in the state dict twice"));
}

TEST(Pickle, ATensorThatIsOftenThereIsNoBomb) {
  std::string bytes = remembered_tensor() + "}(";
  for (int i = 1000; i < 9000; ++i) bytes += "U\x04" + std::to_string(i) + "h\x02";
  EXPECT_THAT(refusal(bytes + "u.", {.max_copied_bytes = 1 << 20}), HasSubstr("it copies one value too often"));
}

TEST(Pickle, ALongShapeThatIsOftenThereIsNoBomb) {
  const std::string shape = "(" + repeated("K\x01", 64) + "tq\x03";
  const std::string storage =
      "(U\x07storagectorch\nFloatStorage\nU\x01"
      "0U\x03"
      "cpuK\x01tQq\x04";
  const std::string arguments = std::string("(h\x04K\x00h\x03h\x03tq\x05", 12);
  const std::string made = shape + storage + arguments + "ctorch._utils\n_rebuild_tensor_v2\nq\x06";
  constexpr int kTensors = 10'000;  // each takes 1 KB
  const PickleLimits limits{.max_copied_bytes = 8 << 20};
  EXPECT_THAT(refusal(made + repeated("h\x06h\x05R", kTensors), limits), HasSubstr("it copies one value too often"));
  const std::string parameter = made + "h\x06h\x05R\x85q\x07" + "ctorch._utils\n_rebuild_parameter\nq\x08";
  EXPECT_THAT(refusal(parameter + repeated("h\x08h\x07R", kTensors), limits),
              HasSubstr("it copies one value too often"));
}

TEST(Pickle, KeepsNoMoreThanItsLimitsOfAnything) {
  const PickleLimits limits{.max_values = 100, .max_copied_bytes = 1000};
  EXPECT_THAT(refusal(repeated("N", 101), limits), HasSubstr("it has more than 100 values"));
  EXPECT_THAT(refusal("N" + repeated("2", 100), limits), HasSubstr("its stack has more than 100 values"));
  EXPECT_THAT(refusal("Nq\x01" + repeated("h\x01", 100), limits), HasSubstr("its stack has more than 100 values"));
  EXPECT_THAT(refusal(repeated("(", 101), limits), HasSubstr("it has more than 100 marks"));
  EXPECT_THAT(refusal("N" + repeated("\x94", 101), limits), HasSubstr("it remembers more than 100 values"));
  EXPECT_THAT(refusal("}q\x01Nq\x02" + repeated("h\x01h\x02h\x02s0", 200), limits),
              HasSubstr("it copies one value too often"));
}

TEST(Pickle, RefusesANameThatIsThereTwice) {
  PickleWriter pickle;
  pickle.begin_dict();
  for (int i = 0; i < 2; ++i) {
    pickle.text("w");
    pickle.tensor(small());
  }
  pickle.end_dict();
  EXPECT_THAT(refusal(pickle.finish()), HasSubstr("'w' is in the state dict twice"));
}

TEST(Pickle, ReadsTheSignOfAShortInteger) {
  std::string bytes = of_tensor({"FloatStorage", "0", 6, 0x7f7f7f7f, {2, 3}, {3, 1}});
  const std::string offset("J\x7f\x7f\x7f\x7f");
  ASSERT_NE(bytes.find(offset), bytes.npos);
  bytes.replace(bytes.find(offset), offset.size(), "\x8a\x01\xff");
  EXPECT_THAT(refusal(bytes), HasSubstr("the offset of a tensor is negative"));
}

TEST(Pickle, EveryCutAndEveryFlippedBitIsRefusedOrLeavesAValidStateDict) {
  const std::string bytes = small_pickle();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(read_pickled_state_dict(bytes.substr(0, size), "m.pt"), CheckpointError) << size;
  }
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    try {
      for (const auto& [name, tensor] : read_pickled_state_dict(flipped, "m.pt")) {
        EXPECT_EQ(tensor.shape.size(), tensor.strides.size());
      }
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith("m.pt: ")) << bit;
    }
  }
}

}  // namespace
}  // namespace fulgur
