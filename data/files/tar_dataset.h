#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/data/dataset.h"

namespace fulgur {

// The files of one sample: all files of a shard that share their path up to the first dot of the name. "train/0001.jpg"
// and "train/0001.seg.png" are "jpg" and "seg.png" of the sample "train/0001".
class TarSample {
 public:
  // Where a file of the sample lies in the shard.
  struct File {
    std::string extension;  // what follows the first dot
    int64_t begin, num_bytes;
  };

  TarSample(std::shared_ptr<const MemoryMap> shard, std::string key) : shard_(std::move(shard)), key_(std::move(key)) {}
  void add(File file) { files_.push_back(std::move(file)); }

  const std::string& key() const { return key_; }
  const std::vector<File>& files() const { return files_; }  // in the order of the shard
  bool contains(std::string_view extension) const { return find(extension) != nullptr; }

  // The content of a file as uint8 [num_bytes], a view of the mapped shard. This and the following throw
  // std::runtime_error, naming the shard and the sample, if there is no such file.
  at::Tensor bytes(std::string_view extension) const;
  std::string_view text(std::string_view extension) const;  // the same bytes; lives as long as the dataset
  int64_t number(std::string_view extension) const;         // a file that holds a decimal number, such as "cls"

 private:
  const File* find(std::string_view extension) const;
  const File& file(std::string_view extension) const;

  std::shared_ptr<const MemoryMap> shard_;
  std::string key_;
  std::vector<File> files_{};
};

// Makes a sample of files: decodes pictures, draws augmentations from `random`. Called by several threads at once.
using TarDecoder = std::function<Batch(const TarSample& sample, Random& random)>;

// The decoder without pictures: "cls" as an int64 number, each other file as its bytes, under the name of its
// extension.
Batch undecoded(const TarSample& sample, Random& random);

// The options of TarDataset.
struct TarOptions {
  std::filesystem::path cache{};  // folder into which compressed shards are unpacked once; empty: they are refused
  void describe(FieldVisitor& visit);
};

// Samples in tar files ("shards") in WebDataset's format, readable in any order. The constructor maps each shard and
// makes an index of its files, which reads a page of the shard per file and keeps about 200 bytes per file in memory.
//   auto train = TarDataset::make({"train-0000.tar", "train-0001.tar"}, [](const TarSample& sample, Random& random) {
//     return Batch{{"image", my_augmented_jpeg(sample.bytes("jpg"), random)}, {"label",
//     at::scalar_tensor(sample.number("cls"))}};
//   });
// Shuffle by a ShardSampler, so that reading from a disk stays mostly sequential. A shard whose name does not end in
// .tar counts as compressed: it is unpacked into the cache when it is first opened, which takes time and, on the disk,
// its uncompressed size.
//   Files without an extension, and those whose name begins with a dot, belong to no sample.
// Source: https://github.com/webdataset/webdataset, "The WebDataset Format".
class TarDataset final : public Dataset {
 public:
  // Throws UsageError if no shard or an empty function is given, or a compressed shard without a cache;
  // std::runtime_error as read_tar_index() says, or if a shard has no sample.
  explicit TarDataset(const std::vector<std::filesystem::path>& shards, TarDecoder decode = undecoded,
                      TarOptions options = {});
  static std::shared_ptr<TarDataset> make(const std::vector<std::filesystem::path>& shards,
                                          TarDecoder decode = undecoded, TarOptions options = {});

  int64_t size() const override { return std::ssize(samples_); }
  Batch get(int64_t index, Random& random) const override;
  std::string digest() const override { return digest_; }

  const TarSample& sample(int64_t index) const;
  const std::vector<int64_t>& shard_sizes() const { return shard_sizes_; }  // samples in each shard

 private:
  void add_shard(const std::shared_ptr<const MemoryMap>& shard, const std::string& name);

  TarDecoder decode_;
  std::vector<TarSample> samples_{};
  std::vector<int64_t> shard_sizes_{};
  std::string digest_;
};

}  // namespace fulgur
