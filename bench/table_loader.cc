// Batches of 1,024 samples of a Parquet file, in random order: rows per second of an epoch. bench/python_tables.py
// makes the file, runs this program beside Python's, and says how to start both.
//   table_loader <file.parquet> <number of epochs>
#include <ATen/Parallel.h>
#include <arrow/table.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <vector>

#include "fulgur/data/data_loader.h"
#include "fulgur/data/tables/read_table.h"
#include "fulgur/data/tables/table_schema.h"
#include "fulgur/data/tensor_dataset.h"

namespace {

using namespace fulgur;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  at::set_num_threads(1);
  const auto start = std::chrono::steady_clock::now();
  const auto table = read_table(argv[1]);
  const double read_s = seconds_since(start);
  const TableSchema schema = TableSchema::fit(*table, {.target = "label"});
  const auto dataset = TensorDataset::make(schema.encode(*table));
  fmt::print("read {:.4f} s\nencode {:.4f} s\n", read_s, seconds_since(start) - read_s);
  DataLoader loader(dataset, {.batch_size = 1024, .shuffle = true, .seed = 1});
  for (int epoch = 0; epoch < std::atoi(argv[2]); ++epoch) {
    const auto begin = std::chrono::steady_clock::now();
    int64_t rows = 0;
    loader.begin_epoch(epoch);
    while (const auto batch = loader.next()) rows += batch->batch_size();
    fmt::print("epoch {:.0f} rows/s\n", static_cast<double>(rows) / seconds_since(begin));
  }
}
