#include "fulgur/loops/repeat_first_epoch.h"

#include <utility>

namespace fulgur {
namespace {

class FirstEpoch final : public Loader {
 public:
  explicit FirstEpoch(std::shared_ptr<Loader> loader) : loader_(std::move(loader)) {}
  void begin_epoch(int64_t) override { loader_->begin_epoch(0); }
  std::optional<Batch> next() override { return loader_->next(); }
  std::optional<int64_t> num_batches() const override { return loader_->num_batches(); }
  State position() const override { return loader_->position(); }
  void go_to(const State& position) override { loader_->go_to(position); }
  std::optional<int64_t> batch_size() const override { return loader_->batch_size(); }
  State state() const override { return loader_->state(); }
  void load_state(const State& state) override { loader_->load_state(state); }
  bool set_shard(const DataShard& shard) override { return loader_->set_shard(shard); }

 private:
  std::shared_ptr<Loader> loader_;
};

}  // namespace

std::shared_ptr<Loader> repeat_first_epoch(std::shared_ptr<Loader> loader) {
  return std::make_shared<FirstEpoch>(std::move(loader));
}

}  // namespace fulgur
