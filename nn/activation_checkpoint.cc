#include "fulgur/nn/activation_checkpoint.h"

#include <c10/core/Device.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>
#include <optional>
#include <string>

#include "fulgur/base/autocast.h"
#include "fulgur/base/seed.h"

namespace fulgur::internal {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

// Makes the hooks that autograd calls to save a tensor.
class Packer {
 public:
  virtual ~Packer() = default;
  virtual std::unique_ptr<SavedVariableHooks> make() = 0;
};

namespace {

// Ends a replay that has recomputed everything. Not a std::exception, so that fn does not catch it by chance.
struct ReplayIsDone {};

// The properties that a tensor must have in the second call, too.
struct Kind {
  c10::DimVector sizes;
  c10::ScalarType dtype;
  c10::Device device;

  explicit Kind(const at::Tensor& tensor)
      : sizes(tensor.sizes()), dtype(tensor.scalar_type()), device(tensor.device()) {}
  bool operator==(const Kind&) const = default;
  std::string describe() const { return c10::str(dtype, " tensor of shape ", sizes, " on ", device); }
};

// A saved tensor and its version: a change in place after that is an error in backward, as without checkpoint().
struct Versioned {
  at::Tensor tensor;
  uint32_t version = 0;

  explicit Versioned(const at::Tensor& saved) : tensor(saved.detach()), version(saved._version()) {}
  at::Tensor get() const {
    TORCH_CHECK(tensor._version() == version, "checkpoint: a ", Kind(tensor).describe(), " (a weight, if it is not ",
                "something that fn changes in place) was changed in place after it was used and before backward; ",
                "gradients would be wrong");
    return tensor;
  }
};

// A tensor that autograd saved in forward.
struct Slot {
  Kind kind;
  std::optional<Versioned> weight{};      // set if the tensor is a weight, which stays in memory anyway
  std::optional<Versioned> recomputed{};  // set from a replay until backward uses the tensor
};

bool is_weight(const at::Tensor& tensor) {
  const at::TensorBase& owner = tensor.is_view() ? tensor._base() : tensor;
  return owner.is_leaf() && owner.requires_grad();
}

// The state of autocast and random numbers in the first call, restored for the second. Generators of other GPUs are
// left alone: in a backward over several GPUs, each has a thread, whose own replay may draw from its generator.
class Surroundings {
 public:
  void enter(const std::function<void()>& body) const {
    const ScopedRandomState random_state_restored(RandomState::here());
    random_state_.restore();
    const ScopedAutocast cpu(cpu_), cuda(cuda_);
    const c10::AutoGradMode grad(true);
    body();
  }

 private:
  const RandomState random_state_ = RandomState::here();
  const AutocastState cpu_ = AutocastState::now(c10::kCPU), cuda_ = AutocastState::now(c10::kCUDA);
};

// One call of checkpoint(). Ownership: the graph that the call recorded.
class Region {
 public:
  Region(CheckpointRecording::Replay replay, const std::vector<at::Tensor>& inputs) : replay_(std::move(replay)) {
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  std::shared_ptr<Slot> save(const at::Tensor& tensor) {
    auto slot = std::make_shared<Slot>(Slot{.kind = Kind(tensor)});
    if (is_weight(tensor)) slot->weight.emplace(tensor);
    slots_.push_back(slot);
    return slot;
  }

  at::Tensor take(Slot& slot) {
    if (slot.weight) return slot.weight->get();
    const std::lock_guard lock(mutex_);  // backward has a thread for each device
    if (!slot.recomputed) replay();
    const at::Tensor tensor = slot.recomputed->get();
    slot.recomputed.reset();
    return tensor;
  }

  void recompute(size_t index, const at::Tensor& tensor) {
    if (const auto slot = slots_[index].lock()) {
      check_same(index, slot->kind, Kind(tensor));
      if (!slot->weight) slot->recomputed.emplace(tensor);
    }
    if (index + 1 == num_needed_) throw ReplayIsDone();
  }

 private:
  void replay();
  void check_same(size_t index, const Kind& first, const Kind& second) const {
    TORCH_CHECK(first == second, "checkpoint: tensor ", index, " of those that fn saves for backward was a ",
                first.describe(), " in forward, but a ", second.describe(),
                " when fn was run again; fn must do the same both times: does it ",
                "depend on something that has changed since?");
  }

  CheckpointRecording::Replay replay_;
  std::vector<SavedVariable> inputs_;
  Surroundings surroundings_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Slot>> slots_;  // in the order of saving; a graph node drops its slots once it is done
  size_t num_needed_ = 0;                   // slots that a replay fills before it ends
};

thread_local std::vector<Packer*> packers;  // the last one is in use

class ScopedPacker {
 public:
  explicit ScopedPacker(Packer& packer) { packers.push_back(&packer); }
  ~ScopedPacker() { packers.pop_back(); }
  ScopedPacker(const ScopedPacker&) = delete;
  ScopedPacker& operator=(const ScopedPacker&) = delete;
};

// Used in forward: the tensor is not kept.
class Recorder final : public Packer {
 public:
  Recorder(CheckpointRecording::Replay replay, const std::vector<at::Tensor>& inputs)
      : region_(std::make_shared<Region>(std::move(replay), inputs)) {}

