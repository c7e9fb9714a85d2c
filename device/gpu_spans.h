#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "fulgur/base/trace.h"

namespace fulgur {

// How long a GPU takes for the work that is queued in a block, as a span "<name> on the GPU" in a lane that the device
// has in the file of FULGUR_TRACE (base/trace.h): a trace::Span ends when the host has queued the work.
//   GpuSpans spans(device);
//   { const ScopedGpuSpan span(spans, "forward"); ... }
// Events in the current stream mark begin and end. A span is added once the GPU has passed them: when a later one
// begins, or in the destructor, which waits. Times are exact to about 20 us, plus the drift of the two clocks. On a
// CPU, and while tracing is off, nothing is measured. Threading: the training thread.
class GpuSpans {
 public:
  explicit GpuSpans(c10::Device device) : device_(device) {}
  ~GpuSpans();
  GpuSpans(const GpuSpans&) = delete;
  GpuSpans& operator=(const GpuSpans&) = delete;

 private:
  friend class ScopedGpuSpan;
  struct Span {
    std::string name;
    c10::Event begin, end;
  };
  bool measures() const { return !device_.is_cpu() && trace::enabled(); }
  c10::Event mark() const;
  void set_origin();
  void add_finished();
  trace::Clock::time_point time_of(const c10::Event& event) const;

  const c10::Device device_;
  std::optional<c10::Event> origin_{};  // the GPU passed it at origin_time_
  trace::Clock::time_point origin_time_{};
  std::deque<Span> queued_{};
};

class ScopedGpuSpan {
 public:
  ScopedGpuSpan(GpuSpans& spans, std::string_view name);  // borrows both
  ~ScopedGpuSpan();
  ScopedGpuSpan(const ScopedGpuSpan&) = delete;
  ScopedGpuSpan& operator=(const ScopedGpuSpan&) = delete;

 private:
  GpuSpans& spans_;
  const std::string_view name_;
  std::optional<c10::Event> begin_{};  // nullopt: not measured
};

}  // namespace fulgur
