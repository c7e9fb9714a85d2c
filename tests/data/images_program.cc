// Reads pictures for images_test.py. Each line of the input is a job:
//   decode <rgb|gray> <shrink> <from> <to>
//   evaluate <size> <resize> <scaled: 0 or 1> <from> <to>
//   train <size> <seed> <scaled: 0 or 1> <from> <to>
// <to> gets the picture as "image", and for train the crop (top, left, height, width, is mirrored) as "crop";
// <to>.error gets the message where a picture is refused.
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/data/images/decode_image.h"
#include "fulgur/data/images/image_pipeline.h"
#include "fulgur/data/images/image_transforms.h"

namespace {

using namespace fulgur;

std::vector<uint8_t> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

NamedTensors decode(std::istream& job, const std::string& from) {
  std::string color;
  DecodeOptions options;
  job >> color >> options.shrink;
  options.color = color == "gray" ? ImageColor::gray : ImageColor::rgb;
  return {{"image", decode_image(bytes_of(from), "picture", options).contiguous()}};
}

NamedTensors read(ImageOptions options, uint64_t seed, const std::string& from) {
  options.mean = kImageNetMean;
  options.std = kImageNetStd;
  const at::Tensor image = at::empty({3, options.size, options.size}, at::kFloat);
  Random random(seed);
  read_image_into(image, from, options, random);
  return {{"image", image}};
}

NamedTensors evaluate(std::istream& job, const std::string& from) {
  ImageOptions options;
  int64_t resize = 0;
  job >> options.size >> resize >> options.allows_scaled_decoding;
  options.resize = resize;
  return read(options, 0, from);
}

NamedTensors train(std::istream& job, const std::string& from) {
  ImageOptions options{.augment = true};
  uint64_t seed = 0;
  job >> options.size >> seed >> options.allows_scaled_decoding;
  NamedTensors result = read(options, seed, from);
  const ImageHeader header = read_image_header(bytes_of(from), from);
  Random random(seed);
  const Crop crop = random_resized_crop(header.height, header.width, options.scale, options.ratio, random);
  const int64_t is_mirrored = random.chance(options.flip);
  result.emplace_back("crop", at::tensor({crop.top, crop.left, crop.height, crop.width, is_mirrored}));
  return result;
}

void run(const std::string& line) {
  std::vector<std::string> words;
  std::istringstream split(line);
  for (std::string word; split >> word;) words.push_back(word);
  const std::string from = words.at(words.size() - 2), to = words.back();
  std::istringstream job(line);
  std::string what;
  job >> what;
  try {
    write_safetensors(to, what == "decode"  ? decode(job, from)
                          : what == "train" ? train(job, from)
                                            : evaluate(job, from));
  } catch (const std::runtime_error& error) {
    std::ofstream(to + ".error") << error.what();
  }
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) run(line);
}
