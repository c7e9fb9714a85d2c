#include "fulgur/device/devices.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <numeric>
#include <unordered_set>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

constexpr int64_t kMaxCpuDevices = 1024;  // CPU devices are virtual; a larger number is a typing error

int64_t parse_index(std::string_view whole, std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) {
    throw UsageError(fmt::format("'{}' is not a count of devices (4), a list of them (0,2) or 'auto'", whole));
  }
  return value;
}

int64_t cuda_device_count() {
  return at::detail::getCUDAHooks().hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
}

bool use_cuda(std::string_view accelerator) {
  const std::string name = canonical_name(accelerator);
  const bool exists = cuda_device_count() > 0;
  if (name == "cpu") return false;
  if (name == "auto") return exists;
  if (name != "cuda" && name != "gpu") {
    const std::vector<std::string> known{"auto", "cpu", "cuda", "gpu"};
    throw UsageError(unknown_name_message("accelerator", accelerator, known));
  }
  if (!exists)
    throw UsageError(fmt::format("accelerator '{}': this machine has no usable CUDA device; write 'cpu'", name));
  return true;
}

void check_indices(const std::vector<int64_t>& indices, int64_t available, std::string_view type) {
  if (indices.empty()) throw UsageError("devices: the list is empty; at least one device is needed");
  std::unordered_set<int64_t> seen;
  for (const int64_t index : indices) {
    if (!seen.insert(index).second) throw UsageError(fmt::format("devices: index {} is listed twice", index));
    if (index < 0 || index >= available) {
      throw UsageError(fmt::format("devices: there is no {}:{}; indices go from 0 to {}", type, index, available - 1));
    }
  }
}

std::vector<int64_t> choose_indices(const Devices& devices, int64_t available, std::string_view type) {
  if (devices.indices()) {
    check_indices(*devices.indices(), available, type);
    return *devices.indices();
  }
  const int64_t count = devices.count().value_or(type == "cpu" ? 1 : available);
  if (count < 1) throw UsageError(fmt::format("devices: at least 1 is needed; got {}", count));
  if (count > available) {
    throw UsageError(
        fmt::format("devices: {} were asked for, but there are only {} of type {}", count, available, type));
  }
  std::vector<int64_t> indices(static_cast<size_t>(count));
  std::iota(indices.begin(), indices.end(), int64_t{0});
  return indices;
}

}  // namespace

Devices::Devices(std::string_view text) {
  if (canonical_name(text) == "auto") return;
  if (text.find(',') == std::string_view::npos) {
    count_ = parse_index(text, text);
    return;
  }
  indices_.emplace();
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    indices_->push_back(parse_index(text, rest.substr(0, comma)));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
}

std::string Devices::to_string() const {
  if (count_) return fmt::format("{}", *count_);
  if (indices_) return fmt::format("{}{}", fmt::join(*indices_, ","), indices_->size() < 2 ? "," : "");
  return "auto";
}

std::vector<c10::Device> resolve_devices(std::string_view accelerator, const Devices& devices) {
  const bool cuda = use_cuda(accelerator);
  const auto indices = choose_indices(devices, cuda ? cuda_device_count() : kMaxCpuDevices, cuda ? "cuda" : "cpu");
  std::vector<c10::Device> resolved;
  for (const int64_t index : indices) {
    resolved.push_back(cuda ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)) : c10::Device(c10::kCPU));
  }
  return resolved;
}

}  // namespace fulgur
