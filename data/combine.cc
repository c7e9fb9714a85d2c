#include "fulgur/data/combine.h"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/data/sampler.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

DatasetPtr not_null(DatasetPtr dataset, std::string_view function) {
  if (dataset == nullptr) throw UsageError(fmt::format("{}: the dataset is a null pointer", function));
  return dataset;
}

// Wraps a dataset and takes its size, name, digest and options from it.
class Derived : public Dataset {
 public:
  explicit Derived(DatasetPtr base) : base_(std::move(base)) {}
  int64_t size() const override { return base_->size(); }
  std::string digest() const override { return base_->digest(); }
  std::string sample_options() const override { return base_->sample_options(); }
  std::string name() const override { return base_->name(); }

 protected:
  const DatasetPtr base_;
};

class Mapped final : public Derived {
 public:
  using Change = std::function<Batch(const Batch&, Random&)>;
  Mapped(DatasetPtr base, Change change) : Derived(std::move(base)), change_(std::move(change)) {}
  Batch get(int64_t index, Random& random) const override { return change_(get_sample(*base_, index, random), random); }

 private:
  const Change change_;
};

class Subset final : public Derived {
 public:
  Subset(DatasetPtr base, std::vector<int64_t> indices)
      : Derived(std::move(base)), indices_(at::tensor(indices, at::kLong)) {
    for (const int64_t index : indices) {
      if (index < 0 || index >= base_->size()) {
        throw UsageError(
            fmt::format("subset: {} has {} samples, and none with the index {}", base_->name(), base_->size(), index));
      }
      hash_ = mix_bits(hash_ + static_cast<uint64_t>(index));
    }
  }
  int64_t size() const override { return indices_.numel(); }
  std::string digest() const override { return fmt::format("{}[{:016x}]", base_->digest(), hash_); }
  Batch get(int64_t index, Random& random) const override {
    return get_sample(*base_, indices_.const_data_ptr<int64_t>()[index], random);
  }
  Batch get_batch(const at::Tensor& indices, std::span<Random> random) const override {
    return base_->get_batch(indices_.index_select(0, indices), random);
  }

 private:
  const at::Tensor indices_;
  uint64_t hash_ = 0;  // hash of the indices, for the digest
};

std::string joined_digest(const std::vector<DatasetPtr>& datasets) {
  std::string all;
  for (const DatasetPtr& dataset : datasets) all += fmt::format("{}:{};", dataset->size(), dataset->digest());
  return all;
}

// Empty if no dataset has options.
std::string joined_options(const std::vector<DatasetPtr>& datasets) {
  std::vector<std::string> all;
  for (const DatasetPtr& dataset : datasets) all.push_back(dataset->sample_options());
  const bool has_any = std::ranges::any_of(all, [](const std::string& options) { return !options.empty(); });
  return has_any ? fmt::format("{}", fmt::join(all, "; ")) : std::string();
}

std::string joined_name(const std::vector<DatasetPtr>& datasets) {
  std::string all;
  for (const DatasetPtr& dataset : datasets) all += (all.empty() ? "" : " + ") + dataset->name();
  return all;
}

class Concatenated final : public Dataset {
 public:
  explicit Concatenated(std::vector<DatasetPtr> parts) : parts_(std::move(parts)) {
    for (const DatasetPtr& part : parts_) ends_.push_back(size() + not_null(part, "concatenate")->size());
  }
  int64_t size() const override { return ends_.empty() ? 0 : ends_.back(); }
  std::string digest() const override { return joined_digest(parts_); }
  std::string sample_options() const override { return joined_options(parts_); }
  std::string name() const override { return joined_name(parts_); }
  Batch get(int64_t index, Random& random) const override {
    const auto part = static_cast<size_t>(std::ranges::upper_bound(ends_, index) - ends_.begin());
    return get_sample(*parts_[part], part == 0 ? index : index - ends_[part - 1], random);
  }

 private:
  const std::vector<DatasetPtr> parts_;
  std::vector<int64_t> ends_{};
};

