#include "examples/deepspeech2/audio.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/fft_irfft.h>
#include <ATen/ops/fft_rfft.h>
#include <ATen/ops/hann_window.h>
#include <ATen/ops/stft.h>
#include <fmt/format.h>
#include <sndfile.h>

#include <array>
#include <fstream>
#include <memory>
#include <vector>

#include "fulgur/base/error.h"

namespace deepspeech2 {
namespace {

using fulgur::UsageError;
namespace fs = std::filesystem;

constexpr int64_t kWindowsPerSecond = 50;  // windows of 20 ms side by side
constexpr int64_t kFramesPerSecond = 100;  // a new window begins every 10 ms
constexpr double kEps = 1e-6;              // keeps silence from dividing by zero

int64_t window_size(int64_t sample_rate) { return sample_rate / kWindowsPerSecond; }
int64_t hop_size(int64_t sample_rate) { return sample_rate / kFramesPerSecond; }

struct CloseSound {
  void operator()(SNDFILE* sound) const { sf_close(sound); }
};

struct Sound {
  SF_INFO info{};
  std::unique_ptr<SNDFILE, CloseSound> file;
};

UsageError cut_off(const fs::path& file, int64_t num_frames) {
  return UsageError(
      fmt::format("'{}' ends before the {} samples that its header says: it was cut off; write it again, or "
                  "remove its line from the transcripts",
                  file.string(), num_frames));
}

// libsndfile reads what is left of a WAV that was cut off, and tells nobody.
void check_riff_size(const fs::path& file) {
  constexpr uint64_t kUnknown = 0x7ff00000;  // programs that write to a pipe give this size or more
  std::array<unsigned char, 8> header{};
  std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(header.data()), header.size());
  if (std::string(header.begin(), header.begin() + 4) != "RIFF") return;
  uint64_t num_bytes = header.size();
  for (size_t i = 0; i < 4; ++i) num_bytes += uint64_t{header[4 + i]} << (8 * i);
  if (num_bytes <= fs::file_size(file) || num_bytes >= kUnknown) return;
  throw UsageError(
      fmt::format("'{}' has {} bytes, but its header says {}: it was cut off; write it again, or remove "
                  "its line from the transcripts",
                  file.string(), fs::file_size(file), num_bytes));
}

// Reads the last sample, and goes back to the first one: a FLAC that was cut off has none.
void check_last_sample(const fs::path& file, const Sound& sound) {
  if (sound.info.frames == 0 || sound.info.seekable == 0) return;
  std::vector<float> sample(static_cast<size_t>(sound.info.channels));
  if (sf_seek(sound.file.get(), sound.info.frames - 1, SEEK_SET) < 0 ||
      sf_readf_float(sound.file.get(), sample.data(), 1) != 1) {
    throw cut_off(file, sound.info.frames);
  }
  sf_seek(sound.file.get(), 0, SEEK_SET);
}

Sound open_sound(const fs::path& file) {
  if (!fs::exists(file)) throw UsageError(fmt::format("there is no file '{}'", file.string()));
  Sound sound;
  sound.file.reset(sf_open(file.c_str(), SFM_READ, &sound.info));
  if (sound.file == nullptr) {
    throw UsageError(fmt::format("'{}' is no sound that libsndfile reads ({}); WAV and FLAC are", file.string(),
                                 sf_strerror(nullptr)));
  }
  check_riff_size(file);
  check_last_sample(file, sound);
  return sound;
}

int64_t num_resampled(const SF_INFO& info, int64_t sample_rate) { return info.frames * sample_rate / info.samplerate; }

}  // namespace

int64_t num_audio_samples(const fs::path& file, int64_t sample_rate) {
  return num_resampled(open_sound(file).info, sample_rate);
}

at::Tensor read_audio(const fs::path& file, int64_t sample_rate) {
  const Sound sound = open_sound(file);
  const auto channels = at::empty({sound.info.frames, sound.info.channels});
  if (sf_readf_float(sound.file.get(), channels.data_ptr<float>(), sound.info.frames) != sound.info.frames) {
    throw cut_off(file, sound.info.frames);
  }
  return resample(channels.mean(1), num_resampled(sound.info, sample_rate));
}

at::Tensor resample(const at::Tensor& audio, int64_t num_samples) {
  if (num_samples == audio.size(0)) return audio;
  const double scale = static_cast<double>(num_samples) / static_cast<double>(audio.size(0));
  return at::fft_irfft(at::fft_rfft(audio), num_samples) * scale;
}

int64_t num_frames(int64_t num_samples, int64_t sample_rate) {
  const int64_t rest = num_samples - window_size(sample_rate);
  return rest < 0 ? 0 : 1 + rest / hop_size(sample_rate);
}

int64_t num_bins(int64_t sample_rate) { return window_size(sample_rate) / 2 + 1; }

at::Tensor log_spectrogram(const at::Tensor& audio, int64_t sample_rate) {
  const int64_t size = window_size(sample_rate);
  const at::Tensor normalized = audio / (audio.square().mean().sqrt() + kEps);
  const at::Tensor spectrum =
      at::stft(normalized, size, hop_size(sample_rate), size, at::hann_window(size), /*center=*/false, "reflect",
               /*normalized=*/false, /*onesided=*/true, /*return_complex=*/true);
  const at::Tensor log_power = spectrum.abs().square().log1p().t();
  return ((log_power - log_power.mean()) / (log_power.std(/*unbiased=*/false) + kEps)).contiguous();
}

}  // namespace deepspeech2
