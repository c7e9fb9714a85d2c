// Learns features of the UCI digits without their labels, by SwAV or SimCLR, then compares a linear probe on these
// features with one on a random network's.
//   ./bazelw run //examples/swav -- --model.objective=simclr
#include <memory>
#include <vector>

#include "examples/linear_probe/linear_probe.h"
#include "examples/swav/crops_data.h"
#include "examples/swav/swav.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using namespace swav;

// What the encoder makes of all whole images of a loader.
linear_probe::LabelledFeatures features_of(resnet::ResNet encoder, Loader& loader) {
  const at::NoGradGuard no_grad;
  encoder->eval();
  const at::Device device = encoder->parameters().front().device();
  std::vector<at::Tensor> features, labels;
  loader.begin_epoch(0);
  while (const auto batch = loader.next()) {
    features.push_back(encoder->forward((*batch)["image"].to(device)));
    labels.push_back((*batch)["label"].to(device));
  }
  return {.features = at::cat(features), .labels = at::cat(labels)};
}

// The random network has the weights that training has started from.
void compare_probes(Trainer& trainer, const std::shared_ptr<Swav>& model, CropsData& data) {
  if (!trainer.is_global_zero()) return;
  seed_everything(data.seed());
  const Swav untrained(model->options());
  const auto features = [&](const Swav& net) -> linear_probe::DigitFeatures {
    return {.train = features_of(net.encoder(), *data.labelled_dataloader()),
            .held_out = features_of(net.encoder(), *data.test_dataloader()[0])};
  };
  linear_probe::print_margin("linear probe", features(*model), features(untrained));
}

}  // namespace

int main(int argc, char** argv) {
  return cli::run<Swav, CropsData>(argc, argv,
                                   {.trainer = {.max_epochs = 40}, .link = link_options, .after_fit = compare_probes});
}
