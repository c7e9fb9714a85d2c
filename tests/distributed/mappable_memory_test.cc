#include "fulgur/distributed/mappable_memory.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fulgur {
namespace {

at::Tensor view_of(std::byte* memory, int64_t num_elements) {
  return at::from_blob(memory, {num_elements}, at::kFloat);
}

TEST(MappableMemory, HoldsZerosAndIsSeenThroughAMapping) {
  const at::Tensor flat = make_mappable(5000, at::kFloat);
  EXPECT_EQ(flat.numel(), 5000);
  EXPECT_EQ(flat.storage().nbytes(), 20000);
  EXPECT_TRUE(flat.eq(0).all().item<bool>());
  const MappablePlace place = place_of(flat);
  ASSERT_TRUE(place.is_mappable());
  MappedMemory mapped(2);
  std::byte* const there = mapped.find(1, place);
  ASSERT_NE(there, nullptr);
  flat.copy_(at::arange(5000));
  EXPECT_TRUE(view_of(there, 5000).equal(flat));
  view_of(there, 5000)[7] = -1.0;
  EXPECT_EQ(flat[7].item<float>(), -1);
}

TEST(MappableMemory, APartBeginsWithinTheMemory) {
  const at::Tensor flat = make_mappable(5000, at::kFloat);
  flat.copy_(at::arange(5000));
  MappedMemory mapped(2);
  std::byte* const there = mapped.find(1, place_of(flat.narrow(0, 3000, 100)));
  ASSERT_NE(there, nullptr);
  EXPECT_EQ(view_of(there, 100)[0].item<float>(), 3000);
}

TEST(MappableMemory, IsMappedOnceUntilItsOwnerFreesSome) {
  MappedMemory mapped(2);
  const at::Tensor kept = make_mappable(5000, at::kFloat);
  at::Tensor freed = make_mappable(5000, at::kFloat);
  EXPECT_FALSE(mapped.knows(1, place_of(kept)));
  std::byte* const there = mapped.find(1, place_of(kept));
  EXPECT_NE(mapped.find(1, place_of(freed)), nullptr);
  EXPECT_TRUE(mapped.knows(1, place_of(kept)));
  EXPECT_EQ(mapped.find(1, place_of(kept)), there);
  EXPECT_FALSE(mapped.knows(0, place_of(kept)));  // no mapping for that rank
  freed.reset();
  EXPECT_FALSE(mapped.knows(1, place_of(kept)));
  EXPECT_NE(mapped.find(1, place_of(kept)), nullptr);
  EXPECT_TRUE(mapped.knows(1, place_of(kept)));
}

TEST(MappableMemory, OtherTensorsAreNotInIt) {
  EXPECT_FALSE(place_of(at::zeros({5000})).is_mappable());
  EXPECT_FALSE(place_of(at::zeros({0})).is_mappable());
}

TEST(MappableMemory, ManyTensorsGetOrdinaryMemory) {
  std::vector<at::Tensor> flats;
  for (int64_t i = 0; i <= kMostMappable; ++i) flats.push_back(make_mappable(1, at::kByte));
  EXPECT_TRUE(place_of(flats.front()).is_mappable());
  EXPECT_FALSE(place_of(flats.back()).is_mappable());
  EXPECT_EQ(flats.back().item<uint8_t>(), 0);
  flats.clear();
  EXPECT_TRUE(place_of(make_mappable(1, at::kByte)).is_mappable());
}

// As of a process that has ended.
TEST(MappableMemory, APlaceThatCannotBeOpenedIsNull) {
  MappablePlace place = place_of(make_mappable(5000, at::kFloat));
  place.process = 0;
  MappedMemory mapped(1);
  EXPECT_EQ(mapped.find(0, place), nullptr);
  EXPECT_TRUE(mapped.knows(0, place));
}

}  // namespace
}  // namespace fulgur
