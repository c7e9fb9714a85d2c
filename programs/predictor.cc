#include "fulgur/programs/predictor.h"

#include <c10/core/GradMode.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/checkpoint/load_weights.h"
#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/core/module.h"
#include "fulgur/programs/archive_entries.h"
#include "fulgur/programs/checkpoint_weights.h"
#include "fulgur/programs/compiled_package.h"
#include "fulgur/programs/program.h"

namespace fulgur {

class Predictor::Model {
 public:
  virtual ~Model() = default;
  virtual Batch run(const Batch& inputs) = 0;
  virtual void set_weights(const std::filesystem::path& checkpoint) = 0;
};

namespace {

using Run = std::function<Batch(const Batch&)>;

// Changes weights by making another model; the old model lives until its last run ends.
class ReplacedModel final : public Predictor::Model {
 public:
  // `make` makes a model with the weights of a checkpoint; an empty path asks for those it has by itself.
  ReplacedModel(std::function<Run(const std::filesystem::path&)> make, const std::filesystem::path& weights)
      : make_(std::move(make)), run_(std::make_shared<const Run>(make_(weights))) {}

  Batch run(const Batch& inputs) override {
    const c10::NoGradGuard no_gradient;
    return (*current())(inputs);
  }

  void set_weights(const std::filesystem::path& checkpoint) override {
    auto next = std::make_shared<const Run>(make_(checkpoint));
    const std::lock_guard lock(mutex_);
    run_.swap(next);
  }

 private:
  std::shared_ptr<const Run> current() {
    const std::lock_guard lock(mutex_);
    return run_;
  }

  const std::function<Run(const std::filesystem::path&)> make_;
  std::mutex mutex_;
  std::shared_ptr<const Run> run_;
};

class CompiledModel final : public Predictor::Model {
 public:
  CompiledModel(const std::filesystem::path& file, const PredictorOptions& options) : package_(file, options.device) {
    if (!options.weights.empty()) package_.set_weights(options.weights);
  }
  Batch run(const Batch& inputs) override { return package_.run(inputs); }
  void set_weights(const std::filesystem::path& checkpoint) override { package_.set_weights(checkpoint); }

 private:
  CompiledPackage package_;
};

Run run_of_program(const std::filesystem::path& file, c10::Device device, const std::filesystem::path& checkpoint) {
  const std::shared_ptr<nn::ProgramImpl> program = nn::Program(file).ptr();
  if (!checkpoint.empty()) {
    std::map<std::string, std::vector<int64_t>> sizes;
    for (const auto& item : program->named_parameters()) sizes[item.key()] = item.value().sizes().vec();
    for (const auto& item : program->named_buffers()) sizes[item.key()] = item.value().sizes().vec();
    const auto weights = weights_of_program(CheckpointReader(checkpoint), sizes, file.string());
    load_weights(*program, {weights.begin(), weights.end()}, checkpoint.string());
  }
  program->eval();
  program->to(device);
  return [program, device](const Batch& inputs) { return program->forward(inputs.to(device)); };
}

Run run_of_module(const Module& like, c10::Device device, const std::filesystem::path& checkpoint) {
  const std::shared_ptr<Module> module = like.make_another();
  module->configure_model();
  load_weights(*module, CheckpointReader(checkpoint).finished_weights(), checkpoint.string());
  module->eval();
  module->to(device);
  return [module, device](const Batch& inputs) {
    return module->predict_step(module->transfer_batch_to_device(inputs, device), 0);
  };
}

std::unique_ptr<Predictor::Model> open(const std::filesystem::path& file, const PredictorOptions& options) {
  const auto map = MemoryMap::open(file);
  const ArchiveEntries entries = read_archive_entries(*map);
  if (exported_programs(entries).empty() && !compiled_models(entries).empty()) {
    return std::make_unique<CompiledModel>(file, options);
  }
  const auto make = [file, device = options.device](const std::filesystem::path& checkpoint) {
    return run_of_program(file, device, checkpoint);
  };
  return std::make_unique<ReplacedModel>(make, options.weights);
}

std::unique_ptr<Predictor::Model> open(std::shared_ptr<const Module> module, const PredictorOptions& options) {
  if (module == nullptr) throw UsageError("the module of a Predictor is null");
  if (options.weights.empty()) {
    throw UsageError("a Predictor of a Module needs its weights: set PredictorOptions::weights to a checkpoint");
  }
  const auto make = [module = std::move(module), device = options.device](const std::filesystem::path& checkpoint) {
    return run_of_module(*module, device, checkpoint);
  };
  return std::make_unique<ReplacedModel>(make, options.weights);
}

}  // namespace

Predictor::Predictor(const std::filesystem::path& file, PredictorOptions options) : model_(open(file, options)) {}
Predictor::Predictor(std::shared_ptr<const Module> module, PredictorOptions options)
    : model_(open(std::move(module), options)) {}
Predictor::~Predictor() = default;

Batch Predictor::run(const Batch& inputs) const { return model_->run(inputs); }

void Predictor::set_weights(const std::filesystem::path& checkpoint) { model_->set_weights(checkpoint); }

}  // namespace fulgur
