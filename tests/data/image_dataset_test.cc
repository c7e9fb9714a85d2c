#include "fulgur/data/images/image_dataset.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <tuple>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/data/combine.h"
#include "fulgur/data/data_loader.h"
#include "tests/data/png_file.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;
using testing::write_png;
namespace fs = std::filesystem;

void write_text(const fs::path& path, std::string_view text) { std::ofstream(path) << text; }

ImageOptions small_options() { return {.size = 4, .resize = 4, .color = ImageColor::gray}; }

at::Tensor image_of(const Dataset& dataset, int64_t index, uint64_t seed = 0) {
  Random random(seed);
  return dataset.get(index, random)["image"];
}

int64_t label_of(const Dataset& dataset, int64_t index) {
  Random random(0);
  return dataset.get(index, random)["label"].item<int64_t>();
}

TEST(ImageDataset, AFolderIsReadByClassAndName) {
  const TempDir folder;
  write_png(folder.path() / "dog/b.png", 4, 4, 10);
  write_png(folder.path() / "dog/a.PNG", 4, 4, 20);
  write_png(folder.path() / "cat/z.jpeg", 4, 4, 30);  // a PNG under another name
  write_text(folder.path() / "dog/notes.txt", "no picture");
  write_text(folder.path() / "dog/.hidden.png", "no picture");
  fs::create_directories(folder.path() / ".cache");
  const auto dataset = ImageDataset::from_folder(folder.path(), small_options());
  EXPECT_THAT(dataset->classes(), ElementsAre("cat", "dog"));
  ASSERT_EQ(dataset->size(), 3);
  EXPECT_EQ(label_of(*dataset, 0), 0);
  EXPECT_EQ(label_of(*dataset, 1), 1);
  for (const auto& [index, first] : {std::pair{0, 30}, {1, 20}, {2, 10}}) {
    const at::Tensor image = image_of(*dataset, index);
    EXPECT_EQ(image.sizes(), at::IntArrayRef({1, 4, 4}));
    for (int64_t y = 0; y < 4; ++y) {
      for (int64_t x = 0; x < 4; ++x) {
        EXPECT_FLOAT_EQ(image[0][y][x].item<float>(), static_cast<float>(x + 3 * y + first) / 255.0F);
      }
    }
  }
}

TEST(ImageDataset, AListIsReadLineByLine) {
  const TempDir folder;
  write_png(folder.path() / "pictures/a,b.png", 4, 4, 1);
  write_png(folder.path() / "c.png", 4, 4, 2);
  write_text(folder.path() / "list.csv",
             fmt::format("\xef\xbb\xbfpictures/a,b.png,7 \r\n\n{}/c.png, 12\n", folder.path().string()));
  const auto dataset = ImageDataset::from_list(folder.path() / "list.csv", small_options());
  ASSERT_EQ(dataset->size(), 2);
  EXPECT_EQ(label_of(*dataset, 0), 7);
  EXPECT_EQ(label_of(*dataset, 1), 12);
  EXPECT_FLOAT_EQ(image_of(*dataset, 1)[0][0][0].item<float>(), 2.0F / 255.0F);
  EXPECT_TRUE(dataset->classes().empty());
}

TEST(ImageDataset, ABatchHasTheSamplesOfItsIndices) {
  const TempDir folder;
  for (uint32_t i = 0; i < 6; ++i) write_png(folder.path() / fmt::format("c{}/p.png", i), 40, 50, i);
  const auto dataset = ImageDataset::from_folder(folder.path(), {.size = 16, .augment = true});
  std::vector<Random> random{Random(5), Random(0), Random(7)};
  const Batch batch = dataset->get_batch(at::tensor({5, 0, 5}, at::kLong), random);
  EXPECT_EQ(batch["image"].sizes(), at::IntArrayRef({3, 3, 16, 16}));
  EXPECT_TRUE(batch["label"].equal(at::tensor({5, 0, 5}, at::kLong)));
  for (const auto& [position, index, seed] : {std::tuple{0, 5, 5}, {1, 0, 0}, {2, 5, 7}}) {
    Random own(static_cast<uint64_t>(seed));
    EXPECT_TRUE(batch["image"][position].equal(dataset->get(index, own)["image"]));
  }
}

