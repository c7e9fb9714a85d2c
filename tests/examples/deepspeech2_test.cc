// examples/deepspeech2: decoders, sound, transcripts, and what the network makes of padding.
#include "examples/deepspeech2/deepspeech2.h"

#include <ATen/ops/ctc_loss.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sndfile.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <filesystem>
#include <iterator>
#include <map>
#include <numbers>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "examples/deepspeech2/audio.h"
#include "examples/deepspeech2/ctc.h"
#include "examples/deepspeech2/speech_data.h"
#include "fulgur.h"
#include "fulgur/checkpoint/file_system.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace deepspeech2 {
namespace {

namespace fs = std::filesystem;
using fulgur::testing::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Log probabilities whose likeliest label in each frame is that of `path`.
at::Tensor log_probs_of(const std::vector<int64_t>& path) {
  return torch::nn::functional::one_hot(torch::tensor(path, at::kLong), kNumLabels).to(at::kFloat).log_softmax(1);
}

// What a path says, by the definition: first drop repetitions, then blanks.
std::string collapsed(std::vector<int64_t> path) {
  path.erase(std::unique(path.begin(), path.end()), path.end());
  std::erase(path, 0);
  return text_of(path);
}

// The likeliest text, from the probabilities of all paths.
std::string likeliest_text(const at::Tensor& log_probs) {
  const int64_t num_frames = log_probs.size(0), num_labels = log_probs.size(1);
  std::map<std::string, double> probability;
  const auto num_paths = static_cast<int64_t>(std::pow(num_labels, num_frames));
  for (int64_t number = 0; number < num_paths; ++number) {
    std::vector<int64_t> path;
    double log_prob = 0;
    for (int64_t frame = 0, rest = number; frame < num_frames; ++frame, rest /= num_labels) {
      path.push_back(rest % num_labels);
      log_prob += log_probs[frame][path.back()].item<double>();
    }
    probability[collapsed(path)] += std::exp(log_prob);
  }
  return std::ranges::max_element(probability, {}, &std::pair<const std::string, double>::second)->first;
}

TEST(Ctc, LabelsAreTheCharactersOfAText) {
  EXPECT_THAT(labels_of("a Z'"), ElementsAre(3, 1, 28, 2));
  EXPECT_EQ(text_of(labels_of("IT'S two")), "it's two");
  EXPECT_THAT(message_of<fulgur::UsageError>([] { labels_of("route 66"); }),
              HasSubstr("'route 66' has the character '6'; spell it out"));
}

TEST(Ctc, AnOutputOfTheLeastFramesHasALossAndAShorterOneHasNone) {
  for (const char* text : {"seven", "three", "aaa", "a a"}) {
    const auto labels = labels_of(text);
    const auto loss = [&](int64_t frames) {
      return at::ctc_loss(torch::full({frames, 1, kNumLabels}, -std::log(kNumLabels)),
                          torch::tensor(labels).unsqueeze(0), at::IntArrayRef{frames}, {std::ssize(labels)})
          .item<double>();
    };
    EXPECT_TRUE(std::isfinite(loss(min_output_frames(labels)))) << text;
    EXPECT_TRUE(std::isinf(loss(min_output_frames(labels) - 1))) << text;
  }
}

TEST(Ctc, GreedyDecodingDropsRepetitionsThenBlanks) {
  EXPECT_EQ(greedy_decode(log_probs_of({0, 3, 3, 0, 3, 4, 4, 1, 0})), "aab ");
  EXPECT_EQ(greedy_decode(log_probs_of({0, 0})), "");
}

TEST(Ctc, ABeamThatKeepsEveryTextFindsTheLikeliest) {
  torch::manual_seed(1);
  int num_not_greedy = 0;
  for (int i = 0; i < 50; ++i) {
    const at::Tensor log_probs = torch::randn({5, 3}).log_softmax(1);
    const std::string expected = likeliest_text(log_probs);
    EXPECT_EQ(beam_search_decode(log_probs, /*beam_width=*/1000), expected);
    num_not_greedy += greedy_decode(log_probs) == expected ? 0 : 1;
  }
  EXPECT_GT(num_not_greedy, 5);
}

TEST(Ctc, ANarrowBeamKeepsOnlyTheBestBeginning) {
  // All paths of " " have 0.4 * 0.1 + 0.35 * (0.1 + 0.9) = 0.39, that of "" has 0.4 * 0.9 = 0.36; after one frame ""
  // leads.
  const at::Tensor log_probs = torch::tensor({{0.4, 0.35, 0.25}, {0.9, 0.1, 0.0}}).log();
  EXPECT_EQ(beam_search_decode(log_probs, 1), "");
  EXPECT_EQ(beam_search_decode(log_probs, 2), " ");
}

class Speech : public ::testing::Test {
 protected:
  fs::path write(const std::string& name, std::string_view bytes) const {
    fs::create_directories((dir_.path() / name).parent_path());
    fulgur::write_file(dir_.path() / name, bytes);
    return dir_.path() / name;
  }