class Mixed final : public Dataset {
 public:
  Mixed(std::vector<DatasetPtr> parts, const std::vector<double>& weights, int64_t size)
      : parts_(std::move(parts)),
        digest_(joined_digest(parts_) + fmt::format("{}", fmt::join(weights, ","))),
        part_of_(static_cast<size_t>(size)),
        index_in_(part_of_.size()) {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<int64_t> given(parts_.size(), 0);
    for (size_t i = 0; i < part_of_.size(); ++i) {
      size_t most_behind = 0;
      double most = -1.0;
      for (size_t part = 0; part < parts_.size(); ++part) {
        const double behind = weights[part] / total * static_cast<double>(i + 1) - static_cast<double>(given[part]);
        if (weights[part] > 0 && behind > most) std::tie(most_behind, most) = std::pair(part, behind);
      }
      part_of_[i] = static_cast<uint32_t>(most_behind);
      index_in_[i] = given[most_behind]++ % parts_[most_behind]->size();
    }
  }
  int64_t size() const override { return std::ssize(part_of_); }
  std::string digest() const override { return digest_; }
  std::string sample_options() const override { return joined_options(parts_); }
  std::string name() const override { return joined_name(parts_); }
  Batch get(int64_t index, Random& random) const override {
    const auto i = static_cast<size_t>(index);
    return get_sample(*parts_[part_of_[i]], index_in_[i], random);
  }

 private:
  const std::vector<DatasetPtr> parts_;
  const std::string digest_;
  std::vector<uint32_t> part_of_;
  std::vector<int64_t> index_in_;
};

int64_t bytes_of(const Batch& sample) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : sample) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// Tensors with memory of their own: a sample may be part of a larger tensor, or of a file that is mapped.
Batch copy_of(const Batch& sample) {
  std::vector<Batch::Entry> tensors;
  for (const auto& [name, tensor] : sample) tensors.emplace_back(name, tensor.clone());
  return Batch(std::move(tensors));
}

class CachedInMemory final : public Derived {
 public:
  CachedInMemory(DatasetPtr base, int64_t max_bytes) : Derived(std::move(base)), max_bytes_(max_bytes) {}
  Batch get(int64_t index, Random& random) const override {
    {
      const std::shared_lock lock(mutex_);
      if (const auto kept = samples_.find(index); kept != samples_.end()) return kept->second;
    }
    Batch sample = get_sample(*base_, index, random);
    const std::unique_lock lock(mutex_);
    if (const int64_t bytes = bytes_of(sample); num_bytes_ + bytes <= max_bytes_ && !samples_.contains(index)) {
      samples_.emplace(index, copy_of(sample));
      num_bytes_ += bytes;
    }
    return sample;
  }

 private:
  const int64_t max_bytes_;
  mutable std::shared_mutex mutex_{};
  mutable std::unordered_map<int64_t, Batch> samples_{};
  mutable int64_t num_bytes_ = 0;
};

class CachedOnDisk final : public Derived {
 public:
  CachedOnDisk(DatasetPtr base, fs::path folder) : Derived(std::move(base)), folder_(std::move(folder)) {
    constexpr int64_t kMostBytes = 1 << 20;
    make_folders(folder_);
    std::string label = fmt::format("{}\n{} samples\ndigest '{}'\n", name(), size(), digest());
    if (const std::string options = sample_options(); !options.empty()) label += fmt::format("options '{}'\n", options);
    const fs::path file = folder_ / "dataset.txt";
    if (!fs::exists(file)) replace_file_atomically(file, [&](FileWriter& to) { to.write(label.data(), label.size()); });
    if (const std::string found = read_text_file(file, kMostBytes); found != label) {
      throw CheckpointError(fmt::format(
          "'{}' keeps samples of another dataset:\n{}This one is:\n{}Give another folder, or delete that one",
          folder_.string(), found, label));
    }
  }
  Batch get(int64_t index, Random& random) const override {
    constexpr int64_t kFilesInFolder = 1000;
    const fs::path folder = folder_ / fmt::format("{}", index / kFilesInFolder);
    const fs::path file = folder / fmt::format("{}.safetensors", index);
    if (fs::exists(file)) return read(file);
    Batch sample = get_sample(*base_, index, random);
    fs::create_directories(folder);
    std::map<std::string, std::string> places;
    for (const auto& [name, tensor] : sample) places[name] = std::to_string(places.size());
    replace_file_atomically(
        file, [&](FileWriter& to) { write_safetensors(to, NamedTensors(sample.begin(), sample.end()), places); });
    return sample;
  }

