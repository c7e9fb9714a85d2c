// A loader goes on at every batch of an epoch over files of each kind, with and without workers, on one rank and on
// two, and on one where two stopped: the samples that follow are those of the whole epoch, each once.
#include <ATen/ops/arange.h>
#include <archive.h>
#include <archive_entry.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/files/array_dataset.h"
#include "fulgur/data/files/record_dataset.h"
#include "fulgur/data/files/tar_dataset.h"
#include "fulgur/data/files/token_dataset.h"
#include "fulgur/data/files/token_writer.h"
#include "fulgur/data/images/image_dataset.h"
#include "fulgur/data/tables/read_table.h"
#include "fulgur/data/tables/table_schema.h"
#include "fulgur/data/tensor_dataset.h"
#include "tests/data/png_file.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using DatasetPtr = std::shared_ptr<const Dataset>;

constexpr int64_t kSamples = 24, kBatch = 3;

void write(const fs::path& file, std::string_view bytes) { std::ofstream(file, std::ios::binary) << bytes; }

DatasetPtr records(const fs::path& folder) {
  std::string bytes(2 * kSamples, '\0');
  std::iota(bytes.begin(), bytes.end(), char{0});
  write(folder / "records.bin", bytes);
  return RecordDataset::make({folder / "records.bin"}, {{.name = "label"}, {.name = "x"}});
}

DatasetPtr arrays(const fs::path& folder) {
  write_safetensors(folder / "arrays.safetensors", {{"x", at::arange(kSamples)}});
  return ArrayDataset::make({folder / "arrays.safetensors"});
}

DatasetPtr tokens(const fs::path& folder) {
  std::vector<uint32_t> text(4 * kSamples);
  std::iota(text.begin(), text.end(), 0U);
  TokenWriter writer(folder / "text.tokens", 1000);
  writer.write(text);
  writer.commit();
  return TokenDataset::make({folder / "text.tokens"}, {.length = 4});
}

DatasetPtr tar(const fs::path& folder) {
  const fs::path file = folder / "shard.tar";
  ::archive* out = ::archive_write_new();
  ::archive_write_set_format_ustar(out);
  ::archive_write_open_filename(out, file.c_str());
  ::archive_entry* entry = ::archive_entry_new();
  for (int64_t i = 0; i < kSamples; ++i) {
    const std::string content = std::to_string(i);
    ::archive_entry_set_pathname(entry, c10::str(100 + i, ".cls").c_str());
    ::archive_entry_set_size(entry, std::ssize(content));
    ::archive_entry_set_filetype(entry, AE_IFREG);
    ::archive_write_header(out, entry);
    ::archive_write_data(out, content.data(), content.size());
  }
  ::archive_entry_free(entry);
  ::archive_write_free(out);
  return TarDataset::make({file});
}

DatasetPtr pictures(const fs::path& folder) {
  for (uint32_t i = 0; i < kSamples; ++i) {
    testing::write_png(folder / "pictures" / c10::str(i % 3) / c10::str(100 + i, ".png"), 12, 10, i);
  }
  return ImageDataset::from_folder(folder / "pictures", {.size = 8, .augment = true});
}

DatasetPtr table(const fs::path& folder) {
  std::string text = "x,kind\n";
  for (int64_t i = 0; i < kSamples; ++i) text += c10::str(i * i, ",", i % 2 == 0 ? "even" : "odd", "\n");
  write(folder / "table.csv", text);
  const auto rows = read_table(folder / "table.csv");
  return TensorDataset::make(TableSchema::fit(*rows, {.target = "kind"}).encode(*rows));
}

std::string text_of(const Batch& batch) {
  std::string text;
  for (const auto& [name, tensor] : batch) text += c10::str(name, tensor);
  return text;
}

std::vector<std::string> rest_of(Loader& loader) {
  std::vector<std::string> batches;
  while (const auto batch = loader.next()) batches.push_back(text_of(*batch));
  return batches;
}

struct FileKind {
  const char* name;
  DatasetPtr (*make)(const fs::path& folder);
};

class FilePositions : public ::testing::TestWithParam<FileKind> {
 protected:
  std::shared_ptr<DataLoader> loader(int64_t workers, int64_t rank, int64_t world_size,
                                     int64_t batch_size = kBatch) const {
    auto made = DataLoader::make(dataset_, {.batch_size = batch_size, .shuffle = true, .seed = 4, .workers = workers});
    made->set_shard({.rank = rank, .world_size = world_size, .even = true});
    made->begin_epoch(1);
    return made;
  }

  testing::TempDir folder_;
  const DatasetPtr dataset_ = GetParam().make(folder_.path());
};

TEST_P(FilePositions, AnEpochGoesOnAtEveryBatch) {
  ASSERT_EQ(dataset_->size(), kSamples);
  for (const int64_t world_size : {1, 2}) {
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const auto expected = rest_of(*loader(0, rank, world_size));
      ASSERT_EQ(std::ssize(expected), kSamples / kBatch / world_size);
      for (const int64_t workers : {0, 1, 3}) {
        const auto interrupted = loader(workers, rank, world_size);
        for (auto left = expected.begin(); left != expected.end(); ++left) {
          const auto resumed = loader(workers, rank, world_size);
          resumed->go_to(interrupted->position());
          EXPECT_EQ(rest_of(*resumed), std::vector(left, expected.end())) << workers << " workers";
          interrupted->next();
        }
      }
    }
  }
}

TEST_P(FilePositions, OneRankGoesOnWhereTwoStopped) {
  const auto expected = rest_of(*loader(0, 0, 1, /*batch_size=*/1));
  for (const int64_t workers : {0, 3}) {
    const std::array two{loader(workers, 0, 2, 1), loader(workers, 1, 2, 1)};
    std::vector<std::string> before;
    for (int64_t batches = 0; batches < kSamples / 2; ++batches) {
      const auto one = loader(workers, 0, 1, 1);
      one->go_to(two[0]->position());
      auto all = before;
      std::ranges::copy(rest_of(*one), std::back_inserter(all));
      EXPECT_EQ(all, expected) << "after " << batches << " batches, " << workers << " workers";
      for (const auto& rank : two) before.push_back(text_of(rank->next().value()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, FilePositions,
                         ::testing::Values(FileKind{"records", records}, FileKind{"arrays", arrays},
                                           FileKind{"tokens", tokens}, FileKind{"tar", tar},
                                           FileKind{"pictures", pictures}, FileKind{"table", table}),
                         [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace fulgur
