#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>

namespace deepspeech2 {

// The samples that read_audio() returns for this file; only the header and the last sample are read.
// Throws UsageError, naming the file, if
// it is missing, is no sound, or is shorter than its header says.
int64_t num_audio_samples(const std::filesystem::path& file, int64_t sample_rate);

// A WAV or FLAC file, or another one that libsndfile reads, of any number of bits: float [num_samples] in -1..1, the
// mean of all channels, resampled to `sample_rate` in Hz. Throws as num_audio_samples() does.
at::Tensor read_audio(const std::filesystem::path& file, int64_t sample_rate);

// `audio` with `num_samples` samples, at least 1, instead of its own number: frequencies that no longer fit are cut
// off.
at::Tensor resample(const at::Tensor& audio, int64_t num_samples);

// Frames of 20 ms, one every 10 ms, that lie within so many samples; 0 if there is not one.
int64_t num_frames(int64_t num_samples, int64_t sample_rate);

// The frequencies of a frame's spectrum, from 0 to half the sample rate.
int64_t num_bins(int64_t sample_rate);

// The logarithm of the power of each frame of `audio`, which is brought to a power of 1 first: float [num_frames,
// num_bins], standardised to a mean of 0 and a deviation of 1 over the whole utterance, so that 0 is a padding that
// says nothing. `audio` has at least one frame.
at::Tensor log_spectrogram(const at::Tensor& audio, int64_t sample_rate);

}  // namespace deepspeech2
