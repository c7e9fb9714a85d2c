#include "fulgur/data/files/tar_dataset.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <stdexcept>
#include <unordered_map>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/data/files/content_digest.h"
#include "fulgur/data/files/tar_index.h"
#include "fulgur/data/files/unpack.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

struct SplitPath {
  std::string_view key, extension;
};

// nullopt for a file that belongs to no sample.
std::optional<SplitPath> split(std::string_view path) {
  const size_t name = path.rfind('/') + 1;  // npos + 1 is 0
  const size_t dot = path.find('.', name);
  if (dot == std::string_view::npos || dot == name) return std::nullopt;
  return SplitPath{path.substr(0, dot), path.substr(dot + 1)};
}

fs::path as_tar(const fs::path& shard, const fs::path& cache) {
  if (shard.extension() == ".tar") return shard;
  if (cache.empty()) {
    throw UsageError(
        fmt::format("'{}' is not named .tar, so it must be a compressed archive; give `cache`, a folder "
                    "into which it is unpacked once, or unpack it yourself",
                    shard.string()));
  }
  return unpack_once(shard, cache);
}

}  // namespace

at::Tensor TarSample::bytes(std::string_view extension) const {
  const File& found = file(extension);
  return shard_->tensor(found.begin, {found.num_bytes}, at::kByte);
}

std::string_view TarSample::text(std::string_view extension) const {
  const File& found = file(extension);
  return {shard_->bytes().data() + found.begin, static_cast<size_t>(found.num_bytes)};
}

int64_t TarSample::number(std::string_view extension) const {
  std::string_view digits = text(extension);
  while (!digits.empty() && (digits.back() == '\n' || digits.back() == '\r')) digits.remove_suffix(1);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error == std::errc() && end == digits.data() + digits.size()) return value;
  throw std::runtime_error(fmt::format("{}: file '{}' of sample '{}' is no whole number: '{:.20}'",
                                       shard_->path().string(), extension, key_, digits));
}

const TarSample::File* TarSample::find(std::string_view extension) const {
  const auto found = std::ranges::find(files_, extension, &File::extension);
  return found == files_.end() ? nullptr : &*found;
}

const TarSample::File& TarSample::file(std::string_view extension) const {
  if (const File* found = find(extension)) return *found;
  std::vector<std::string> known;
  for (const File& each : files_) known.push_back(each.extension);
  throw std::runtime_error(fmt::format("{}: sample '{}': {}", shard_->path().string(), key_,
                                       unknown_name_message("file", extension, known)));
}

Batch undecoded(const TarSample& sample, Random&) {
  std::vector<Batch::Entry> entries;
  for (const TarSample::File& file : sample.files()) {
    const std::string& name = file.extension;
    entries.emplace_back(name, name == "cls" ? at::scalar_tensor(sample.number(name), at::kLong) : sample.bytes(name));
  }
  return Batch(std::move(entries));
}

void TarOptions::describe(FieldVisitor& visit) {
  visit({.name = "cache", .help = "folder into which compressed shards are unpacked once"}, &cache);
}

TarDataset::TarDataset(const std::vector<fs::path>& shards, TarDecoder decode, TarOptions options)
    : decode_(std::move(decode)) {
  if (shards.empty()) throw UsageError("TarDataset: no shard is given");
  if (!decode_) throw UsageError("TarDataset: the decoder is an empty function");
  std::string content;
  for (const fs::path& shard : shards) {
    const auto map = MemoryMap::open(as_tar(shard, options.cache));
    add_shard(map, shard.string());
    content += describe_content(shard, map->bytes());
  }
  digest_ = hex_digest(content);
}

std::shared_ptr<TarDataset> TarDataset::make(const std::vector<fs::path>& shards, TarDecoder decode,
                                             TarOptions options) {
  return std::make_shared<TarDataset>(shards, std::move(decode), std::move(options));
}

void TarDataset::add_shard(const std::shared_ptr<const MemoryMap>& shard, const std::string& name) {
  const size_t first = samples_.size();
  std::unordered_map<std::string, size_t> places;  // in samples_, by key
  for (const TarEntry& entry : read_tar_index(shard->bytes(), name)) {
    const auto path = split(entry.path);
    if (!path) continue;
    const auto [place, is_new] = places.try_emplace(std::string(path->key), samples_.size());
    if (is_new) samples_.emplace_back(shard, place->first);
    samples_[place->second].add({std::string(path->extension), entry.begin, entry.num_bytes});
  }
  if (samples_.size() == first) throw std::runtime_error(fmt::format("{}: it has no sample", name));
  shard_sizes_.push_back(static_cast<int64_t>(samples_.size() - first));
}

const TarSample& TarDataset::sample(int64_t index) const {
  TORCH_CHECK_INDEX(index >= 0 && index < size(), "sample ", index, " of ", size());
  return samples_[static_cast<size_t>(index)];
}

Batch TarDataset::get(int64_t index, Random& random) const { return decode_(sample(index), random); }

}  // namespace fulgur
