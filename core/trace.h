#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace fulgur::trace {

// Where the time of a step goes, for chrome://tracing or ui.perfetto.dev. With FULGUR_TRACE=<folder> in the environment
// each process writes <folder>/rank-<rank>.json when it ends; without it a span costs the test of a flag. The clocks of
// processes on one machine agree.
using Clock = std::chrono::steady_clock;

bool enabled();

// On a lane of its own name, or on that of the thread that calls it.
void add(std::string name, Clock::time_point begin, Clock::time_point end, std::string_view lane = {});

// The time from here to the end of the block.
class Span {
 public:
  explicit Span(std::string_view name) : name_(name), begin_(enabled() ? Clock::now() : Clock::time_point()) {}
  ~Span() {
    if (enabled()) add(std::string(name_), begin_, Clock::now());
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  std::string_view name_;
  Clock::time_point begin_;
};

}  // namespace fulgur::trace
