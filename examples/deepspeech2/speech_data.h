#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "fulgur.h"

namespace deepspeech2 {

// What a model takes.
struct SpeechFormat {
  int64_t sample_rate = 8000;     // Hz
  int64_t frames_per_output = 2;  // frames of the spectrogram for one output of the model
};

// A sound file and what is said in it.
struct Utterance {
  std::filesystem::path audio;
  std::vector<int64_t> labels;  // labels_of() the transcript
  int64_t num_frames = 0;       // frames of the spectrogram
};

// The utterances under `folder` in the layout of LibriSpeech: lines "<name> <transcript>" in files *.trans.txt, and
// <name>.flac or <name>.wav beside them; in the order of their paths. Throws UsageError, naming file and line, if a
// sound is missing, cut off or too short for what is said in it, for a transcript that cannot be spelled, and if there
// are no utterances.
std::vector<Utterance> read_utterances(const std::filesystem::path& folder, const SpeechFormat& format);

// Samples: "spectrogram", float [num_frames, num_bins], and "labels", int64 [characters].
class SpeechDataset final : public fulgur::Dataset {
 public:
  SpeechDataset(std::vector<Utterance> utterances, int64_t sample_rate);
  int64_t size() const override { return std::ssize(utterances_); }
  fulgur::Batch get(int64_t index, fulgur::Random&) const override;

 private:
  std::vector<Utterance> utterances_;
  int64_t sample_rate_;  // Hz
};

// The spoken digits that the build has made for this program: 500 utterances for training, 60 of other voices and
// speeds each for validation and test.
std::filesystem::path default_folder();

struct SpeechDataOptions {
  std::filesystem::path path = default_folder();
  int64_t batch_size = 16;  // utterances
  SpeechFormat format{};    // taken from the model: it has no flag
  void describe(fulgur::FieldVisitor& visit);
};

// Batches of padded utterances: "spectrogram", float [batch_size, frames, bins], and "labels", int64 [batch_size,
// characters], each with a bool mask that is false for padding: "spectrogram_mask" and "labels_mask".
// The parts are the folders train, val and test of `path`; without a folder train, a tenth of the utterances each,
// drawn by the seed, is for validation and test. Utterances of similar length are in one batch of training. The first
// epoch goes from short to long ones (the paper's SortaGrad), later epochs visit the batches in an order drawn by the
// seed.
class SpeechData final : public fulgur::DataModule {
 public:
  using Options = SpeechDataOptions;
  SpeechData(Options options, uint64_t seed);
  void setup(fulgur::EntryPoint entry_point) override;
  std::shared_ptr<fulgur::Loader> train_dataloader() override;
  fulgur::LoaderList val_dataloader() override;
  fulgur::LoaderList test_dataloader() override;

 private:
  std::shared_ptr<fulgur::Loader> evaluation_loader(const std::vector<Utterance>& utterances) const;

  Options options_;
  uint64_t seed_;
  std::vector<Utterance> train_, val_, test_;
};

}  // namespace deepspeech2
