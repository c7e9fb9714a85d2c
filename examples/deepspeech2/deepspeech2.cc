#include "examples/deepspeech2/deepspeech2.h"

#include <ATen/ops/ctc_loss.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/log_softmax.h>
#include <torch/nn/utils/rnn.h>

#include <functional>
#include <tuple>
#include <utility>

#include "examples/deepspeech2/audio.h"
#include "examples/deepspeech2/ctc.h"

namespace deepspeech2 {
namespace {

using namespace fulgur;
namespace nn = torch::nn;
namespace rnn = torch::nn::utils::rnn;

constexpr double kClip = 20;            // upper bound of the ReLU
constexpr double kLrDecay = 1.0 / 1.2;  // factor of every epoch

// x, and the result: [batch_size, frames, channels, bins]. mask: bool [batch_size, frames]. Both get shorter by the
// stride.
class ConvolutionImpl final : public nn::Module {
 public:
  ConvolutionImpl(int64_t in_channels, const ConvolutionSizes& sizes) : stride_frames_(sizes.stride_frames) {
    convolution_ = register_module(
        "convolution",
        nn::Conv2d(nn::Conv2dOptions(in_channels, sizes.channels, {sizes.kernel_frames, sizes.kernel_bins})
                       .stride({sizes.stride_frames, sizes.stride_bins})
                       .padding({sizes.kernel_frames / 2, sizes.kernel_bins / 2})
                       .bias(false)));
    norm_ = register_module("norm", fulgur::nn::SyncBatchNorm1d(sizes.channels));
  }

  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& mask) {
    const auto y = convolution_->forward(x.transpose(1, 2)).transpose(1, 2);
    const auto shorter = mask.slice(1, 0, std::nullopt, stride_frames_);
    const auto frames =
        at::hardtanh(norm_->forward(y.index({shorter})), 0, kClip);  // [unpadded frames, channels, bins]
    return {frames.new_zeros(y.sizes()).index_put({shorter}, frames), shorter};
  }

 private:
  int64_t stride_frames_;
  nn::Conv2d convolution_{nullptr};
  fulgur::nn::SyncBatchNorm1d norm_{nullptr};
};
TORCH_MODULE(Convolution);

rnn::PackedSequence with_data(const rnn::PackedSequence& sequence, const at::Tensor& data) {
  return rnn::PackedSequence(data, sequence.batch_sizes(), sequence.sorted_indices(), sequence.unsorted_indices());
}

class RecurrentImpl final : public nn::Module {
 public:
  RecurrentImpl(int64_t width, int64_t hidden) {
    norm_ = register_module("norm", fulgur::nn::SyncBatchNorm1d(width));
    gru_ = register_module("gru", nn::GRU(nn::GRUOptions(width, hidden).bidirectional(true)));
  }

  rnn::PackedSequence forward(const rnn::PackedSequence& x) {
    const auto normalized = with_data(x, norm_->forward(x.data()));
    const auto y = std::get<0>(gru_->forward_with_packed_input(normalized)).data();
    return with_data(x, y.unflatten(1, {2, -1}).sum(1));  // both directions
  }

 private:
  fulgur::nn::SyncBatchNorm1d norm_{nullptr};
  nn::GRU gru_{nullptr};
};
TORCH_MODULE(Recurrent);

at::Tensor loss_of(const DeepSpeech2::Output& output, const Batch& batch) {
  return at::ctc_loss(output.log_probs.transpose(0, 1), batch["labels"], output.lengths,
                      batch["labels_mask"].sum(1).cpu());
}

// What `decode` makes of each utterance.
std::vector<std::string> decoded(const DeepSpeech2::Output& output,
                                 const std::function<std::string(const at::Tensor&)>& decode) {
  const auto log_probs = output.log_probs.cpu();
  std::vector<std::string> texts;
  for (int64_t i = 0; i < log_probs.size(0); ++i)
    texts.push_back(decode(log_probs[i].slice(0, 0, output.lengths[i].item<int64_t>())));
  return texts;
}

}  // namespace

DeepSpeech2Sizes DeepSpeech2Sizes::named(const std::string& name) {
  if (name == "article") {
    return {.sample_rate = 16000,
            .convolutions = {{32, 11, 41, 2, 2}, {32, 11, 21, 1, 2}, {96, 11, 21, 1, 2}},
            .num_recurrent = 7,
            .hidden = 1280};
  }
  return {
      .sample_rate = 8000, .convolutions = {{16, 11, 21, 2, 2}, {32, 5, 11, 1, 2}}, .num_recurrent = 2, .hidden = 96};
}

int64_t DeepSpeech2Sizes::frames_per_output() const {
  int64_t product = 1;
  for (const ConvolutionSizes& sizes : convolutions) product *= sizes.stride_frames;
  return product;
}

