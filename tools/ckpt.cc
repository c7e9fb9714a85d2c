// Inspects, verifies, compares and exports checkpoints:
//   bazel run //tools:ckpt -- inspect runs/version_0/checkpoints/last
#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/base/names.h"
#include "fulgur/base/readable_bytes.h"
#include "fulgur/base/tensor_difference.h"
#include "fulgur/base/version.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/checkpoint/formats/torch_archive.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/checkpoint/require_checkpoint.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/programs/checkpoint_weights.h"
#include "fulgur/programs/program_archive.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

template <class T>
std::string value_of(const State& state, std::string_view name) {
  const T* value = state.find<T>(name);
  return value == nullptr ? "-" : fmt::format("{}", *value);
}

void inspect(const fs::path& folder) {
  const CheckpointReader checkpoint(folder, {.digests = false});
  const Manifest& manifest = checkpoint.manifest();
  const State& run = checkpoint.run();
  fmt::print("{}\n", fs::canonical(folder).string());
  if (!manifest.fulgur_version.empty()) fmt::print("written by fulgur {}\n", manifest.fulgur_version);
  fmt::print("epoch {}, step {}, {} of the epoch's batches done\n", value_of<int64_t>(run, "loops/epoch"),
             value_of<int64_t>(run, "loops/global_step"), value_of<int64_t>(run, "loops/batches_of_epoch"));
  fmt::print("strategy {} on {} rank{}, precision {}, optimizer {}\n", value_of<std::string>(run, "strategy/name"),
             manifest.world_size, manifest.world_size == 1 ? "" : "s", value_of<std::string>(run, "strategy/precision"),
             value_of<std::string>(run, "strategy/state/optimizers/0/name"));
  if (!checkpoint.has_optimizer_state()) fmt::print("weights only: no run can resume from it\n");
  fmt::print("\n{:<44} {:>12}  xxh3\n", "file", "size");
  for (const auto& file : manifest.files) {
    fmt::print("{:<44} {:>12}  {:016x}\n", file.name, readable_bytes(file.num_bytes), file.xxh3);
  }
  int64_t num_elements = 0;
  fmt::print("\n{:<44} {:<5} shape\n", "parameter or buffer", "dtype");
  for (const auto& parameter : manifest.parameters) {
    const std::string alias = parameter.alias_of.empty() ? "" : fmt::format("  = {}", parameter.alias_of);
    fmt::print("{:<44} {:<5} {}{}\n", parameter.name, parameter.dtype, fmt::join(parameter.shape, "x"), alias);
    if (!parameter.alias_of.empty()) continue;
    num_elements += std::accumulate(parameter.shape.begin(), parameter.shape.end(), int64_t{1}, std::multiplies());
  }
  fmt::print("{} elements; optimizer state in {} ranges\n", num_elements, manifest.ranges.size());
}

// A line that is overwritten, printed only on a terminal.
class ProgressLine {
 public:
  ~ProgressLine() { clear(); }
  void show(const std::string& line) {
    if (!is_terminal_) return;
    fmt::print(stderr, "\r\x1b[K{}", line);
    std::fflush(stderr);
  }
  void clear() { show(""); }  // before other output

 private:
  const bool is_terminal_ = ::isatty(STDERR_FILENO) == 1;
};

// Verifies every byte.
void check(const fs::path& folder) {
  const Manifest manifest = read_manifest(folder);
  bool is_whole = true;
  ProgressLine progress;
  for (const auto& file : manifest.files) {
    const auto on_read = [&](int64_t num_bytes) {
      progress.show(fmt::format("{}: {} of {}", file.name, readable_bytes(num_bytes), readable_bytes(file.num_bytes)));
    };
    const auto damage = find_damage(folder, file, {.on_read = on_read});
    progress.clear();
    fmt::print("{:<44} {:>12}  {}\n", file.name, readable_bytes(file.num_bytes), damage ? *damage : "whole");
    std::fflush(stdout);
    is_whole = is_whole && !damage;
  }
  const CheckpointReader read(folder, {.digests = false});  // verifies that the files agree with each other
  if (!is_whole) throw CheckpointError(fmt::format("{} is damaged", folder.string()));
}

// The names of the parameters that have optimizer state.
std::vector<std::string> parameters_with_state(const CheckpointReader& checkpoint) {
  std::set<std::string> names;
  for (const auto& range : checkpoint.manifest().ranges) names.insert(range.parameter);
  return {names.begin(), names.end()};
}

int64_t numel_of(const CheckpointReader& checkpoint, const std::string& parameter) {
  const auto& shape = checkpoint.manifest().find_parameter(parameter)->shape;
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies());
}

