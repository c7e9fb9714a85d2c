#include "fulgur/doctor/host_checks.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>  // get_cpu_capability
#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <sys/resource.h>
#include <torch/version.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "fulgur/base/version.h"

namespace fulgur::doctor {
namespace {

namespace fs = std::filesystem;

constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
constexpr double kLittleMemoryGib = 2;  // less than libtorch and a small model with its data need
constexpr double kLittleDiskGib = 2;
constexpr uint64_t kFewFiles = 1024;  // the usual limit; more ranks and workers than that are rare

// "name : value" of each line, as in /proc/meminfo and /proc/cpuinfo; of a repeated name the first.
std::map<std::string, std::string> read_fields(const fs::path& path) {
  std::ifstream file(path);
  std::map<std::string, std::string> fields;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const auto trimmed = [](std::string text) {
      const size_t first = text.find_first_not_of(" \t");
      if (first == std::string::npos) return std::string();
      return text.substr(first, text.find_last_not_of(" \t") - first + 1);
    };
    fields.emplace(trimmed(line.substr(0, colon)), trimmed(line.substr(colon + 1)));
  }
  return fields;
}

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<double> number_in(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end != text.data() ? std::optional(value) : std::nullopt;
}

std::optional<double> kib_field(const std::map<std::string, std::string>& fields, const std::string& name) {
  const auto field = fields.find(name);
  return field == fields.end() ? std::nullopt : number_in(field->second);
}

int64_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
}

// Cores' worth of time that the control group may use; nullopt without a limit.
std::optional<double> core_quota(const Host& host) {
  const std::string line = first_line(host.cgroup / "cpu.max");  // "200000 100000" or "max 100000"
  const size_t space = line.find(' ');
  if (space == std::string::npos) return std::nullopt;
  const auto quota = number_in(line.substr(0, space)), period = number_in(line.substr(space + 1));
  return quota && period && *period > 0 ? std::optional(*quota / *period) : std::nullopt;
}

Check processor(const Host& host) {
  const auto fields = read_fields(host.proc / "cpuinfo");
  const auto model = fields.find("model name");
  const int64_t cores = usable_cores();
  Check check{.topic = "processor",
              .found = fmt::format("{}, {} core{} for this process", model == fields.end() ? "unknown" : model->second,
                                   cores, cores == 1 ? "" : "s")};
  if (const auto quota = core_quota(host); quota && *quota < static_cast<double>(cores)) {
    check.found += fmt::format(", of which the control group grants the time of {:.3g}", *quota);
    check.verdict = Verdict::warning;
    check.advice = fmt::format("set OMP_NUM_THREADS={} for one rank, so that threads do not wait for each other",
                               std::max<int64_t>(1, static_cast<int64_t>(*quota)));
  }
  return check;
}

Check threads(const Host& host) {
  const auto setting = find_variable(host.variables, "OMP_NUM_THREADS");
  return {.topic = "threads",
          .found = fmt::format("{} for each operation ({})", at::get_num_threads(),
                               setting ? "OMP_NUM_THREADS=" + *setting : "OMP_NUM_THREADS is not set")};
}

Check memory(const Host& host) {
  const auto fields = read_fields(host.proc / "meminfo");
  const auto total = kib_field(fields, "MemTotal"), available = kib_field(fields, "MemAvailable");
  if (!total || !available) {
    return {.topic = "memory",
            .found = fmt::format("unknown: {} does not say", (host.proc / "meminfo").string()),
            .verdict = Verdict::warning,
            .advice = "mount /proc into the container"};
  }
  double free_gib = *available * 1024 / kGib;
  Check check{.topic = "memory", .found = fmt::format("{:.1f} GiB, {:.1f} free", *total * 1024 / kGib, free_gib)};
  const auto limit = number_in(first_line(host.cgroup / "memory.max"));
  const auto used = number_in(first_line(host.cgroup / "memory.current"));
  if (limit && *limit / 1024 < *total) {
    const double left = (*limit - used.value_or(0)) / kGib;
    check.found +=
        fmt::format(", limited to {:.1f} GiB by the control group, of which {:.1f} are free", *limit / kGib, left);
    free_gib = std::min(free_gib, left);
  }
  if (free_gib < kLittleMemoryGib) {
    check.verdict = Verdict::warning;
    check.advice = "libtorch alone takes a quarter of a GiB in each rank; end other programs, or raise the limit";
  }
  return check;
}