  // Audio: float [num_samples], mono; format: of libsndfile.
  fs::path write_audio(const std::string& name, const at::Tensor& audio, int sample_rate = 8000,
                       int format = SF_FORMAT_WAV | SF_FORMAT_FLOAT) const {
    fs::create_directories((dir_.path() / name).parent_path());
    SF_INFO info{.frames = 0, .samplerate = sample_rate, .channels = 1, .format = format, .sections = 0, .seekable = 0};
    SNDFILE* file = sf_open((dir_.path() / name).c_str(), SFM_WRITE, &info);
    sf_writef_float(file, audio.contiguous().const_data_ptr<float>(), audio.size(0));
    sf_close(file);
    return dir_.path() / name;
  }

  fulgur::testing::TempDir dir_;
};

// A WAV of 8 bits and two channels, of 8 kHz, by the format's definition. `data`: left and right in turn, 128 is 0.
std::string wav_of_8_bits(std::string_view data) {
  const auto little = [](uint32_t number, int num_bytes) {
    std::string bytes;
    for (int i = 0; i < num_bytes; ++i) bytes += static_cast<char>(number >> (8 * i) & 255);
    return bytes;
  };
  const auto size = static_cast<uint32_t>(data.size());
  std::string format = little(1, 2) + little(2, 2) + little(8000, 4) + little(16000, 4) + little(2, 2) + little(8, 2);
  return "RIFF" + little(36 + size, 4) + "WAVEfmt " + little(16, 4) + format + "data" + little(size, 4) +
         std::string(data);
}

at::Tensor sine(double frequency, int64_t sample_rate, int64_t num_samples) {
  const double step = 2 * std::numbers::pi * frequency / static_cast<double>(sample_rate);
  return torch::arange(num_samples, at::kDouble).mul(step).sin().to(at::kFloat);
}

TEST_F(Speech, SoundOf8BitsAndTwoChannelsIsTheirMean) {
  const std::string data("\x80\x80\xff\xff\x00\x00\xc0\x80\xc0\x40", 10);
  const at::Tensor audio = read_audio(write("a.wav", wav_of_8_bits(data)), 8000);
  EXPECT_TRUE(audio.equal(torch::tensor({0.0, 127.0 / 128, -1.0, 0.25, 0.0}, at::kFloat))) << audio;
}

TEST_F(Speech, FlacReadsAsItWasWritten) {
  const at::Tensor audio = sine(440, 16000, 3000) / 2;
  const auto file = write_audio("a.flac", audio, 16000, SF_FORMAT_FLAC | SF_FORMAT_PCM_16);
  EXPECT_EQ(num_audio_samples(file, 16000), 3000);
  EXPECT_TRUE(read_audio(file, 16000).allclose(audio, 0, 1.0 / 32768));
}

TEST_F(Speech, AnotherSampleRateIsResampled) {
  const auto file = write_audio("a.wav", sine(500, 16000, 1600) + sine(5000, 16000, 1600), 16000);
  EXPECT_EQ(num_audio_samples(file, 8000), 800);
  EXPECT_TRUE(read_audio(file, 8000).allclose(sine(500, 8000, 800), 0, 1e-4));  // 5 kHz do not fit
  EXPECT_TRUE(resample(sine(500, 8000, 800), 2205).allclose(sine(500, 22050, 2205), 0, 1e-4));
}

TEST_F(Speech, FilesThatAreNoWholeSoundAreRefused) {
  const auto refusal = [](const fs::path& file) {
    return message_of<fulgur::UsageError>([&] { num_audio_samples(file, 8000); });
  };
  EXPECT_THAT(refusal(dir_.path() / "none.wav"), HasSubstr("there is no file '"));
  EXPECT_THAT(refusal(write("text.wav", "what a sound")), HasSubstr("text.wav' is no sound that libsndfile reads"));
  const std::string whole = wav_of_8_bits(std::string(2000, '\x80'));
  EXPECT_EQ(num_audio_samples(write("whole.wav", whole), 8000), 1000);
  EXPECT_THAT(refusal(write("cut.wav", whole.substr(0, 1000))),
              HasSubstr("cut.wav' has 1000 bytes, but its header says 2044: it was cut off"));
  const auto flac = write_audio("cut.flac", torch::randn({9000}) / 9, 8000, SF_FORMAT_FLAC | SF_FORMAT_PCM_16);
  fs::resize_file(flac, fs::file_size(flac) / 2);
  EXPECT_THAT(refusal(flac), HasSubstr("cut.flac' ends before the 9000 samples"));
}

TEST_F(Speech, WavFromAPipeDoesNotKnowItsLength) {
  std::string wav = wav_of_8_bits(std::string(2000, '\x80'));
  for (const size_t size_field : {4, 40}) wav.replace(size_field, 4, 4, '\xff');
  EXPECT_EQ(read_audio(write("pipe.wav", wav), 8000).size(0), 1000);
}

TEST(LogSpectrogram, FollowsTheDefinitionOfTheFourierTransform) {
  torch::manual_seed(1);
  constexpr int64_t kWindow = 160, kHop = 80, kFrames = 3, kBins = 81;
  const at::Tensor audio = torch::randn({kWindow + (kFrames - 1) * kHop}, at::kDouble);
  const double rms = audio.square().mean().sqrt().item<double>();
  at::Tensor expected = torch::zeros({kFrames, kBins}, at::kDouble);
  for (int64_t frame = 0; frame < kFrames; ++frame) {
    for (int64_t bin = 0; bin < kBins; ++bin) {
      std::complex<double> sum = 0;
      for (int64_t i = 0; i < kWindow; ++i) {
        const double turn = 2 * std::numbers::pi * static_cast<double>(i) / kWindow;
        const double hann = 0.5 - 0.5 * std::cos(turn);
        sum += audio[frame * kHop + i].item<double>() / rms * hann * std::polar(1.0, -turn * static_cast<double>(bin));
      }
      expected[frame][bin] = std::log1p(std::norm(sum));
    }
  }
  expected = (expected - expected.mean()) / expected.std(/*unbiased=*/false);
  EXPECT_TRUE(log_spectrogram(audio.to(at::kFloat), 8000).allclose(expected.to(at::kFloat), 0, 1e-3));
}

TEST(LogSpectrogram, LoudnessDoesNotMatterAndSilenceIsZero) {
  torch::manual_seed(1);
  const at::Tensor audio = torch::randn({2000});
  EXPECT_TRUE(log_spectrogram(audio * 0.01, 8000).allclose(log_spectrogram(audio, 8000), 0, 1e-3));
  EXPECT_TRUE(log_spectrogram(torch::zeros({2000}), 8000).equal(torch::zeros({24, 81})));
}

TEST(LogSpectrogram, HasAsManyFramesAndBinsAsItIsSaidToHave) {
  for (const int64_t sample_rate : {8000, 16000, 22050}) {
    const int64_t window = sample_rate / 50;
    EXPECT_EQ(num_frames(window - 1, sample_rate), 0);
    for (const int64_t num_samples : {window, window + window / 2 - 1, window + window / 2, 3 * window + 1}) {
      const at::Tensor spectrogram = log_spectrogram(torch::randn({num_samples}), sample_rate);
      EXPECT_THAT(spectrogram.sizes(), ElementsAre(num_frames(num_samples, sample_rate), num_bins(sample_rate)));
    }
  }
}

TEST_F(Speech, FoldersAreReadInTheLayoutOfLibriSpeech) {
  write("7/8/7-8.trans.txt", "7-8-0 IT'S TWO\n7-8-1 one\n");
  write("7/9/7-9.trans.txt", "7-9-0 six\n");
  const auto first = write_audio("7/8/7-8-0.flac", sine(440, 16000, 16000), 16000, SF_FORMAT_FLAC | SF_FORMAT_PCM_16);
  write_audio("7/8/7-8-1.wav", sine(440, 8000, 4000));
  write_audio("7/9/7-9-0.wav", sine(440, 8000, 4000));
  write_audio("7/9/no_transcript.wav", sine(440, 8000, 4000));
  const auto utterances = read_utterances(dir_.path(), {});
  ASSERT_EQ(utterances.size(), 3);
  EXPECT_EQ(utterances[0].audio, first);
  EXPECT_EQ(text_of(utterances[0].labels), "it's two");
  EXPECT_EQ(utterances[0].num_frames, 99);
  EXPECT_EQ(text_of(utterances[2].labels), "six");
  fulgur::Random unused(0);
  const fulgur::Batch sample = SpeechDataset(utterances, 8000).get(0, unused);
  EXPECT_THAT(sample["spectrogram"].sizes(), ElementsAre(99, 81));
  EXPECT_TRUE(sample["labels"].equal(torch::tensor(labels_of("it's two"))));
}

TEST_F(Speech, BadTranscriptsAreNamedWithTheirLine) {
  write_audio("good.wav", sine(440, 8000, 4000));
  write_audio("short.wav", sine(440, 8000, 480));  // 5 frames: 3 outputs
  const auto refusal = [&](const std::string& line) {
    fs::remove(dir_.path() / "a.trans.txt");
    write("a.trans.txt", "good one\n" + line + "\n");
    return message_of<fulgur::UsageError>([&] { read_utterances(dir_.path(), {}); });
  };
  EXPECT_THAT(refusal("missing two"), ::testing::AllOf(HasSubstr("a.trans.txt:2: there is neither '"),
                                                       HasSubstr("missing.wav' nor '"), HasSubstr("missing.flac'")));
  EXPECT_THAT(refusal("short four"), HasSubstr("short.wav' has 5 frames of 20 ms, one every 10 ms; its transcript "
                                               "'four' needs 7 or more"));
  EXPECT_THAT(refusal("short bee"), HasSubstr("needs 7 or more"));  // a blank lies between the two e
  EXPECT_THAT(refusal("good 2"), HasSubstr("a.trans.txt:2: a transcript consists of letters from a to z"));
  EXPECT_THAT(refusal("good"), HasSubstr("a.trans.txt:2: a line is a name, a space and a transcript"));
  fs::remove(dir_.path() / "a.trans.txt");
  write("a.trans.txt", "short six\n");
  EXPECT_EQ(read_utterances(dir_.path(), {}).size(), 1);
}

TEST_F(Speech, FoldersWithoutUtterancesAreRefused) {
  const auto refusal = [](const fs::path& folder) {
    return message_of<fulgur::UsageError>([&] { read_utterances(folder, {}); });
  };
  EXPECT_THAT(refusal(dir_.path() / "none"), HasSubstr("there is no folder '"));
  EXPECT_THAT(refusal(dir_.path()), HasSubstr("there are no utterances in '"));
}

TEST_F(Speech, AFifthIsHeldOutAndShortUtterancesComeFirst) {
  std::string lines;
  for (int i = 0; i < 40; ++i) {
    const std::string name = "u" + std::to_string(i);
    write_audio(name + ".wav", sine(440, 8000, 4000 + 80 * ((7 * i) % 40)));  // all differ in length
    lines += name + " a\n";
  }
  write("all.trans.txt", lines);
  SpeechData data({.path = dir_.path(), .batch_size = 4}, /*seed=*/1);
  data.setup(fulgur::EntryPoint::fit);
  std::set<int64_t> lengths;
  const auto batches_of = [&](fulgur::Loader& loader, int64_t epoch) {
    std::vector<std::vector<int64_t>> batches;
    loader.begin_epoch(epoch);
    while (const auto batch = loader.next()) {
      const at::Tensor in_batch = (*batch)["spectrogram_mask"].sum(1);
      batches.emplace_back(in_batch.const_data_ptr<int64_t>(), in_batch.const_data_ptr<int64_t>() + in_batch.size(0));
      lengths.insert(batches.back().begin(), batches.back().end());
    }
    return batches;
  };
  const auto train = data.train_dataloader();
  auto first = batches_of(*train, 0);
  EXPECT_EQ(first.size(), 8);
  EXPECT_EQ(lengths.size(), 32);
  EXPECT_TRUE(std::ranges::is_sorted(first));
  auto second = batches_of(*train, 1);
  EXPECT_FALSE(std::ranges::is_sorted(second));
  std::ranges::sort(second);
  EXPECT_EQ(first, second);
  EXPECT_EQ(batches_of(*data.val_dataloader()[0], 0).size(), 1);
  EXPECT_EQ(batches_of(*data.test_dataloader()[0], 0).size(), 1);
  EXPECT_EQ(lengths.size(), 40);
}

// Two utterances of 40 and 27 frames.
fulgur::Batch spectrograms() {
  torch::manual_seed(1);
  const at::Tensor mask = torch::stack({torch::ones({40}), torch::arange(40).lt(27).to(at::kFloat)}).to(at::kBool);
  return {{"spectrogram", torch::randn({2, 40, 81}) * mask.unsqueeze(2)}, {"spectrogram_mask", mask}};
}

TEST(DeepSpeech2, AnUtteranceAloneIsHeardAsInABatch) {
  torch::manual_seed(2);
  const auto model = fulgur::make_module<DeepSpeech2>(DeepSpeech2Options{});
  const auto batch = spectrograms();
  model->forward(batch["spectrogram"], batch["spectrogram_mask"]);  // moves the running statistics
  model->eval();
  const auto together = model->forward(batch["spectrogram"], batch["spectrogram_mask"]);
  EXPECT_TRUE(together.lengths.equal(torch::tensor({20, 14}, at::kLong)));
  for (const int64_t i : {0, 1}) {
    const int64_t length = i == 0 ? 40 : 27;
    const auto alone = model->forward(batch["spectrogram"].slice(0, i, i + 1).slice(1, 0, length),
                                      torch::ones({1, length}, at::kBool));
    const auto expected = together.log_probs.slice(0, i, i + 1).slice(1, 0, alone.log_probs.size(1));
    EXPECT_TRUE(alone.log_probs.allclose(expected, 0, 1e-5)) << i;
  }
}

TEST(DeepSpeech2, MorePaddingChangesNothingInTraining) {
  const auto trained_with = [](int64_t padding) {
    torch::manual_seed(2);
    const auto model = fulgur::make_module<DeepSpeech2>(DeepSpeech2Options{});
    const auto batch = spectrograms();
    const auto output = model->forward(torch::constant_pad_nd(batch["spectrogram"], {0, 0, 0, padding}),
                                       torch::constant_pad_nd(batch["spectrogram_mask"], {0, padding}));
    std::vector<at::Tensor> results = model->buffers();
    results.push_back(output.log_probs.detach());
    return results;
  };
  const auto expected = trained_with(0), padded = trained_with(30);
  ASSERT_EQ(padded.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(padded[i].allclose(expected[i], 1e-4, 1e-5)) << i;
}

// Insertions, deletions and substitutions that turn one text into another, by the recursive definition.
template <class Sequence>
int64_t edits(const Sequence& a, const Sequence& b) {
  if (a.empty() || b.empty()) return std::ssize(a) + std::ssize(b);
  const Sequence rest_a(a.begin() + 1, a.end()), rest_b(b.begin() + 1, b.end());
  if (a.front() == b.front()) return edits(rest_a, rest_b);
  return 1 + std::min({edits(rest_a, b), edits(a, rest_b), edits(rest_a, rest_b)});
}

class RandomSpeech final : public fulgur::Dataset {
 public:
  int64_t size() const override { return std::ssize(kSaid); }
  fulgur::Batch get(int64_t index, fulgur::Random&) const override {
    torch::manual_seed(static_cast<uint64_t>(index));
    return {{"spectrogram", torch::randn({20 - 4 * index, 81})},
            {"labels", torch::tensor(labels_of(kSaid[static_cast<size_t>(index)]))}};
  }
  static constexpr std::array<const char*, 3> kSaid{"a b c", "d", "ef"};
};

TEST(DeepSpeech2, ErrorRatesAreThoseOfAllBatchesTogether) {
  torch::manual_seed(2);
  const auto model = fulgur::make_module<DeepSpeech2>(DeepSpeech2Options{});
  for (at::Tensor& parameter : model->parameters()) parameter.data().mul_(5.0);  // an opinion on every frame
  model->eval();
  const RandomSpeech speech;
  int64_t wrong_characters = 0, characters = 0, wrong_words = 0, words = 0;
  for (int64_t i = 0; i < speech.size(); ++i) {
    fulgur::Random unused(0);
    const at::Tensor spectrogram = speech.get(i, unused)["spectrogram"].unsqueeze(0);
    const auto output = model->forward(spectrogram, torch::ones({1, spectrogram.size(1)}, at::kBool));
    const std::string said = RandomSpeech::kSaid[static_cast<size_t>(i)], heard = greedy_decode(output.log_probs[0]);
    const auto words_of = [](const std::string& text) {
      std::istringstream stream(text);
      return std::vector<std::string>{std::istream_iterator<std::string>(stream), {}};
    };
    EXPECT_GT(heard.size(), 1);
    wrong_characters += edits(heard, said);
    characters += std::ssize(said);
    wrong_words += edits(words_of(heard), words_of(said));
    words += std::ssize(words_of(said));
  }
  fulgur::Trainer trainer({.accelerator = "cpu", .enable_progress_bar = false, .logger = false});
  const auto loader = fulgur::DataLoader::make(std::make_shared<RandomSpeech>(),
                                               {.batch_size = 2, .collate = fulgur::pad_to_longest()});
  const auto metrics = trainer.validate(model, {.val = loader});
  EXPECT_DOUBLE_EQ(metrics.at("val_cer"), static_cast<double>(wrong_characters) / static_cast<double>(characters));
  EXPECT_DOUBLE_EQ(metrics.at("val_wer"), static_cast<double>(wrong_words) / static_cast<double>(words));
}

// Three convolutions on the 161 bins of 20 ms at 16 kHz, of which 21 are left, and seven bidirectional GRUs whose two
// directions are added.
TEST(DeepSpeech2, HasTheParametersOfTheArticlesDimensions) {
  const DeepSpeech2 model({.size = "article"});
  int64_t count = 0;
  for (const at::Tensor& parameter : model.parameters()) count += parameter.numel();
  const auto gru = [](int64_t in) { return 2 * 3 * (in * 1280 + 1280 * 1280 + 2 * 1280); };
  const int64_t convolutions = 32 * 11 * 41 + 32 * 32 * 11 * 21 + 96 * 32 * 11 * 21;
  const int64_t norms = 2 * (32 + 32 + 96) + 2 * (96 * 21 + 6 * 1280) + 2 * 1280;
  EXPECT_EQ(count, convolutions + gru(96 * 21) + 6 * gru(1280) + norms + 1280 * kNumLabels + kNumLabels);
}

}  // namespace
}  // namespace deepspeech2
