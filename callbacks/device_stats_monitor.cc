#include "fulgur/callbacks/device_stats_monitor.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

namespace fulgur {
namespace {

constexpr double kMiB = 1 << 20;

double cpu_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

double resident_mib() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;  // in pages
  return static_cast<double>(resident * ::sysconf(_SC_PAGESIZE)) / kMiB;
}

double available_mib() {
  std::ifstream file("/proc/meminfo");
  int64_t kib = 0;
  for (std::string name; file >> name >> kib; file.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    if (name == "MemAvailable:") return static_cast<double>(kib) / 1024;
  }
  return 0.0;
}

}  // namespace

void DeviceStatsMonitorOptions::describe(FieldVisitor& visit) {
  visit({.name = "refresh_s",
         .help = "shortest time between two queries of the system; 0: query at every step",
         .unit = "s",
         .min = 0},
        &refresh_s);
}

DeviceStatsMonitor::DeviceStatsMonitor(Options options) : options_(options) {
  check_fields("DeviceStatsMonitor", options_);
}

std::shared_ptr<DeviceStatsMonitor> DeviceStatsMonitor::make(Options options) {
  return std::make_shared<DeviceStatsMonitor>(options);
}

void DeviceStatsMonitor::on_train_start(TrainerControl&) {
  looked_at_ = Clock::now();
  cpu_s_ = cpu_seconds();
  stats_.clear();
}

void DeviceStatsMonitor::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) {
  const std::chrono::duration<double> passed = Clock::now() - looked_at_;
  if (stats_.empty() || passed.count() >= options_.refresh_s) look(trainer.device());
  for (const auto& [name, value] : stats_) {
    trainer.metrics().log(name, value, {.on_step = true, .on_epoch = false, .batch_size = 1});
  }
}

void DeviceStatsMonitor::look(c10::Device device) {
  const auto now = Clock::now();
  const double cpu_s = cpu_seconds(), passed_s = std::chrono::duration<double>(now - looked_at_).count();
  stats_["device/host_rss_mib"] = resident_mib();
  stats_["device/host_available_mib"] = available_mib();
  if (passed_s > 0.0) stats_["device/host_cpu_percent"] = 100.0 * (cpu_s - cpu_s_) / passed_s;
  looked_at_ = now;
  cpu_s_ = cpu_s;
  if (device.is_cpu()) return;
  const auto of_device = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto& allocated = of_device.allocated_bytes[0];
  stats_["device/allocated_mib"] = static_cast<double>(allocated.current) / kMiB;
  stats_["device/allocated_peak_mib"] = static_cast<double>(allocated.peak) / kMiB;
  stats_["device/reserved_mib"] = static_cast<double>(of_device.reserved_bytes[0].current) / kMiB;
}

}  // namespace fulgur