TEST(ImageDataset, AugmentationIsTheSameWithAnyNumberOfWorkers) {
  const TempDir folder;
  for (uint32_t i = 0; i < 8; ++i) write_png(folder.path() / fmt::format("c/{}.png", i), 40, 50, i);
  const auto dataset = ImageDataset::from_folder(folder.path(), {.size = 16, .augment = true});
  const auto read = [&](int64_t workers, int64_t epoch) {
    DataLoader loader(dataset, {.batch_size = 2, .seed = 3, .workers = workers});
    loader.begin_epoch(epoch);
    std::vector<at::Tensor> images;
    while (const auto batch = loader.next()) images.push_back((*batch)["image"]);
    return at::cat(images);
  };
  const at::Tensor expected = read(0, 2);
  EXPECT_FALSE(expected.equal(read(0, 3)));
  for (const int64_t workers : {1, 4}) EXPECT_TRUE(read(workers, 2).equal(expected));
}

TEST(ImageDataset, TheDigestTellsOtherNamesAndLabelsApart) {
  const auto digest = [](std::vector<LabelledImage> images) { return ImageDataset(std::move(images)).digest(); };
  const std::string one = digest({{"x/a.png", 0}, {"x/b.png", 1}});
  EXPECT_EQ(one, digest({{"/elsewhere/x/a.png", 0}, {"/elsewhere/x/b.png", 1}}));
  EXPECT_NE(one, digest({{"x/a.png", 0}, {"x/c.png", 1}}));
  EXPECT_NE(one, digest({{"x/a.png", 0}, {"x/b.png", 2}}));
  EXPECT_NE(one, digest({{"x/b.png", 1}, {"x/a.png", 0}}));
}

TEST(ImageDataset, ACacheOnDiskKeepsThePicturesOfItsOptions) {
  const TempDir folder;
  write_png(folder.path() / "a.png", 4, 4);
  const auto cached = [&](const ImageOptions& options) {
    const std::vector<LabelledImage> images{{folder.path() / "a.png", 0}};
    return cache_on_disk(subset(std::make_shared<ImageDataset>(images, options), {0}), folder.path() / "cache");
  };
  const at::Tensor pixels = image_of(*cached(small_options()), 0);
  ImageOptions options = small_options();
  options.max_pixels = 16;  // refuses pictures, but changes none
  EXPECT_TRUE(image_of(*cached(options), 0).equal(pixels));
  options.mean = {0.5};
  EXPECT_THAT(message_of<CheckpointError>([&] { cached(options); }),
              HasSubstr("options 'ImageOptions(size=4,resize=4,color=gray)'\nThis one is:\n"));
  EXPECT_THAT(message_of<CheckpointError>([&] { cached(options); }),
              HasSubstr("options 'ImageOptions(size=4,resize=4,color=gray,mean=0.5)'\nGive another folder"));
  for (auto change : std::vector<void (*)(ImageOptions&)>{[](ImageOptions& to) { to.size = 2; },
                                                          [](ImageOptions& to) { to.augment = true; },
                                                          [](ImageOptions& to) { to.std = {2}; }}) {
    options = small_options();
    change(options);
    EXPECT_THROW(cached(options), CheckpointError);
  }
}

TEST(ImageDataset, FoldersThatCannotBeUsedAreRefused) {
  const TempDir folder;
  const std::string root = folder.path().string();
  const auto message = [&](const fs::path& path) {
    return message_of<std::runtime_error>([&] { ImageDataset::from_folder(path); });
  };
  EXPECT_EQ(message(folder.path() / "none"), "there is no folder of pictures '" + root + "/none'");
  EXPECT_EQ(message(folder.path()),
            "'" + root + "' has no folder for any class; pictures are expected as " + root + "/<class>/<picture>");
  fs::create_directories(folder.path() / "cat");
  write_text(folder.path() / "cat/a.bmp", "no picture");
  EXPECT_EQ(message(folder.path()),
            "the class folder '" + root +
                "/cat' has no picture, which would end in .png, .jpg, .jpeg or .webp; add some or remove it");
}

