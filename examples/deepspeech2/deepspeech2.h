#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/deepspeech2/speech_data.h"
#include "fulgur.h"

namespace deepspeech2 {

// A convolution over the frames and bins of a spectrogram.
struct ConvolutionSizes {
  int64_t channels;
  int64_t kernel_frames, kernel_bins;  // odd
  int64_t stride_frames, stride_bins;
};

struct DeepSpeech2Sizes {
  int64_t sample_rate;  // Hz
  std::vector<ConvolutionSizes> convolutions;
  int64_t num_recurrent;  // bidirectional GRU layers
  int64_t hidden;         // units of a GRU, in each direction

  // "small", or "article": three convolutions and seven GRUs of 1280 units, as in the paper.
  static DeepSpeech2Sizes named(const std::string& name);
  int64_t frames_per_output() const;  // the product of the strides
};

struct DeepSpeech2Options {
  std::string size = "small";
  double lr = 2e-3;         // learning rate of the first epoch
  int64_t beam_width = 16;  // texts that beam search keeps after each frame
  void describe(fulgur::FieldVisitor& visit);
};

// Sets the sample rate and the frames of an output that follow from the model's size.
void link_options(DeepSpeech2Options& model, SpeechDataOptions& data);

// Letters from spectrograms: convolutions with a clipped ReLU, bidirectional GRUs whose directions are added, and a
// linear layer, trained by CTC. Batch norm follows each convolution, and precedes each GRU and the linear layer. Frames
// that are padding change nothing, not even the statistics of batch norm. AdamW, where the paper has SGD; as there, the
// learning rate falls by a factor of 1.2 every epoch.
// Logs train_loss and val_loss (nats per character), and the error rates of characters and words: validation decodes
// greedily (val_cer, val_wer), the test by beam search (test_cer, test_wer).
// Batches: those of SpeechData.
// Source: Amodei et al. 2015 (Deep Speech 2), arXiv:1512.02595.
class DeepSpeech2 final : public fulgur::Module {
 public:
  using Options = DeepSpeech2Options;
  explicit DeepSpeech2(Options options);

  struct Output {
    at::Tensor log_probs;  // float [batch_size, output frames, kNumLabels]; 0 after an utterance's end
    at::Tensor lengths;    // output frames of each utterance, int64 [batch_size], on the CPU
  };
  // spectrogram: float [batch_size, frames, bins], 0 for padding; mask: bool [batch_size, frames], false for padding.
  Output forward(const at::Tensor& spectrogram, const at::Tensor& mask);

  // What beam search hears in each utterance of the batch.
  std::vector<std::string> transcribe(const fulgur::Batch& batch);

  at::Tensor training_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  void validation_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  void test_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  fulgur::Optimizers configure_optimizers() override;

 private:
  Options options_;
  torch::nn::Sequential convolutions_{nullptr}, recurrent_{nullptr};
  fulgur::nn::SyncBatchNorm1d norm_{nullptr};
  torch::nn::Linear head_{nullptr};
  fulgur::metrics::CharErrorRate cer_;
  fulgur::metrics::WordErrorRate wer_;
};

// What is said in each utterance of a batch.
std::vector<std::string> transcripts_of(const fulgur::Batch& batch);

}  // namespace deepspeech2
