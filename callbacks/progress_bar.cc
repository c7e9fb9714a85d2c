#include "callbacks/progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <iostream>

namespace fulgur {
namespace {

std::string short_number(double x) {
  if (x >= 1e6) return fmt::format("{:.1f}M", x / 1e6);
  if (x >= 1e3) return fmt::format("{:.1f}k", x / 1e3);
  return fmt::format("{:.1f}", x);
}

std::string clock_time(double seconds) {
  const auto total = static_cast<int64_t>(seconds + 0.5);
  if (total >= 3600) return fmt::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
  return fmt::format("{}:{:02}", total / 60, total % 60);
}

}  // namespace

ProgressBar::ProgressBar(Options options)
    : options_(options), is_terminal_(options.is_terminal.value_or(::isatty(STDOUT_FILENO) == 1)) {
  if (options_.out == nullptr) options_.out = &std::cout;
}

std::shared_ptr<ProgressBar> ProgressBar::make(Options options) { return std::make_shared<ProgressBar>(options); }

void ProgressBar::on_train_epoch_start(TrainerControl&) { epoch_start_ = last_drawn_ = Clock::now(); }

void ProgressBar::on_validation_start(TrainerControl&) { validation_start_ = Clock::now(); }

void ProgressBar::on_validation_end(TrainerControl&) { epoch_start_ += Clock::now() - validation_start_; }

void ProgressBar::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t batch_idx) {
  if (!is_terminal_) return;
  const auto now = Clock::now();
  if (now - last_drawn_ < options_.refresh_interval) return;
  last_drawn_ = now;
  draw(line(trainer, batch_idx + 1));
}

void ProgressBar::on_train_epoch_end(TrainerControl& trainer) {
  draw(line(trainer, trainer.state().batch_idx));
  end_line();
}

void ProgressBar::on_exception(TrainerControl&, const std::exception&) { end_line(); }

std::string ProgressBar::line(TrainerControl& trainer, int64_t batches) const {
  const RunState& state = trainer.state();
  const double seconds = std::chrono::duration<double>(Clock::now() - epoch_start_).count();
  const double rate = seconds > 0 ? static_cast<double>(batches) / seconds : 0.0;
  std::string text = fmt::format("Epoch {}", state.epoch + 1);
  if (state.max_epochs >= 0) text += fmt::format("/{}", state.max_epochs);
  if (state.num_batches) {
    text += fmt::format(" {:3}% {}/{}", 100 * batches / *state.num_batches, batches, *state.num_batches);
  } else {
    text += fmt::format(" {}", batches);
  }
  text += fmt::format(" | {} it/s", short_number(rate));
  const bool running = state.num_batches && batches < *state.num_batches && rate > 0;
  if (running) text += fmt::format(" | ETA {}", clock_time(static_cast<double>(*state.num_batches - batches) / rate));
  for (const auto& [name, value] : trainer.metrics().progress_bar_metrics()) {
    text += fmt::format(" | {} {:.4g}", name, value);
  }
  return text;
}

// On a terminal, spaces cover what is left of a longer line.
void ProgressBar::draw(const std::string& line) {
  *options_.out << (is_terminal_ ? "\r" : "") << line;
  if (is_terminal_ && line.size() < width_) *options_.out << std::string(width_ - line.size(), ' ');
  *options_.out << std::flush;
  width_ = line.size();
}

void ProgressBar::end_line() {
  if (width_ > 0) *options_.out << std::endl;
  width_ = 0;
}

}  // namespace fulgur