Check gpus(const Host& host) {
  std::vector<std::string> present;
  std::error_code error;
  for (const auto& gpu : fs::directory_iterator(host.proc / "driver/nvidia/gpus", error)) {
    const auto fields = read_fields(gpu.path() / "information");
    const auto model = fields.find("Model");
    present.push_back(model == fields.end() ? "unknown" : model->second);
  }
  const auto& hooks = at::detail::getCUDAHooks();
  const int64_t usable = hooks.hasCUDA() ? hooks.deviceCount() : 0;
  if (present.empty() && usable == 0) return {.topic = "GPUs", .found = "none"};
  Check check{.topic = "GPUs", .found = fmt::format("{} usable; present: {}", usable, fmt::join(present, ", "))};
  const auto visible = host.variables.find("CUDA_VISIBLE_DEVICES");
  if (usable >= static_cast<int64_t>(present.size())) return check;
  if (visible != host.variables.end()) {
    check.found += fmt::format(" (CUDA_VISIBLE_DEVICES={})", visible->second);
  } else {
    check.verdict = Verdict::problem;
    check.advice = hooks.hasCUDA() ? "CUDA finds fewer GPUs than the driver: does nvidia-smi list them?"
                                   : "this program was linked to a libtorch without CUDA, or libcuda.so.1 is missing";
  }
  return check;
}

Check libraries() {
  return {.topic = "libraries",
          .found = fmt::format("fulgur {}, libtorch {}{}, compiled by {}", version(), TORCH_VERSION,
                               at::detail::getCUDAHooks().hasCUDA() ? " with CUDA" : "", __VERSION__)};
}

std::string limit_text(rlim_t limit) { return limit == RLIM_INFINITY ? "unlimited" : fmt::format("{}", limit); }

Check open_files() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  Check check{.topic = "open files", .found = fmt::format("at most {}", limit_text(limit.rlim_cur))};
  if (limit.rlim_cur < kFewFiles) {
    check.verdict = Verdict::warning;
    check.advice = fmt::format("ranks, workers and files of records each take a few: write ulimit -n {}",
                               limit.rlim_max < kFewFiles ? limit.rlim_max : kFewFiles);
  }
  return check;
}

Check locked_memory() {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  Check check{.topic = "locked memory", .found = fmt::format("at most {} bytes", limit_text(limit.rlim_cur))};
  if (limit.rlim_cur == RLIM_INFINITY) check.found = "unlimited";
  std::error_code error;
  const bool has_rdma = !fs::is_empty("/sys/class/infiniband", error) && !error;
  if (has_rdma && limit.rlim_cur != RLIM_INFINITY) {
    check.verdict = Verdict::warning;
    check.advice = "NCCL over InfiniBand registers memory: write ulimit -l unlimited";
  }
  return check;
}

Check disk(const Host& host) {
  std::error_code error;
  const fs::path folder = fs::weakly_canonical(host.folder, error);
  const fs::space_info space = fs::space(folder, error);
  if (error) {
    return {.topic = "disk",
            .found = fmt::format("unknown for {}: {}", folder.string(), error.message()),
            .verdict = Verdict::warning};
  }
  const double free_gib = static_cast<double>(space.available) / kGib;
  Check check{.topic = "disk", .found = fmt::format("{:.1f} GiB free in {}", free_gib, folder.string())};
  if (free_gib < kLittleDiskGib) {
    check.verdict = Verdict::warning;
    check.advice = "a checkpoint with Adam takes 12 bytes per parameter; name another folder with --default_root_dir";
  }
  return check;
}

}  // namespace

Checks check_host(const Host& host) {
  return {processor(host), {.topic = "instructions", .found = at::get_cpu_capability()},
          threads(host),   memory(host),
          gpus(host),      libraries(),
          open_files(),    locked_memory(),
          disk(host)};
}

}  // namespace fulgur::doctor
