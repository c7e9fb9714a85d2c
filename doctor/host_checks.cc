#include "fulgur/doctor/host_checks.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>  // get_cpu_capability
#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "fulgur/base/cores_of_process.h"
#include "fulgur/base/version.h"
#include "fulgur/distributed/nccl_transport.h"

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

// The folders with the limits that a controller ("cpu", "memory") sets for this process: the folders of its control
// group and of all groups around that. /proc/self/cgroup names the group in a line such as "4:cpu,cpuacct:/a/b" in
// version 1, which has a tree for each controller, and "0::/a/b" in version 2. In a container, the root of the tree may
// be the container's own group, although the path is the host's; a folder that does not exist has no limits.
std::vector<fs::path> control_groups(const Host& host, const std::string& controller) {
  std::vector<fs::path> folders{host.cgroup, host.cgroup / controller};
  std::ifstream file(host.proc / "self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_version_2 = controllers.empty();
    const bool has_controller =
        fmt::format(",{},", controllers).find(fmt::format(",{},", controller)) != std::string::npos;
    if (!is_version_2 && !has_controller) continue;
    const fs::path root = is_version_2 ? host.cgroup : host.cgroup / controller;
    for (fs::path path = fs::path(line.substr(second + 1)).relative_path(); !path.empty(); path = path.parent_path()) {
      folders.push_back(root / path);
    }
  }
  return folders;
}

// The least of what `read` returns for the folders; nullopt if it returns nothing for any of them.
std::optional<double> least(const std::vector<fs::path>& folders,
                            const std::function<std::optional<double>(const fs::path&)>& read) {
  std::optional<double> least;
  for (const fs::path& folder : folders) {
    const std::optional<double> value = read(folder);
    if (value && (!least || *value < *least)) least = value;
  }
  return least;
}

// Cores' worth of time that a control group may use; nullopt without a limit.
std::optional<double> core_quota(const fs::path& group) {
  const std::string line = first_line(group / "cpu.max");  // version 2: "200000 100000" or "max 100000"
  const size_t space = line.find(' ');
  const bool is_version_2 = space != std::string::npos;
  const auto quota = number_in(is_version_2 ? line.substr(0, space) : first_line(group / "cpu.cfs_quota_us"));
  const auto period = number_in(is_version_2 ? line.substr(space + 1) : first_line(group / "cpu.cfs_period_us"));
  const bool has_limit = quota && *quota > 0 && period && *period > 0;  // version 1 has -1 for no limit
  return has_limit ? std::optional(*quota / *period) : std::nullopt;
}

// Bytes that a control group may use; nullopt without a limit. Version 1 has a limit of 2^63 bytes, rounded to pages.
std::optional<double> memory_limit(const fs::path& group) {
  const auto limit = number_in(first_line(group / "memory.max"));
  return limit ? limit : number_in(first_line(group / "memory.limit_in_bytes"));
}

// A line of memory.stat: "inactive_file 4096".
double stat_of(const fs::path& group, const std::string& name) {
  std::ifstream file(group / "memory.stat");
  std::string key;
  for (double value = 0; file >> key >> value;) {
    if (key == name) return value;
  }
  return 0;
}

// Bytes of its limit that a control group has left; nullopt without a limit. Cached pages of files that nobody has read
// lately are used memory for the kernel, but it takes them back when a process needs memory.
std::optional<double> memory_left(const fs::path& group) {
  const auto limit = memory_limit(group);
  if (!limit) return std::nullopt;
  if (const auto used = number_in(first_line(group / "memory.current"))) {
    return *limit - *used + stat_of(group, "inactive_file");
  }
  const auto used = number_in(first_line(group / "memory.usage_in_bytes"));
  return *limit - used.value_or(0) + stat_of(group, "total_inactive_file");
}