TEST(ImageDataset, ListsThatCannotBeUsedAreRefused) {
  const TempDir folder;
  const fs::path list = folder.path() / "list.csv";
  const auto message = [&](std::string_view text) {
    write_text(list, text);
    return message_of<std::runtime_error>([&] { ImageDataset::from_list(list); });
  };
  const std::string rule = "; a line is <file>,<label>, such as cats/tom.jpg,3", at = "'" + list.string() + "', line ";
  EXPECT_EQ(message("a.png,0\nb.png,cat\n"), at + "2: the label 'cat' is not a whole number from 0 on" + rule);
  EXPECT_EQ(message("a.png,-1\n"), at + "1: the label '-1' is not a whole number from 0 on" + rule);
  EXPECT_EQ(message("a.png,1.5\n"), at + "1: the label '1.5' is not a whole number from 0 on" + rule);
  EXPECT_EQ(message("a.png,\n"), at + "1: the label '' is not a whole number from 0 on" + rule);
  EXPECT_EQ(message("a.png\n"), at + "1: 'a.png' has no comma" + rule);
  EXPECT_EQ(message(",3\n"), at + "1: the file has no name" + rule);
  EXPECT_EQ(message("\n"), "the list of pictures '" + list.string() + "' is empty");
  fs::remove(list);
  EXPECT_EQ(message_of<std::runtime_error>([&] { ImageDataset::from_list(list); }),
            "cannot read the list of pictures '" + list.string() + "'");
}

TEST(ImageDataset, APictureThatCannotBeReadIsNamed) {
  const TempDir folder;
  write_text(folder.path() / "a.png", "BM is a bitmap");
  write_png(folder.path() / "large.png", 20, 30);
  ImageOptions options = small_options();
  options.max_pixels = 599;
  const ImageDataset dataset({{folder.path() / "missing.png", 0},
                              {folder.path() / "a.png", 0},
                              {folder.path() / "large.png", 0},
                              {folder.path(), 0}},
                             options);
  const auto message = [&](int64_t index) { return message_of<std::runtime_error>([&] { image_of(dataset, index); }); };
  const std::string start = "cannot read the picture '" + folder.path().string();
  EXPECT_EQ(message(0), start + "/missing.png': No such file or directory");
  EXPECT_EQ(message(1), start +
                            "/a.png': it is no JPEG, PNG or WebP file: it begins with the bytes "
                            "42 4d 20 69 73 20 61 20");
  EXPECT_EQ(message(2), start + "/large.png': it has 30 x 20 pixels, more than max_pixels, which is 599");
  EXPECT_EQ(message(3), start + "': Is a directory");
}

TEST(ImageDataset, ANarrowPictureThatEvaluationWouldMakeTooLargeIsRefused) {
  const TempDir folder;
  write_png(folder.path() / "wide.png", 2, 3000);
  write_png(folder.path() / "high.png", 3000, 2);
  ImageOptions options{.size = 4, .resize = 4, .max_pixels = 24'000};
  const auto dataset = [&] {
    return ImageDataset({{folder.path() / "wide.png", 0}, {folder.path() / "high.png", 0}}, options);
  };
  EXPECT_EQ(image_of(dataset(), 0).sizes(), at::IntArrayRef({3, 4, 4}));
  options.max_pixels = 23'999;
  const std::string start = "cannot read the picture '" + folder.path().string();
  for (const auto& [index, reason] : {std::pair{0,
                                                "/wide.png': it has 3000 x 2 pixels; with a shorter side of 4 it would "
                                                "have 6000 x 4, more than max_pixels, which is 23999"},
                                      {1,
                                       "/high.png': it has 2 x 3000 pixels; with a shorter side of 4 it would have "
                                       "4 x 6000, more than max_pixels, which is 23999"}}) {
    EXPECT_EQ(message_of<std::runtime_error>([&] { image_of(dataset(), index); }), start + reason);
  }
  options.augment = true;
  EXPECT_EQ(image_of(dataset(), 0).sizes(), at::IntArrayRef({3, 4, 4}));
}

TEST(ImageDataset, OptionsThatCannotBeUsedAreRefused) {
  const auto message = [](const ImageOptions& options) {
    return message_of<UsageError>([&] { ImageDataset({}, options); });
  };
  EXPECT_EQ(message({.size = 0}), "images: size must be at least 1; got 0");
  EXPECT_EQ(message({.size = 224, .resize = 200}),
            "images: resize (200) must be at least size (224), which is cut out of it");
  EXPECT_EQ(message({.scale = {0.5, 0.1}}), "images: scale is a range, lower end first; got 0.5 to 0.1");
  EXPECT_EQ(message({.color = ImageColor::gray, .mean = {1, 2, 3}}),
            "images: mean has a value for each of the 1 channels, or none; got 3 values");
  EXPECT_EQ(message({.std = {1, 1}}), "images: std has a value for each of the 3 channels, or none; got 2 values");
  EXPECT_EQ(message({.std = {1, 0, 1}}), "images: std: element 1 must be at least 1e-06; got 0");
}

}  // namespace
}  // namespace fulgur