 private:
  static Batch read(const fs::path& file) {
    const SafetensorsFile kept(file);
    std::map<std::pair<size_t, std::string>, std::string> names;  // by place, which earlier versions did not write
    for (const SafetensorsEntry& entry : kept.entries()) {
      const auto place = kept.metadata().find(entry.name);
      const std::string order = place == kept.metadata().end() ? fmt::format("{}", names.size()) : place->second;
      names.emplace(std::pair(order.size(), order), entry.name);
    }
    std::vector<Batch::Entry> tensors;
    for (const auto& [place, name] : names) tensors.emplace_back(name, kept.tensor(name));
    return Batch(std::move(tensors));
  }

  const fs::path folder_;
};

}  // namespace

DatasetPtr map_samples(DatasetPtr dataset, std::function<Batch(const Batch&, Random&)> change) {
  return std::make_shared<Mapped>(not_null(std::move(dataset), "map_samples"), std::move(change));
}

DatasetPtr subset(DatasetPtr dataset, std::vector<int64_t> indices) {
  return std::make_shared<Subset>(not_null(std::move(dataset), "subset"), std::move(indices));
}

DatasetPtr filter_samples(DatasetPtr dataset, const std::function<bool(const Batch&)>& keeps) {
  not_null(dataset, "filter_samples");
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < dataset->size(); ++i) {
    Random random = SampleRandom().of(i);
    if (keeps(get_sample(*dataset, i, random))) kept.push_back(i);
  }
  return subset(std::move(dataset), std::move(kept));
}

std::vector<DatasetPtr> split(const DatasetPtr& dataset, const std::vector<double>& fractions, uint64_t seed) {
  const int64_t size = not_null(dataset, "split")->size();
  const double sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  if (std::abs(sum - 1.0) > 1e-6) throw UsageError(fmt::format("split: the fractions add up to {:g}, not to 1", sum));
  const at::Tensor order = RandomSampler(size, seed).indices(0);
  const int64_t* samples = order.const_data_ptr<int64_t>();
  std::vector<DatasetPtr> parts;
  double end_fraction = 0.0;
  int64_t begin = 0;
  for (size_t i = 0; i < fractions.size(); ++i) {
    end_fraction += fractions[i];
    const bool is_last = i + 1 == fractions.size();  // the sum of all fractions is not quite 1
    const int64_t end = is_last ? size : std::llround(std::min(end_fraction, 1.0) * static_cast<double>(size));
    if (end <= begin) {
      throw UsageError(fmt::format("split: a part of {} of {} samples has none", fractions[i], size));
    }
    parts.push_back(subset(dataset, {samples + begin, samples + end}));
    begin = end;
  }
  return parts;
}

DatasetPtr concatenate(std::vector<DatasetPtr> datasets) { return std::make_shared<Concatenated>(std::move(datasets)); }

DatasetPtr mix(std::vector<std::pair<DatasetPtr, double>> weighted, int64_t size) {
  if (size < 0) throw UsageError(fmt::format("mix: {} is no number of samples", size));
  std::vector<DatasetPtr> parts;
  std::vector<double> weights;
  for (auto& [dataset, weight] : weighted) {
    if (!(weight >= 0) || !std::isfinite(weight)) throw UsageError(fmt::format("mix: {} is no weight", weight));
    if (not_null(dataset, "mix")->size() == 0 && weight > 0) {
      throw UsageError(fmt::format("mix: {} has no samples to mix", dataset->name()));
    }
    parts.push_back(std::move(dataset));
    weights.push_back(weight);
  }
  if (std::ranges::count_if(weights, [](double weight) { return weight > 0; }) == 0) {
    throw UsageError("mix: give a dataset with a weight above 0");
  }
  return std::make_shared<Mixed>(std::move(parts), weights, size);
}

DatasetPtr cache_in_memory(DatasetPtr dataset, int64_t max_bytes) {
  return std::make_shared<CachedInMemory>(not_null(std::move(dataset), "cache_in_memory"), max_bytes);
}

DatasetPtr cache_on_disk(DatasetPtr dataset, fs::path folder) {
  return std::make_shared<CachedOnDisk>(not_null(std::move(dataset), "cache_on_disk"), std::move(folder));
}

}  // namespace fulgur
