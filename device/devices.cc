#include "fulgur/device/devices.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cstdlib>
#include <numeric>
#include <unordered_set>

#include "fulgur/base/cuda_function.h"
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

std::string cuda_version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

// CUDA's version of the driver; 0 if there is no driver.
int driver_version() {
  int version = 0;
  auto* const ask = cuda_function<int(int*)>("cudaDriverGetVersion");
  return ask != nullptr && ask(&version) == 0 ? version : 0;
}

std::string cuda_error() {
  auto* const count_devices = cuda_function<int(int*)>("cudaGetDeviceCount");
  auto* const text_of_error = cuda_function<const char*(int)>("cudaGetErrorString");
  auto* const forget_error = cuda_function<int()>("cudaGetLastError");
  if (count_devices == nullptr || text_of_error == nullptr || forget_error == nullptr) return "unknown";
  int count = 0;
  const int error = count_devices(&count);
  forget_error();
  return error == 0 && count == 0 ? "there is no device" : text_of_error(error);
}

std::string visible_devices_text() {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible == nullptr ? "" : fmt::format("CUDA_VISIBLE_DEVICES is '{}'", visible);
}

// What keeps CUDA devices from being used where none is.
std::string why_there_is_no_cuda() {
  if (!at::detail::getCUDAHooks().hasCUDART()) return "the program was linked to a libtorch without CUDA";
  const int driver = driver_version();
  if (driver == 0) return "there is no NVIDIA driver";
  const auto runtime = static_cast<int>(at::detail::getCUDAHooks().versionCUDART());
  if (driver / 1000 < runtime / 1000) {
    return fmt::format("the NVIDIA driver is for CUDA {} and older, and libtorch is built for CUDA {}",
                       cuda_version(driver), cuda_version(runtime));
  }
  const std::string visible = visible_devices_text();
  return visible.empty() ? fmt::format("CUDA says: {}", cuda_error())
                         : fmt::format("{}; CUDA says: {}", visible, cuda_error());
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
  if (!exists) {
    throw UsageError(
        fmt::format("accelerator '{}': this machine has no usable CUDA device ({}); mend that, or write 'cpu'", name,
                    why_there_is_no_cuda()));
  }
  return true;
}

// For messages about devices that are not there: " (CUDA_VISIBLE_DEVICES is '0,1')".
std::string of_visible_ones(std::string_view type) {
  const std::string visible = visible_devices_text();
  return type == "cpu" || visible.empty() ? "" : fmt::format(" ({})", visible);
}

void check_indices(const std::vector<int64_t>& indices, int64_t available, std::string_view type) {
  if (indices.empty()) throw UsageError("devices: the list is empty; at least one device is needed");
  const std::string of_visible = of_visible_ones(type);
  std::unordered_set<int64_t> seen;
  for (const int64_t index : indices) {
    if (!seen.insert(index).second) throw UsageError(fmt::format("devices: index {} is listed twice", index));
    if (index < 0 || index >= available) {
      throw UsageError(
          fmt::format("devices: there is no {}:{}; indices go from 0 to {}{}", type, index, available - 1, of_visible));
    }
  }
}

std::vector<int64_t> choose_indices(const Devices& devices, int64_t available, std::string_view type) {
  if (devices.indices()) {
    check_indices(*devices.indices(), available, type);
    return *devices.indices();
  }
  const int64_t count = devices.count().value_or(type == "cpu" ? 1 : available);
  check_devices(devices);
  const std::string of_visible = of_visible_ones(type);
  if (count > available) {
    throw UsageError(fmt::format("devices: {} were asked for, but there are only {} of type {}{}", count, available,
                                 type, of_visible));
  }
  std::vector<int64_t> indices(static_cast<size_t>(count));
  std::iota(indices.begin(), indices.end(), int64_t{0});
  return indices;
}

}  // namespace

void check_devices(const Devices& devices) {
  const int64_t count = devices.count().value_or(1);
  if (count >= 1) return;
  throw UsageError(
      fmt::format("devices: at least 1 is needed; got {}{}", count, count == -1 ? "; write auto for all" : ""));
}

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
