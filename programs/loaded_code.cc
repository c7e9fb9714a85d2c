#include "fulgur/programs/loaded_code.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <utility>

namespace fulgur {

LoadedCode::LoadedCode(std::unique_ptr<Runner> runner, size_t num_models)
    : runner_(std::move(runner)), num_models_(num_models) {}

LoadedCode::~LoadedCode() = default;

class LoadedCode::Turn {
 public:
  explicit Turn(LoadedCode& code) : code_(code) {
    std::unique_lock lock(code_.mutex_);
    code_.changed_.wait(lock, [&] { return !code_.is_exchanging_ && code_.num_running_ < code_.num_models_; });
    ++code_.num_running_;
  }
  ~Turn() {
    const std::lock_guard lock(code_.mutex_);
    --code_.num_running_;
    code_.changed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  LoadedCode& code_;
};

std::vector<at::Tensor> LoadedCode::run(std::vector<at::Tensor>&& inputs) {
  if (num_models_ == 1) return runner_->boxed_run(std::move(inputs));
  const Turn turn(*this);
  return runner_->boxed_run(std::move(inputs));
}

void LoadedCode::between_runs(const std::function<void()>& exchange) {
  std::unique_lock lock(mutex_);
  is_exchanging_ = true;
  const auto end = c10::make_scope_exit([this] {
    is_exchanging_ = false;
    changed_.notify_all();
  });
  changed_.wait(lock, [this] { return num_running_ == 0; });
  exchange();
}

}  // namespace fulgur
