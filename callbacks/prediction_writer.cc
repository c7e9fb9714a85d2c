#include "fulgur/callbacks/prediction_writer.h"

#include <ATen/ops/cat.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/safetensors.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

Batch with_dim_0(const Batch& prediction) {
  std::vector<Batch::Entry> entries;
  for (const auto& [name, tensor] : prediction)
    entries.emplace_back(name, tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor);
  return Batch(std::move(entries));
}

int64_t bytes_of(const Batch& batch) {
  int64_t num_bytes = 0;
  for (const auto& [name, tensor] : batch) num_bytes += static_cast<int64_t>(tensor.nbytes());
  return num_bytes;
}

// Whether the tensors of both can be joined along dim 0.
bool fits(const Batch& a, const Batch& b) {
  return std::ranges::equal(a, b, [](const Batch::Entry& x, const Batch::Entry& y) {
    return x.first == y.first && x.second.scalar_type() == y.second.scalar_type() &&
           x.second.sizes().slice(1) == y.second.sizes().slice(1);
  });
}

std::string prefix_of(const TrainerControl& trainer) { return fmt::format("rank{}-part", trainer.global_rank()); }

}  // namespace

void PredictionWriterOptions::describe(FieldVisitor& visit) {
  visit({.name = "dirpath", .help = "folder of the predictions; empty: predictions/ in the run's folder"}, &dirpath);
  visit({.name = "part_size_mib", .help = "size from which on a part is written", .unit = "MiB", .min = 1},
        &part_size_mib);
}

PredictionWriter::PredictionWriter(Options options) : options_(std::move(options)) {
  check_fields("PredictionWriter", options_);
}

std::shared_ptr<PredictionWriter> PredictionWriter::make(Options options) {
  return std::make_shared<PredictionWriter>(std::move(options));
}

fs::path PredictionWriter::folder(TrainerControl& trainer) const {
  return options_.dirpath.empty() ? trainer.run_dir() / "predictions" : options_.dirpath;
}

void PredictionWriter::setup(TrainerControl& trainer, EntryPoint entry_point) {
  if (entry_point != EntryPoint::predict) return;
  part_.clear();
  files_.clear();
  part_bytes_ = 0;
  const fs::path to = folder(trainer);
  make_folders(to);
  for (const fs::path& file : list_folder(to)) {
    if (!file.filename().string().starts_with(prefix_of(trainer))) continue;
    throw SetupError(fmt::format(
        "PredictionWriter: '{}' has predictions of another run; move them away, or set dirpath", to.string()));
  }
}

void PredictionWriter::on_predict_batch_end(TrainerControl& trainer, const Batch& prediction, const Batch&,
                                            int64_t batch_idx) {
  const Batch next = with_dim_0(prediction.to(c10::kCPU));
  const int64_t loader = trainer.state().dataloader_idx;
  if (!part_.empty() && (loader != dataloader_idx_ || !fits(part_.front(), next))) write(trainer);
  if (part_.empty()) {
    first_batch_ = batch_idx;
    dataloader_idx_ = loader;
  }
  part_.push_back(next);
  part_bytes_ += bytes_of(next);
  if (part_bytes_ >= options_.part_size_mib << 20) write(trainer);
}

void PredictionWriter::on_predict_epoch_end(TrainerControl& trainer) { write(trainer); }

void PredictionWriter::write(TrainerControl& trainer) {
  if (part_.empty()) return;
  NamedTensors joined;
  for (const auto& [name, first] : part_.front()) {
    std::vector<at::Tensor> pieces;
    for (const Batch& prediction : part_) pieces.push_back(prediction[name]);
    joined.emplace_back(name, at::cat(pieces));
  }
  const auto text = [](int64_t number) { return fmt::format("{}", number); };
  files_.push_back(folder(trainer) / fmt::format("{}{:05}.safetensors", prefix_of(trainer), files_.size()));
  write_safetensors(files_.back(), joined,
                    {{"dataloader_idx", text(dataloader_idx_)},
                     {"first_batch", text(first_batch_)},
                     {"num_batches", text(std::ssize(part_))},
                     {"rank", text(trainer.global_rank())},
                     {"world_size", text(trainer.world_size())}});
  part_.clear();
  part_bytes_ = 0;
}

}  // namespace fulgur
