#include "fulgur/distributed/add_in_order.h"

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

TEST(AddInOrder, HasTheBitsOfALoop) {
  for (const size_t num_rows : {1, 2, 3, 4, 7, 64}) {
    for (const size_t num_elements : {0, 1, 15, 64, 65, 1000, 4099}) {
      expect_the_bits_of_a_loop<float>(num_rows, num_elements);
      expect_the_bits_of_a_loop<double>(num_rows, num_elements);
    }
  }
}

}  // namespace
}  // namespace fulgur