void DeepSpeech2Options::describe(FieldVisitor& visit) {
  visit({.name = "size", .help = "small, or with the dimensions of the article", .choices = {"small", "article"}},
        &size);
  visit({.name = "lr", .help = "learning rate of the first epoch", .min = 0}, &lr);
  visit({.name = "beam_width", .help = "texts that beam search keeps", .min = 1}, &beam_width);
}

void link_options(DeepSpeech2Options& model, SpeechDataOptions& data) {
  const auto sizes = DeepSpeech2Sizes::named(model.size);
  data.format = {.sample_rate = sizes.sample_rate, .frames_per_output = sizes.frames_per_output()};
}

DeepSpeech2::DeepSpeech2(Options options) : options_(std::move(options)) {
  const auto sizes = DeepSpeech2Sizes::named(options_.size);
  convolutions_ = register_module("convolutions", nn::Sequential());
  int64_t channels = 1, bins = num_bins(sizes.sample_rate);
  for (const ConvolutionSizes& convolution : sizes.convolutions) {
    convolutions_->push_back(Convolution(channels, convolution));
    channels = convolution.channels;
    bins = (bins - 1) / convolution.stride_bins + 1;
  }
  recurrent_ = register_module("recurrent", nn::Sequential());
  for (int64_t i = 0; i < sizes.num_recurrent; ++i)
    recurrent_->push_back(Recurrent(i == 0 ? channels * bins : sizes.hidden, sizes.hidden));
  norm_ = register_module("norm", fulgur::nn::SyncBatchNorm1d(sizes.hidden));
  head_ = register_module("head", nn::Linear(sizes.hidden, kNumLabels));
}

DeepSpeech2::Output DeepSpeech2::forward(const at::Tensor& spectrogram, const at::Tensor& mask) {
  std::pair<at::Tensor, at::Tensor> x{spectrogram.unsqueeze(2), mask};
  for (auto& layer : *convolutions_) x = layer.forward<std::pair<at::Tensor, at::Tensor>>(x.first, x.second);
  auto packed = rnn::pack_padded_sequence(x.first.flatten(2), x.second.sum(1).cpu(), /*batch_first=*/true,
                                          /*enforce_sorted=*/false);
  for (auto& layer : *recurrent_) packed = layer.forward<rnn::PackedSequence>(packed);
  const auto logits = head_->forward(norm_->forward(packed.data()));
  const auto [log_probs, lengths] =
      rnn::pad_packed_sequence(with_data(packed, at::log_softmax(logits, -1, at::kFloat)), /*batch_first=*/true);
  return {.log_probs = log_probs, .lengths = lengths};
}

std::vector<std::string> DeepSpeech2::transcribe(const Batch& batch) {
  return decoded(forward(batch["spectrogram"], batch["spectrogram_mask"]),
                 [&](const at::Tensor& log_probs) { return beam_search_decode(log_probs, options_.beam_width); });
}

at::Tensor DeepSpeech2::training_step(const Batch& batch, int64_t) {
  const auto loss = loss_of(forward(batch["spectrogram"], batch["spectrogram_mask"]), batch);
  log("train_loss", loss, {.prog_bar = true});
  return loss;
}

void DeepSpeech2::validation_step(const Batch& batch, int64_t) {
  const Output output = forward(batch["spectrogram"], batch["spectrogram_mask"]);
  log("val_loss", loss_of(output, batch), {.prog_bar = true});
  const auto heard = decoded(output, greedy_decode), said = transcripts_of(batch);
  cer_.update(heard, said);
  wer_.update(heard, said);
  log("val_cer", cer_, {.prog_bar = true});
  log("val_wer", wer_, {.prog_bar = true});
}

void DeepSpeech2::test_step(const Batch& batch, int64_t) {
  const auto heard = transcribe(batch), said = transcripts_of(batch);
  cer_.update(heard, said);
  wer_.update(heard, said);
  log("test_cer", cer_);
  log("test_wer", wer_);
}

Optimizers DeepSpeech2::configure_optimizers() {
  return {optim::AdamW(parameters(), {.lr = options_.lr}),
          {.scheduler = optim::ExponentialLR::make({.gamma = kLrDecay}), .interval = "epoch"}};
}

std::vector<std::string> transcripts_of(const Batch& batch) {
  const auto labels = batch["labels"].cpu(), lengths = batch["labels_mask"].sum(1).cpu();
  std::vector<std::string> texts;
  for (int64_t i = 0; i < labels.size(0); ++i) {
    const int64_t* begin = labels[i].const_data_ptr<int64_t>();
    texts.push_back(text_of({begin, begin + lengths[i].item<int64_t>()}));
  }
  return texts;
}

}  // namespace deepspeech2
