#include "fulgur/distributed/add_in_order.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <vector>

namespace fulgur {
namespace {

template <class T>
void expect_the_bits_of_a_loop(size_t num_rows, size_t num_elements) {
  std::mt19937 random(static_cast<unsigned>(num_rows * 1000 + num_elements));
  std::lognormal_distribution<T> numbers(0, 4);  // so far apart that the order shows
  std::vector<std::vector<T>> rows(num_rows);
  for (auto& row : rows) {
    for (size_t i = 0; i < num_elements; ++i) row.push_back(i % 2 == 0 ? numbers(random) : -numbers(random));
  }
  std::vector<T> expected = rows.front();
  for (size_t row = 1; row < num_rows; ++row) {
    for (size_t i = 0; i < num_elements; ++i) expected[i] += rows[row][i];
  }
  std::vector<const T*> pointers;
  for (const auto& row : rows) pointers.push_back(row.data());
  std::vector<T> out(num_elements);
  add_in_order(out.data(), pointers.data(), num_rows, num_elements);
  EXPECT_EQ(out, expected) << num_rows << " rows of " << num_elements;
  std::vector<T>& overwritten = rows[num_rows / 2];
  add_in_order(overwritten.data(), pointers.data(), num_rows, num_elements);
  EXPECT_EQ(overwritten, expected) << num_rows << " rows of " << num_elements << ", in place";
}

// The oracle adds in fp32, and rounds by libtorch's conversion. `magnitude`: the logarithm of typical numbers.
template <class T>
void expect_sums_rounded_once(size_t num_rows, size_t num_elements, float magnitude) {
  std::mt19937 random(static_cast<unsigned>(num_rows * 1000 + num_elements));
  std::lognormal_distribution<float> numbers(magnitude, 2);
  std::vector<std::vector<T>> rows(num_rows);
  std::vector<float> sums(num_elements, -0.0F);  // to which anything adds as itself
  for (auto& row : rows) {
    for (float& sum : sums) {
      row.push_back(static_cast<T>(random() % 2 == 0 ? numbers(random) : -numbers(random)));
      sum += static_cast<float>(row.back());
    }
  }
  std::vector<const T*> pointers;
  for (const auto& row : rows) pointers.push_back(row.data());
  std::vector<T>& out = rows[num_rows / 2];
  add_in_order(out.data(), pointers.data(), num_rows, num_elements);
  for (size_t i = 0; i < num_elements; ++i) {
    ASSERT_EQ(out[i].x, static_cast<T>(sums[i]).x) << num_rows << " rows of " << num_elements << ", element " << i;
  }
}

TEST(AddInOrder, HasTheBitsOfALoop) {
  for (const size_t num_rows : {1, 2, 3, 4, 7, 64}) {
    for (const size_t num_elements : {0, 1, 15, 64, 65, 1000, 4099}) {
      expect_the_bits_of_a_loop<float>(num_rows, num_elements);
      expect_the_bits_of_a_loop<double>(num_rows, num_elements);
    }
  }
}

// Some sums of small numbers are subnormal in half, and some of the large ones above its largest number.
TEST(AddInOrder, AddsNumbersOf16BitsInFp32AndRoundsOnce) {
  for (const size_t num_rows : {1, 2, 3, 4, 7, 64}) {
    for (const size_t num_elements : {0, 1, 15, 64, 65, 1000, 4099}) {
      for (const float magnitude : {-14.0F, 0.0F, 7.0F}) {
        expect_sums_rounded_once<c10::BFloat16>(num_rows, num_elements, magnitude);
        expect_sums_rounded_once<c10::Half>(num_rows, num_elements, magnitude);
      }
    }
  }
}

}  // namespace
}  // namespace fulgur
