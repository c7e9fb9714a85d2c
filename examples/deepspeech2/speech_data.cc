#include "examples/deepspeech2/speech_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "examples/deepspeech2/audio.h"
#include "examples/deepspeech2/ctc.h"

namespace deepspeech2 {
namespace {

using namespace fulgur;
namespace fs = std::filesystem;

constexpr int64_t kCacheBytes = int64_t{1} << 30;  // spectrograms of a part that are kept in memory
constexpr std::string_view kLayout =
    "--data.path is a folder with lines \"<name> <transcript>\" in *.trans.txt, and <name>.wav or <name>.flac beside "
    "it";

// Batches of similar length: from short to long in epoch 0, later in a random order.
class SortaGradSampler final : public BatchSampler {
 public:
  SortaGradSampler(const std::vector<int64_t>& lengths, int64_t batch_size, uint64_t seed)
      : sorted_(lengths, {.batch_size = batch_size, .shuffle = false, .seed = seed}),
        shuffled_(lengths, {.batch_size = batch_size, .shuffle = true, .seed = seed}) {}
  std::vector<at::Tensor> batches(int64_t epoch) const override {
    return (epoch == 0 ? sorted_ : shuffled_).batches(epoch);
  }
  int64_t size() const override { return sorted_.size(); }

 private:
  SimilarLengthSampler sorted_, shuffled_;
};

std::vector<fs::path> transcript_files(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    throw UsageError(fmt::format("there is no folder '{}'; {}", folder.string(), kLayout));
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().string().ends_with(".trans.txt")) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

fs::path audio_of(const fs::path& stem) {
  for (const char* extension : {".flac", ".wav"}) {
    fs::path file = stem;
    if (fs::exists(file += extension)) return file;
  }
  throw UsageError(fmt::format("there is neither '{0}.wav' nor '{0}.flac'", stem.string()));
}

Utterance read_utterance(const fs::path& folder, const std::string& line, const SpeechFormat& format) {
  const size_t space = line.find(' ');
  if (space == std::string::npos || space + 1 == line.size()) {
    throw UsageError(fmt::format("a line is a name, a space and a transcript; this one is '{}'", line));
  }
  const fs::path audio = audio_of(folder / line.substr(0, space));
  Utterance utterance{.audio = audio, .labels = labels_of(line.substr(space + 1))};
  utterance.num_frames = num_frames(num_audio_samples(audio, format.sample_rate), format.sample_rate);
  const int64_t needed = (min_output_frames(utterance.labels) - 1) * format.frames_per_output + 1;
  if (utterance.num_frames >= needed) return utterance;
  throw UsageError(
      fmt::format("'{}' has {} frames of 20 ms, one every 10 ms; its transcript '{}' needs {} or more: is "
                  "it that of another file?",
                  audio.string(), utterance.num_frames, text_of(utterance.labels), needed));
}

void append_utterances(std::vector<Utterance>& utterances, const fs::path& transcripts, const SpeechFormat& format) {
  std::ifstream stream(transcripts);
  int64_t line_number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++line_number;
    try {
      utterances.push_back(read_utterance(transcripts.parent_path(), line, format));
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("{}:{}: {}", transcripts.string(), line_number, error.what()));
    }
  }
}

DatasetPtr cached_dataset(const std::vector<Utterance>& utterances, int64_t sample_rate) {
  return cache_in_memory(std::make_shared<SpeechDataset>(utterances, sample_rate), kCacheBytes);
}

}  // namespace

std::vector<Utterance> read_utterances(const fs::path& folder, const SpeechFormat& format) {
  std::vector<Utterance> utterances;
  for (const fs::path& file : transcript_files(folder)) append_utterances(utterances, file, format);
  if (utterances.empty()) {
    throw UsageError(fmt::format("there are no utterances in '{}'; {}", folder.string(), kLayout));
  }
  return utterances;
}

SpeechDataset::SpeechDataset(std::vector<Utterance> utterances, int64_t sample_rate)
    : utterances_(std::move(utterances)), sample_rate_(sample_rate) {}

Batch SpeechDataset::get(int64_t index, Random&) const {
  const Utterance& utterance = utterances_[static_cast<size_t>(index)];
  return {{"spectrogram", log_spectrogram(read_audio(utterance.audio, sample_rate_), sample_rate_)},
          {"labels", torch::tensor(utterance.labels, at::kLong)}};
}

fs::path default_folder() { return fs::read_symlink("/proc/self/exe").parent_path() / "spoken_digits"; }

void SpeechDataOptions::describe(FieldVisitor& visit) {
  visit({.name = "path",
         .help = "folder of <name>.wav or .flac with lines \"<name> <transcript>\" in *.trans.txt beside them; it may "
                 "have subfolders train, val and test"},
        &path);
  visit({.name = "batch_size", .help = "utterances per step", .min = 1}, &batch_size);
}

SpeechData::SpeechData(Options options, uint64_t seed) : options_(std::move(options)), seed_(seed) {}

void SpeechData::setup(EntryPoint) {
  if (!train_.empty()) return;
  const auto read = [&](const fs::path& folder) { return read_utterances(folder, options_.format); };
  if (fs::exists(options_.path / "train")) {
    train_ = read(options_.path / "train");
    val_ = read(options_.path / "val");
    test_ = read(options_.path / "test");
    return;
  }
  const std::vector<Utterance> all = read(options_.path);
  const int64_t num_held_out = std::ssize(all) / 10;
  if (num_held_out == 0) {
    throw UsageError(fmt::format("'{}' has {} utterances; with 10 or more, a tenth each is for validation and test",
                                 options_.path.string(), all.size()));
  }
  const at::Tensor order = RandomSampler(std::ssize(all), seed_).indices(0);
  for (int64_t i = 0; i < std::ssize(all); ++i) {
    auto& part = i < num_held_out ? val_ : i < 2 * num_held_out ? test_ : train_;
    part.push_back(all[static_cast<size_t>(order.const_data_ptr<int64_t>()[i])]);
  }
}

std::shared_ptr<Loader> SpeechData::train_dataloader() {
  std::vector<int64_t> lengths;
  for (const Utterance& utterance : train_) lengths.push_back(utterance.num_frames);
  return DataLoader::make(cached_dataset(train_, options_.format.sample_rate),
                          {.seed = seed_,
                           .batch_sampler = std::make_shared<SortaGradSampler>(lengths, options_.batch_size, seed_),
                           .collate = pad_to_longest()});
}

std::shared_ptr<Loader> SpeechData::evaluation_loader(const std::vector<Utterance>& utterances) const {
  return DataLoader::make(cached_dataset(utterances, options_.format.sample_rate),
                          {.batch_size = options_.batch_size, .collate = pad_to_longest()});
}

LoaderList SpeechData::val_dataloader() { return evaluation_loader(val_); }

LoaderList SpeechData::test_dataloader() { return evaluation_loader(test_); }

}  // namespace deepspeech2