Check processor(const Host& host) {
  const auto fields = read_fields(host.proc / "cpuinfo");
  const auto model = fields.find("model name");
  const int64_t cores = std::ssize(cores_of_process());
  Check check{.topic = "processor",
              .found = fmt::format("{}, {} core{} for this process", model == fields.end() ? "unknown" : model->second,
                                   cores, cores == 1 ? "" : "s")};
  if (const auto quota = least(control_groups(host, "cpu"), core_quota); quota && *quota < static_cast<double>(cores)) {
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
  const std::vector<fs::path> groups = control_groups(host, "memory");
  const auto limit = least(groups, memory_limit);
  if (limit && *limit / 1024 < *total) {
    const double left = least(groups, memory_left).value_or(*limit) / kGib;
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

// " with CUDA 13.0, cuDNN 9.19.0, NCCL 2.28.9", whether or not there is a GPU; empty if libtorch was built without
// CUDA.
std::string cuda_libraries() {
  const auto& hooks = at::detail::getCUDAHooks();
  if (!hooks.hasCUDART()) return "";
  const int64_t cuda = hooks.versionCUDART();
  std::string text = fmt::format(" with CUDA {}.{}", cuda / 1000, cuda % 1000 / 10);
  if (hooks.hasCuDNN()) {
    const int64_t cudnn = hooks.versionCuDNN();
    text += fmt::format(", cuDNN {}.{}.{}", cudnn / 10'000, cudnn / 100 % 100, cudnn % 100);
  }
  const std::string nccl = nccl_version();
  return nccl.empty() ? text : fmt::format("{}, NCCL {}", text, nccl);
}

Check libraries() {
  return {.topic = "libraries",
          .found = fmt::format("fulgur {}, libtorch {}{}, compiled by {}", version(), TORCH_VERSION, cuda_libraries(),
                               __VERSION__)};
}

std::string limit_text(rlim_t limit) { return limit == RLIM_INFINITY ? "unlimited" : fmt::format("{}", limit); }

Check open_files(const Host& host) {
  const rlimit& limit = host.open_files;
  Check check{.topic = "open files", .found = fmt::format("at most {}", limit_text(limit.rlim_cur))};
  if (limit.rlim_cur >= kFewFiles) return check;
  check.verdict = Verdict::warning;
  check.advice = "ranks, workers and files of records each take a few: ";
  if (limit.rlim_cur < limit.rlim_max) {
    check.advice += fmt::format("write ulimit -n {}", std::min<rlim_t>(limit.rlim_max, kFewFiles));
  } else {
    check.advice += fmt::format("only root can raise this limit, say to {} in /etc/security/limits.conf", kFewFiles);
  }
  return check;
}

Check locked_memory(const Host& host) {
  const rlimit& limit = host.locked_memory;
  Check check{.topic = "locked memory", .found = fmt::format("at most {} bytes", limit_text(limit.rlim_cur))};
  if (limit.rlim_cur == RLIM_INFINITY) check.found = "unlimited";
  std::error_code error;
  const bool has_rdma = !fs::is_empty(host.infiniband, error) && !error;
  if (has_rdma && limit.rlim_cur != RLIM_INFINITY) {
    check.verdict = Verdict::warning;
    check.advice = "NCCL over InfiniBand registers memory: ";
    check.advice += limit.rlim_max == RLIM_INFINITY
                        ? "write ulimit -l unlimited"
                        : "only root can lift this limit, with memlock unlimited in /etc/security/limits.conf";
  }
  return check;
}

Check disk(const Host& host) {
  std::error_code error;
  fs::path folder = fs::weakly_canonical(host.folder, error);
  while (!fs::exists(folder, error) && folder.has_relative_path())
    folder = folder.parent_path();  // a run makes its folder
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

rlimit limit_of(decltype(RLIMIT_NOFILE) resource) {
  rlimit limit{};
  getrlimit(resource, &limit);
  return limit;
}

Checks check_host(const Host& host) {
  return {processor(host),  {.topic = "instructions", .found = at::get_cpu_capability()},
          threads(host),    memory(host),
          gpus(host),       libraries(),
          open_files(host), locked_memory(host),
          disk(host)};
}

}  // namespace fulgur::doctor
