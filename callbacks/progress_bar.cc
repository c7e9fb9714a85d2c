#include "fulgur/callbacks/progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <iostream>
#include <system_error>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/terminal_size.h"
#include "fulgur/reports/terminal_text.h"

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

// The progress as text: " 42% 3/7 | 12.0 it/s | ETA 0:03".
// `batches_before`: those that took no time here, because the process before this one ran them.
std::string amount_done(int64_t batches, int64_t batches_before, std::optional<int64_t> num_batches, double seconds) {
  const double rate = seconds > 0 ? static_cast<double>(batches - batches_before) / seconds : 0.0;
  std::string text = num_batches ? fmt::format(" {:3}% {}/{}", 100 * batches / *num_batches, batches, *num_batches)
                                 : fmt::format(" {}", batches);
  text += fmt::format(" | {} it/s", short_number(rate));
  const bool running = num_batches && batches < *num_batches && rate > 0;
  if (running) text += fmt::format(" | ETA {}", clock_time(static_cast<double>(*num_batches - batches) / rate));
  return text;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string line_of_epoch(TrainerControl& trainer, int64_t batches, int64_t batches_before, double seconds) {
  const RunState& state = trainer.state();
  std::string text = fmt::format("Epoch {}", state.epoch + 1);
  if (state.max_epochs >= 0) text += fmt::format("/{}", state.max_epochs);
  text += amount_done(batches, batches_before, state.num_batches, seconds);
  for (const auto& [name, value] : trainer.metrics().progress_bar_metrics()) {
    text += fmt::format(" | {} {:.4g}", name, value);
  }
  return text;
}

std::string_view name_of_pass(const RunState& state) {
  if (state.sanity_checking) return "Sanity check";
  return state.stage == Stage::validate ? "Validation" : state.stage == Stage::test ? "Test" : "Prediction";
}

}  // namespace

void ProgressBarOptions::describe(FieldVisitor& visit) {
  const auto set = [this](std::string_view text) {
    int64_t milliseconds = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), milliseconds);
    if (error != std::errc{} || end != text.data() + text.size() || milliseconds < 0) {
      throw UsageError(fmt::format("'{}' is no number of milliseconds", text));
    }
    refresh_interval = std::chrono::milliseconds(milliseconds);
  };
  visit({.name = "refresh_interval", .help = "least time from one redraw of the line to the next", .unit = "ms"},
        TextField{set, [this] { return fmt::format("{}", refresh_interval.count()); }});
}

ProgressBar::ProgressBar(Options options)
    : options_(options), is_terminal_(options.is_terminal.value_or(::isatty(STDOUT_FILENO) == 1)) {
  if (options_.out == nullptr) options_.out = &std::cout;
  if (is_terminal_) makes_room_.emplace([this] { clear_line(); });
}

std::shared_ptr<ProgressBar> ProgressBar::make(Options options) { return std::make_shared<ProgressBar>(options); }

void ProgressBar::on_train_epoch_start(TrainerControl&) {
  epoch_start_ = last_drawn_ = Clock::now();
  first_batch_.reset();
}

void ProgressBar::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t batch_idx) {
  if (!first_batch_) first_batch_ = batch_idx;
  if (is_time_to_draw()) draw(line_of_epoch(trainer, batch_idx + 1, *first_batch_, seconds_since(epoch_start_)));
}

void ProgressBar::on_train_epoch_end(TrainerControl& trainer) {
  const int64_t batches = trainer.state().batch_idx;
  draw(line_of_epoch(trainer, batches, first_batch_.value_or(batches), seconds_since(epoch_start_)));
  end_line();
}

void ProgressBar::on_validation_start(TrainerControl&) { validation_start_ = Clock::now(); }

void ProgressBar::on_validation_end(TrainerControl& trainer) {
  epoch_start_ += Clock::now() - validation_start_;
  end_pass(trainer);
}

