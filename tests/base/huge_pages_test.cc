#include "fulgur/base/huge_pages.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace fulgur {
namespace {

// Whether the system was asked for huge pages at an address: "hg" among the VmFlags of its mapping in /proc/self/smaps.
bool was_asked(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  std::ifstream smaps("/proc/self/smaps");
  bool is_mapping = false;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    if (std::istringstream range(line); range >> std::hex >> begin >> dash >> end && dash == '-') {
      is_mapping = begin <= address && address < end;
    }
    if (is_mapping && line.starts_with("VmFlags:")) return line.find(" hg") != std::string::npos;
  }
  return false;
}

TEST(HugePages, AreRequestedForLargeTensorsOnly) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
    GTEST_SKIP() << "this kernel does not make huge pages on request";
  }
  const at::Tensor large = in_huge_pages(at::empty({16 << 20}));
  const at::Tensor small = in_huge_pages(at::empty({100}));
  EXPECT_TRUE(was_asked(large.data_ptr<float>() + (8 << 20)));
  EXPECT_FALSE(was_asked(small.data_ptr<float>()));
}

TEST(HugePages, ATensorIsUsedAsAnyOther) {
  const at::Tensor large = in_huge_pages(at::empty({16 << 20}));
  EXPECT_TRUE(large.fill_(2).eq(2).all().item<bool>());
  EXPECT_EQ(in_huge_pages(at::empty({0})).numel(), 0);
}

}  // namespace
}  // namespace fulgur