  std::unique_ptr<SavedVariableHooks> make() override { return std::make_unique<Hooks>(region_); }

 private:
  struct Hooks final : SavedVariableHooks {
    explicit Hooks(std::shared_ptr<Region> its_region) : region(std::move(its_region)) {}
    void call_pack_hook(const at::Tensor& tensor) override { slot = region->save(tensor); }
    at::Tensor call_unpack_hook() override { return region->take(*slot); }
    std::shared_ptr<Region> region;
    std::shared_ptr<Slot> slot;
  };

  std::shared_ptr<Region> region_;
};

// Used in a replay: passes the tensor to the region, and also keeps it, for an fn that itself runs a backward.
class Replayer final : public Packer {
 public:
  explicit Replayer(Region& region) : region_(region) {}

  std::unique_ptr<SavedVariableHooks> make() override { return std::make_unique<Hooks>(*this); }
  size_t num_saved() const { return num_saved_; }

 private:
  struct Hooks final : SavedVariableHooks {
    explicit Hooks(Replayer& its_replayer) : replayer(its_replayer) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      saved.emplace(tensor);
      replayer.region_.recompute(replayer.num_saved_++, tensor);
    }
    at::Tensor call_unpack_hook() override { return saved->get(); }
    Replayer& replayer;
    std::optional<Versioned> saved;
  };

  Region& region_;
  size_t num_saved_ = 0;
};

void Region::replay() {
  num_needed_ = slots_.size();
  while (num_needed_ > 0) {
    const auto last = slots_[num_needed_ - 1].lock();
    if (last != nullptr && !last->weight) break;
    --num_needed_;
  }
  std::vector<at::Tensor> inputs;
  for (const SavedVariable& input : inputs_) inputs.push_back(input.unpack());
  Replayer replayer(*this);
  surroundings_.enter([&] {
    const ScopedPacker scope(replayer);
    try {
      replay_(inputs);
    } catch (const ReplayIsDone&) {
      return;
    }
  });
  TORCH_CHECK(replayer.num_saved() >= num_needed_, "checkpoint: fn saved at least ", num_needed_,
              " tensors for backward in forward, but ", replayer.num_saved(),
              " when it was run again; it must do the same both times: does it depend on something that has changed "
              "since?");
}

// An autograd engine that uses the packers: C++ has no other way to set default saved-tensor hooks.
class Engine final : public torch::autograd::Engine {
 public:
  ~Engine() override { stop(); }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    return packers.empty() ? nullptr : packers.back()->make();
  }
};

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    torch::autograd::set_default_engine_stub(+[]() -> torch::autograd::Engine& {
      static Engine engine;
      return engine;
    });
  });
}

}  // namespace

CheckpointRecording::CheckpointRecording(Replay replay, const std::vector<at::Tensor>& inputs) {
  install_engine();
  packer_ = std::make_unique<Recorder>(std::move(replay), inputs);
  packers.push_back(packer_.get());
}

CheckpointRecording::~CheckpointRecording() { packers.pop_back(); }

}  // namespace fulgur::internal