class Difference {
 public:
  void compare(const std::string& name, const at::Tensor& a, const at::Tensor& b) {
    progress_.show(fmt::format("{} tensors, now {}", ++num_compared_, name));
    if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
      return tell(name, fmt::format("{} of {} and {} of {}", toString(a.scalar_type()), fmt::join(a.sizes(), "x"),
                                    toString(b.scalar_type()), fmt::join(b.sizes(), "x")));
    }
    if (a.numel() == 0 || a.equal(b)) return;
    const auto numbers = [](const at::Tensor& t) { return (t.is_complex() ? at::view_as_real(t) : t).to(at::kDouble); };
    const double most = largest_difference(numbers(a), numbers(b));
    if (most == 0 && a.is_floating_point()) return;
    tell(name, fmt::format("differs by at most {:.9g}", most));
  }
  void only(const std::string& name, std::string_view which) { tell(name, fmt::format("only in the {}", which)); }
  bool any() const { return num_told_ > 0; }
  void summarize() {
    progress_.clear();
    fmt::print("{} tensors compared, {} differ\n", num_compared_, num_told_);
  }

 private:
  void tell(const std::string& name, const std::string& what) {
    progress_.clear();
    fmt::print("{:<52} {}\n", name, what);
    ++num_told_;
  }
  ProgressLine progress_;
  int64_t num_compared_ = 0, num_told_ = 0;
};

// Compares each tensor in one or both of two lists.
void compare_tensors(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b,
                     Difference& difference) {
  for (const auto& [name, tensor] : a) {
    const auto other = b.find(name);
    other == b.end() ? difference.only(name, "first") : difference.compare(name, tensor, other->second);
  }
  for (const auto& [name, tensor] : b) {
    if (!a.contains(name)) difference.only(name, "second");
  }
}

bool differ(const fs::path& first, const fs::path& second) {
  const CheckpointReader a(first, {.digests = false}), b(second, {.digests = false});
  Difference difference;
  const auto weights = [](const CheckpointReader& checkpoint) {
    const NamedTensors tensors = checkpoint.weights();
    return std::map<std::string, at::Tensor>(tensors.begin(), tensors.end());
  };
  compare_tensors(weights(a), weights(b), difference);
  std::set<std::string> parameters;
  for (const auto* checkpoint : {&a, &b}) {
    for (const std::string& name : parameters_with_state(*checkpoint)) parameters.insert(name);
  }
  const auto state = [](const CheckpointReader& checkpoint, const std::string& parameter) {
    std::map<std::string, at::Tensor> tensors;
    if (std::ranges::none_of(checkpoint.manifest().ranges, [&](const auto& r) { return r.parameter == parameter; })) {
      return tensors;
    }
    for (const auto& [name, tensor] : checkpoint.read(parameter, 0, numel_of(checkpoint, parameter))) {
      tensors.emplace(parameter + ":" + name, tensor);
    }
    return tensors;
  };
  for (const std::string& parameter : parameters) compare_tensors(state(a, parameter), state(b, parameter), difference);
  difference.summarize();
  return difference.any();
}

// Maps each further name of tied weights to the name that has the tensor, as safetensors.torch.save_model() does.
std::map<std::string, std::string> metadata_of(const CheckpointReader& checkpoint) {
  std::map<std::string, std::string> metadata;
  for (const auto& parameter : checkpoint.manifest().parameters) {
    if (!parameter.alias_of.empty()) metadata.emplace(parameter.name, parameter.alias_of);
  }
  metadata["format"] = "pt";
  return metadata;
}

void consolidate(const fs::path& folder, const fs::path& file, bool optimizer) {
  const CheckpointReader checkpoint(folder);
  NamedTensors tensors = checkpoint.finished_weights();
  const std::vector<std::string> parameters =
      optimizer ? parameters_with_state(checkpoint) : std::vector<std::string>();
  ProgressLine progress;
  for (size_t i = 0; i < parameters.size(); ++i) {
    progress.show(fmt::format("optimizer state of {} of {} parameters", i + 1, parameters.size()));
    for (const auto& [name, tensor] : checkpoint.read(parameters[i], 0, numel_of(checkpoint, parameters[i]))) {
      tensors.emplace_back(parameters[i] + ":" + name, tensor);
    }
  }
  progress.show(fmt::format("writing {}", file.string()));
  const FileDigest digest = write_safetensors(file, tensors, metadata_of(checkpoint));
  progress.clear();
  fmt::print("{}: {} tensors, {}\n", file.string(), tensors.size(), readable_bytes(digest.num_bytes));
}