void ProgressBar::on_validation_batch_start(TrainerControl&, const Batch&, int64_t batch_idx) { begin_pass(batch_idx); }
void ProgressBar::on_test_batch_start(TrainerControl&, const Batch&, int64_t batch_idx) { begin_pass(batch_idx); }
void ProgressBar::on_predict_batch_start(TrainerControl&, const Batch&, int64_t batch_idx) { begin_pass(batch_idx); }

void ProgressBar::on_validation_batch_end(TrainerControl& trainer, const Batch&, int64_t batch_idx) {
  draw_pass(trainer, batch_idx + 1);
}
void ProgressBar::on_test_batch_end(TrainerControl& trainer, const Batch&, int64_t batch_idx) {
  draw_pass(trainer, batch_idx + 1);
}
void ProgressBar::on_predict_batch_end(TrainerControl& trainer, const Batch&, const Batch&, int64_t batch_idx) {
  draw_pass(trainer, batch_idx + 1);
}

void ProgressBar::on_test_end(TrainerControl& trainer) { end_pass(trainer); }
void ProgressBar::on_predict_end(TrainerControl& trainer) { end_pass(trainer); }

void ProgressBar::on_exception(TrainerControl&, const std::exception&) { end_line(); }

bool ProgressBar::is_time_to_draw() {
  if (!is_terminal_) return false;
  const auto now = Clock::now();
  if (now - last_drawn_ < options_.refresh_interval) return false;
  last_drawn_ = now;
  return true;
}

void ProgressBar::begin_pass(int64_t batch_idx) {
  if (batch_idx == 0) pass_start_ = Clock::now();
}

void ProgressBar::draw_pass(TrainerControl& trainer, int64_t batches) {
  const RunState& state = trainer.state();
  const bool is_last = batches == state.num_batches && state.entry_point != EntryPoint::fit;
  if (!is_time_to_draw() && !(is_terminal_ && is_last)) return;
  std::string line(name_of_pass(state));
  if (const auto loader = trainer.metrics().dataloader()) line += fmt::format(", loader {}", *loader);
  draw(line + amount_done(batches, /*batches_before=*/0, state.num_batches, seconds_since(pass_start_)));
}

// Within fit, clears the line: the line of the epoch replaces it.
void ProgressBar::end_pass(const TrainerControl& trainer) {
  trainer.state().entry_point == EntryPoint::fit ? clear_line() : end_line();
}

// The columns that a line may take. In the last column of a terminal the cursor may already be in the next row.
size_t ProgressBar::columns() const {
  if (options_.columns > 0) return options_.columns - 1;
  return terminal_size().value_or(TerminalSize()).columns - 1;
}

// Draws the line. On a terminal it is cut, for a carriage return does not leave the row that a longer one ends in, and
// spaces cover the rest of a longer previous line.
void ProgressBar::draw(const std::string& line) {
  const std::lock_guard lock(mutex_);
  line_ = line;
  if (!is_terminal_) {
    *options_.out << line << std::flush;
    return;
  }
  const size_t most = columns();
  const std::string shown = terminal_text(line, most);
  const size_t width = columns_of(shown), previous = std::min(std::exchange(width_, width), most);
  *options_.out << '\r' << shown << std::string(previous - std::min(width, previous), ' ') << std::flush;
}

void ProgressBar::clear_line() {
  const std::lock_guard lock(mutex_);
  const size_t width = std::min(std::exchange(width_, 0), columns());
  if (width > 0) *options_.out << '\r' << std::string(width, ' ') << '\r' << std::flush;
  line_.clear();
}

// Leaves the line on the terminal, and what was cut of it.
void ProgressBar::end_line() {
  const std::lock_guard lock(mutex_);
  if (line_.empty()) return;
  const bool is_cut = is_terminal_ && columns_of(line_) > width_;
  *options_.out << (is_cut ? '\r' + terminal_text(line_) : "") << std::endl;
  width_ = 0;
  line_.clear();
}

}  // namespace fulgur
