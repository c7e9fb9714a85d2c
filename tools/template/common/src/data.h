#pragma once

#include <memory>
#include <vector>

#include "fulgur.h"

struct DataOptions {
  int64_t num_points = 2000;
  int64_t batch_size = 50;
  void describe(fulgur::FieldVisitor& visit) {
    visit({.name = "num_points", .help = "points to make", .min = 100}, &num_points);
    visit({.name = "batch_size", .help = "samples per step", .min = 1}, &batch_size);
  }
};

// Points in the square from -1 to 1; the label says whether a point is nearer than 0.7 to the middle. Replace it with
// data of your own: fulgur's docs/data.md says what there is to read it with.
class Data final : public fulgur::DataModule {
 public:
  using Options = DataOptions;
  Data(Options options, uint64_t seed) : options_(options), seed_(seed) {}

  void setup(fulgur::EntryPoint) override {
    if (!parts_.empty()) return;
    const fulgur::ScopedRandomState unchanged;  // the points do not take random numbers from the run
    fulgur::seed_everything(seed_);
    const auto points = torch::rand({options_.num_points, 2}) * 2 - 1;
    const auto labels = points.square().sum(1).lt(0.49).to(at::kLong);
    const int64_t tenth = options_.num_points / 10;
    parts_ = fulgur::random_split(fulgur::TensorDataset({{"point", points}, {"label", labels}}),
                                  {options_.num_points - 2 * tenth, tenth, tenth}, seed_);
  }
  std::shared_ptr<fulgur::Loader> train_dataloader() override {
    return fulgur::DataLoader::make(parts_[0], {.batch_size = options_.batch_size, .shuffle = true, .seed = seed_});
  }
  fulgur::LoaderList val_dataloader() override {
    return fulgur::DataLoader::make(parts_[1], {.batch_size = options_.batch_size});
  }
  fulgur::LoaderList test_dataloader() override {
    return fulgur::DataLoader::make(parts_[2], {.batch_size = options_.batch_size});
  }
  fulgur::LoaderList predict_dataloader() override { return test_dataloader(); }

 private:
  Options options_;
  uint64_t seed_;
  std::vector<std::shared_ptr<fulgur::TensorDataset>> parts_;  // train, val, test
};
