#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace fulgur::trace {

// Where the time of a step goes, for chrome://tracing or ui.perfetto.dev. With FULGUR_TRACE=<folder> in the
// environment each process writes <folder>/rank-<rank>.json when it ends; otherwise a span only tests a flag. The
// clocks of processes on one machine agree.
using Clock = std::chrono::steady_clock;

bool enabled();

// Adds a span to the lane called `lane`, or, if empty, to the lane of the calling thread.
void add(std::string name, Clock::time_point begin, Clock::time_point end, std::string_view lane = {});

// Records the time from its construction to the end of the block.
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
