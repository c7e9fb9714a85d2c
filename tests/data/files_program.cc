// Reads files for files_test.py: files_program arrays <to> <from>... writes the arrays of files as safetensors;
// files_program tar <shard> <cache> prints "<key> <extension> <content in hex>" of each file.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string_view>

#include "fulgur/data/files/array_dataset.h"
#include "fulgur/data/files/tar_dataset.h"

namespace {

using namespace fulgur;

void print_samples(const TarDataset& dataset) {
  for (int64_t i = 0; i < dataset.size(); ++i) {
    const TarSample& sample = dataset.sample(i);
    for (const TarSample::File& file : sample.files()) {
      fmt::print("{} {} ", sample.key(), file.extension);
      for (const char c : sample.text(file.extension)) fmt::print("{:02x}", static_cast<uint8_t>(c));
      fmt::print("\n");
    }
  }
}

NamedTensors read_all(std::span<char*> files) {
  NamedTensors arrays;
  for (const char* file : files) std::ranges::copy(read_arrays(file), std::back_inserter(arrays));
  return arrays;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 4) throw std::invalid_argument("three arguments are needed");
  const std::string_view what = argv[1];
  if (what == "arrays") write_safetensors(argv[2], read_all({argv + 3, argv + argc}));
  if (what == "tar") print_samples(TarDataset({argv[2]}, undecoded, {.cache = argv[3]}));
} catch (const std::exception& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 3;
}