void write_program(const CheckpointReader& checkpoint, const fs::path& file, const std::string& program) {
  if (program.empty()) {
    throw UsageError(
        fmt::format("'{}': give the archive that the weights belong to, --program=<file>.pt2", file.string()));
  }
  const ProgramArchive archive(program);
  std::map<std::string, std::vector<int64_t>> sizes;
  for (const std::string& name : archive.weight_names()) sizes[name] = archive.weight(name).tensor.sizes().vec();
  std::map<std::string, at::Tensor> values = weights_of_program(checkpoint, sizes, program);
  for (auto& [name, value] : values) value = value.to(archive.weight(name).tensor.scalar_type());
  archive.write_with(file, values);
}

void convert(const fs::path& folder, const fs::path& file, const std::string& program) {
  if (!program.empty() && file.extension() != ".pt2") {
    throw UsageError(
        fmt::format("--program={} is for a file that ends with .pt2, and '{}' does not", program, file.string()));
  }
  const CheckpointReader checkpoint(folder);
  ProgressLine progress;
  progress.show(fmt::format("writing {}", file.string()));
  if (file.extension() == ".pt" || file.extension() == ".pth") {
    write_torch_file(file, weights_by_every_name(checkpoint));
  } else if (file.extension() == ".ckpt") {
    const State& run = checkpoint.run();
    const auto number = [&](std::string_view name) {
      const auto* value = run.find<int64_t>(name);
      return value == nullptr ? int64_t{0} : *value;
    };
    write_lightning_checkpoint(file, {.epoch = number("loops/epoch"),
                                      .global_step = number("loops/global_step"),
                                      .state_dict = weights_by_every_name(checkpoint),
                                      .hyper_parameters = run.child("hyper_parameters")});
  } else if (file.extension() == ".safetensors") {
    write_safetensors(file, checkpoint.finished_weights(), metadata_of(checkpoint));
  } else if (file.extension() == ".pt2") {
    write_program(checkpoint, file, program);
  } else {
    throw UsageError(
        fmt::format("'{}': the name says the format; end it with .pt (torch.load), .ckpt (Lightning), .safetensors or "
                    ".pt2 (torch.export.load)",
                    file.string()));
  }
  progress.clear();
  fmt::print("{}\n", file.string());
}

// Throws UsageError if the first argument is meant as a command, but is none: CLI11 says only that one is required.
void require_command(int argc, char** argv, const std::vector<std::string>& known) {
  const std::string_view asked = argc > 1 ? argv[1] : "";
  if (asked.empty() || asked.starts_with('-') || std::ranges::find(known, asked) != known.end()) return;
  throw UsageError(unknown_name_message("command", asked, known));
}

int run(int argc, char** argv) {
  CLI::App app("Looks at checkpoints and makes files of them that others read.");
  app.set_version_flag("--version", "fulgur " FULGUR_VERSION);
  app.require_subcommand(1);
  std::string folder, other, program;
  bool optimizer = false;
  std::vector<std::string> commands;
  const auto command = [&](const char* name, const char* help) {
    commands.emplace_back(name);
    CLI::App* added = app.add_subcommand(name, help);
    added->add_option("folder", folder, "a checkpoint")->required();
    return added;
  };
  const CLI::App* const inspecting = command("inspect", "what is in it");
  const CLI::App* const verifying = command("verify", "reads all of it: is it whole? exit code 1 if not");
  CLI::App* const differing = command("diff", "how two differ, by tensor; exit code 1 if they do");
  differing->add_option("other", other, "another checkpoint")->required();
  CLI::App* const consolidating = command("consolidate", "one safetensors file of all ranks' parts");
  consolidating->add_option("file", other, "a new .safetensors file")->required();
  consolidating->add_flag("--optimizer", optimizer,
                          "with the optimizer's state, as <parameter>:<tensor>, 1-d in the order of memory");
  CLI::App* const converting = command("convert", "its weights for others");
  converting->add_option("file", other, "a new file: .pt, .ckpt (Lightning), .safetensors or .pt2")->required();
  converting->add_option("--program", program, "for .pt2: the torch.export archive that the weights were trained from");
  if (const int failure = exit_code_of([&] { require_command(argc, argv, commands); })) return failure;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  int exit_code = 0;
  const int failure = exit_code_of([&] {
    enter_working_directory();
    require_checkpoint(folder);
    if (*differing) require_checkpoint(other);
    if (*inspecting) inspect(folder);
    if (*verifying) check(folder);
    if (*differing) exit_code = differ(folder, other) ? 1 : 0;
    if (*consolidating) consolidate(folder, other, optimizer);
    if (*converting) convert(folder, other, program);
  });
  return failure != 0 ? failure : exit_code;
}

}  // namespace
}  // namespace fulgur

int main(int argc, char** argv) { return fulgur::run(argc, argv); }
