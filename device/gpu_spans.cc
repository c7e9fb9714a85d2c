#include "fulgur/device/gpu_spans.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <utility>

#include "fulgur/base/logging.h"

namespace fulgur {

GpuSpans::~GpuSpans() {
  if (queued_.empty()) return;
  try {
    queued_.back().end.synchronize();
    add_finished();
  } catch (const std::exception& error) {
    log_warning("the last spans of {} are lost: {}", device_.str(), error.what());
  }
}

c10::Event GpuSpans::mark() const {
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with a time
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return event;
}

void GpuSpans::set_origin() {
  if (origin_) return;
  origin_ = mark();
  origin_->synchronize();
  origin_time_ = trace::Clock::now();
}

void GpuSpans::add_finished() {
  for (; !queued_.empty() && queued_.front().end.query(); queued_.pop_front()) {
    const Span& span = queued_.front();
    trace::add(fmt::format("{} on the GPU", span.name), time_of(span.begin), time_of(span.end), device_.str());
  }
}

trace::Clock::time_point GpuSpans::time_of(const c10::Event& event) const {
  const std::chrono::duration<double, std::milli> since_origin(origin_->elapsedTime(event));
  return origin_time_ + std::chrono::duration_cast<trace::Clock::duration>(since_origin);
}

ScopedGpuSpan::ScopedGpuSpan(GpuSpans& spans, std::string_view name) : spans_(spans), name_(name) {
  if (!spans.measures()) return;
  spans.set_origin();
  spans.add_finished();
  begin_ = spans.mark();
}

ScopedGpuSpan::~ScopedGpuSpan() {
  if (!begin_) return;
  try {
    spans_.queued_.push_back({std::string(name_), std::move(*begin_), spans_.mark()});
  } catch (const std::exception&) {  // the device has failed, which its next call tells
  }
}

}  // namespace fulgur
