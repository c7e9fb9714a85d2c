#include "fulgur/cli/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/compiled_code.h"
#include "fulgur/base/environment_variables.h"
#include "fulgur/base/error.h"
#include "fulgur/base/field_state.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/base/seed.h"
#include "fulgur/base/state.h"
#include "fulgur/base/working_directory.h"
#include "fulgur/callbacks/evaluation_table.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/model_summary.h"
#include "fulgur/callbacks/prediction_writer.h"
#include "fulgur/callbacks/progress_bar.h"
#include "fulgur/checkpoint/load_weights.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/cli/config.h"
#include "fulgur/cli/parse.h"
#include "fulgur/cli/run_files.h"
#include "fulgur/device/devices.h"
#include "fulgur/optim/adam.h"
#include "fulgur/strategies/estimate_memory.h"
#include "fulgur/trainer/find_checkpoint.h"
#include "fulgur/trainer/run_dir.h"

namespace fulgur::cli::internal {
namespace {

constexpr int64_t kWorldSizes[] = {1, 2, 4, 8};  // numbers of devices for which estimate_memory has a table

std::vector<Subcommand> commands_of(const OverriddenHooks& hooks) {
  return {
      {"fit", "train"},
      {"validate", "run the validation on the weights of --ckpt_path", hooks.validation_step},
      {"test", "run the test on the weights of --ckpt_path", hooks.test_step},
      {"predict", "write the predictions for the data to files", hooks.predict_step},
      {"find_lr", "try learning rates, and suggest one"},
      {"find_batch_size", "find the largest data.batch_size that fits in memory"},
      {"estimate_memory", "show what each strategy would keep in memory for this model"},
  };
}

// Prints to std::cout, which log.txt copies.
template <class... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  std::cout << fmt::format(format, std::forward<Args>(args)...) << std::flush;
}

// A word of a command line as a shell would take it.
std::string in_shell(std::string_view word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+:,./@%^";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos) return std::string(word);
  std::string quoted = "'";
  for (const char c : word) c == '\'' ? quoted += "'\\''" : quoted += c;
  return quoted + "'";
}

std::string in_shell(int argc, char** argv) {
  std::string line;
  for (int i = 0; i < argc; ++i) line += (i > 0 ? " " : "") + in_shell(std::string_view(argv[i]));
  return line;
}

// How a person calls the program again; under `bazel run` by its label: "bazel run //examples/digits --".
std::string how_to_call(const std::string& program_path) {
  constexpr std::string_view kOutputs = "/bin/";
  const auto variables = process_environment_variables();
  const auto workspace = variables.find("BUILD_WORKSPACE_DIRECTORY");
  const size_t begin = program_path.rfind(kOutputs);
  if (workspace == variables.end() || begin == std::string::npos) return in_shell(program_path);
  const std::filesystem::path target = program_path.substr(begin + kOutputs.size());
  const std::string folder = target.parent_path().string(), name = target.filename().string();
  const bool is_default = target.parent_path().filename() == name;
  const bool has_wrapper = std::filesystem::exists(std::filesystem::path(workspace->second) / "bazelw");
  return fmt::format("{} run //{}{} --", has_wrapper ? "./bazelw" : "bazel", folder, is_default ? "" : ":" + name);
}

// The program while one command runs.
class Command {
 public:
  Command(const AnyProgram& program, const ParsedCommandLine& parsed, std::string program_path,
          std::string command_line, bool is_quiet)
      : program_(program),
        parsed_(parsed),
        program_path_(std::move(program_path)),
        command_line_(std::move(command_line)),
        is_quiet_(is_quiet),
        options_(*program.trainer) {}

  void run() {
    static const std::map<std::string, void (Command::*)(), std::less<>> kBodies{
        {"fit", &Command::fit},
        {"validate", &Command::validate},
        {"test", &Command::test},
        {"predict", &Command::predict},
        {"find_lr", &Command::find_lr},
        {"find_batch_size", &Command::find_batch_size},
        {"estimate_memory", &Command::estimate},
    };
    program_.link();
    seed_everything(static_cast<uint64_t>(*program_.seed));
    (this->*kBodies.at(parsed_.subcommand))();
  }

 private:
  void fit() {
    if (options_.name == kLatestRun) {
      throw UsageError(
          fmt::format("name = '{}', but runs/{} is a link to the newest run; write the name of that run, or another",
                      kLatestRun, kLatestRun));
    }
    const auto files = std::make_shared<RunFiles>(parsed_, command_line_, is_quiet_);
    if (!options_.barebones) options_.callbacks.push_back(files);
    Trainer trainer(options_);
    const auto data = program_.make_data();
    const ModuleHandle module = program_.make_module();
    const auto begin = std::chrono::steady_clock::now();
    trainer.fit(module, *data);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    const bool prints = trainer.is_global_zero() && !options_.barebones && !is_quiet_;
    if (prints) print_result(trainer, trainer.state().global_step - files->first_step(), time.count());
    program_.after_fit(trainer);
    if (prints) print_next(trainer, module.hooks(), files->config_file());
  }

  void validate() {
    const std::string ckpt_path = take_ckpt_path();
    Trainer trainer(options_);
    const auto data = program_.make_data();
    trainer.validate(program_.make_module(), *data, ckpt_path);
  }

  void test() {
    const std::string ckpt_path = take_ckpt_path();
    Trainer trainer(options_);
    const auto data = program_.make_data();
    trainer.test(program_.make_module(), *data, ckpt_path);
  }

  void predict() {
    const bool writes = std::ranges::any_of(options_.callbacks, [](const auto& c) { return c->takes_predictions(); });
    if (!writes) options_.callbacks.push_back(PredictionWriter::make());
    const std::string ckpt_path = take_ckpt_path();
    Trainer trainer(options_);
    const auto data = program_.make_data();
    trainer.predict(program_.make_module(), *data, ckpt_path);
    for (const auto& callback : options_.callbacks) {
      const auto* writer = dynamic_cast<const PredictionWriter*>(callback.get());
      if (writer == nullptr || writer->files().empty() || !trainer.is_global_zero()) continue;
      print("predictions: {}\n", writer->files().front().parent_path().string());
    }
  }

  // For commands other than fit, which take it as an argument: as an option of the Trainer it is fit's.
  std::string take_ckpt_path() { return std::exchange(options_.ckpt_path, {}); }

  void find_lr() {
    Trainer trainer(options_);
    const auto data = program_.make_data();
    const LearningRateCurve curve = trainer.find_learning_rate(program_.make_module(), *data);
    if (!trainer.is_global_zero()) return;
    constexpr size_t kRows = 10;
    print("{:>10}  {:>10}\n", "lr", "loss");
    const size_t step = std::max<size_t>(1, curve.lrs.size() / kRows);
    for (size_t i = 0; i < curve.lrs.size(); i += step) print("{:>10.2e}  {:>10.4g}\n", curve.lrs[i], curve.losses[i]);
    if (const auto lr = curve.suggestion()) {
      print("suggested learning rate: {:.2e}, where the loss falls fastest\n", *lr);
    } else {
      print("no suggestion: the loss was not finite, or there were too few steps\n");
    }
  }

  void find_batch_size() {
    const std::string option = "data.batch_size";
    Config config(program_.describe_data);
    std::vector<std::string> problems;
    std::unique_ptr<DataModule> data;  // the loaders of a size may borrow from it
    Trainer trainer(options_);
    const ModuleHandle module = program_.make_module();
    const int64_t size = trainer.find_batch_size(module, [&](int64_t batch_size) {
      config.set(
          std::vector<Setting>{
              {.path = "batch_size", .text = std::to_string(batch_size), .origin = option, .name = option}},
          problems);
      if (!problems.empty()) throw UsageError("find_batch_size sets data.batch_size: " + problems.front());
      data.reset();  // before the next is made: both may hold all of the data
      data = program_.make_data();
      data->prepare_data();
      data->setup(EntryPoint::fit);
      return Loaders{.train = data->train_dataloader(), .val = data->val_dataloader()};
    });
    if (trainer.is_global_zero()) print("largest batch size: {}; write --{}={}\n", size, option, size);
  }

  void estimate() {
    const ModuleHandle module = program_.make_module();
    module->configure_model();
    const Optimizers optimizers = optimizers_of(module);
    const std::string accelerator = canonical_name(options_.accelerator);
    const bool on_gpu =
        accelerator == "auto" ? resolve_devices(accelerator, Devices()).front().is_cuda() : accelerator != "cpu";
    for (const int64_t world_size : kWorldSizes) {
      print("{} device{}, precision {}\n{}\n", world_size, world_size == 1 ? "" : "s", options_.precision,
            estimate_memory_table(*module, world_size, options_.precision, optimizers, on_gpu ? c10::kCUDA : c10::kCPU,
                                  options_.accumulate_grad_batches));
    }
    print("Activations come on top.\n");
  }

  // Some modules ask their run for its length in configure_optimizers, and there is no run here.
  Optimizers optimizers_of(const ModuleHandle& module) const {
    if (!module.hooks().configure_optimizers && !options_.optimizer.is_none()) return options_.optimizer.make(*module);
    try {
      if (module.hooks().configure_optimizers) return module->configure_optimizers();
    } catch (const std::exception& error) {
      print("configure_optimizers cannot be asked without a run ({}); the tables are for AdamW.\n\n", error.what());
    }
    return optim::AdamW(module->parameters());
  }

  // `steps`: optimizer steps that this fit has taken.
  void print_result(const Trainer& trainer, int64_t steps, double seconds) const {
    const Metrics metrics = trainer.callback_metrics();
    size_t width = 0;
    for (const auto& [name, value] : metrics) width = std::max(width, name.size());
    std::string table;
    for (const auto& [name, value] : metrics) table += fmt::format("{:<{}}  {:.6g}\n", name, width, value);
    const auto per_second = [&](int64_t batch_size) {
      const int64_t samples = steps * batch_size * options_.accumulate_grad_batches * trainer.world_size();
      return fmt::format(", {:.0f} samples/s", static_cast<double>(samples) / seconds);
    };
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    print("{}{} optimizer step{} in {:.1f} s{}, peak memory of the process {:.0f} MB\n",
          table.empty() ? "" : "\nlast metrics\n" + table + "\n", steps, steps == 1 ? "" : "s", seconds,
          trainer.state().batch_size ? per_second(*trainer.state().batch_size) : "",
          static_cast<double>(usage.ru_maxrss) * 1024 / 1e6);
  }

  // The weights come from the checkpoint, with the options of the model; data and seed from the run's config.
  void print_next(const Trainer& trainer, const OverriddenHooks& hooks, const std::filesystem::path& config) const {
    for (const auto& callback : trainer.options().callbacks) {
      const auto* checkpoint = dynamic_cast<const ModelCheckpoint*>(callback.get());
      if (checkpoint == nullptr || checkpoint->best_model_path().empty()) continue;
      const std::filesystem::path path = checkpoint->best_model_path();
      print("checkpoint: {}\n", path.string());
      const std::string_view command = hooks.test_step ? "test" : hooks.validation_step ? "validate" : "";
      if (command.empty()) return;
      const auto chooses_data = [](const std::string& name) { return name == "seed" || name.starts_with("data."); };
      std::string next = fmt::format("next: {} {}", how_to_call(program_path_), command);
      const auto add = [&](const char* option, const std::filesystem::path& value) {
        next += " " + in_shell(option + short_path(value).string());
      };
      if (std::ranges::any_of(parsed_.set, chooses_data) && !config.empty()) add("--config=", config);
      add("--ckpt_path=", path);
      return print("{}\n", next);
    }
  }

  const AnyProgram& program_;
  const ParsedCommandLine& parsed_;
  std::string program_path_, command_line_;
  bool is_quiet_;
  TrainerOptions options_;
};

// The checkpoint whose weights validate, test and predict take.
std::filesystem::path checkpoint_for(std::string_view command, const TrainerOptions& options) {
  if (options.ckpt_path.empty()) {
    throw UsageError(
        fmt::format("{} needs trained weights: write --ckpt_path=best, --ckpt_path=last or the folder of a "
                    "checkpoint",
                    command));
  }
  std::vector<std::filesystem::path> folders;
  if (!options.checkpoint.dirpath.empty()) folders.push_back(options.checkpoint.dirpath);
  for (const auto& callback : options.callbacks) {
    const auto* saving = dynamic_cast<const ModelCheckpoint*>(callback.get());
    if (saving != nullptr && !saving->dirpath().empty()) folders.push_back(saving->dirpath());
  }
  if (options.name.empty()) {
    for (auto& folder : checkpoint_folders_of_runs(options.default_root_dir)) folders.push_back(std::move(folder));
    folders.push_back(named_run_dir(options.default_root_dir, std::string(kLatestRun)).parent_path());
  } else {
    folders.push_back(named_run_dir(options.default_root_dir, options.name) / "checkpoints");
  }
  return find_checkpoint(options.ckpt_path, folders, /*is_needed=*/true).value();
}

// The hyper-parameters of a checkpoint that are options of the model.
std::vector<Setting> model_options_of(const std::filesystem::path& checkpoint, const AnyProgram& program) {
  const Config model(program.describe_model);
  const State saved = saved_hyper_parameters(checkpoint);
  std::vector<Setting> settings;
  for (const auto& [name, value] : saved.values()) {
    const auto has_name = [&name](const Config::Option& option) { return option.path == name; };
    if (std::ranges::none_of(model.options(), has_name)) continue;
    const std::string path = "model." + name;
    settings.push_back({.path = path, .text = text_of_value(value), .origin = checkpoint.string(), .name = path});
  }
  return settings;
}

// Removes the callbacks of these types.
template <class... Kinds>
void remove_callbacks(std::vector<std::shared_ptr<Callback>>& callbacks) {
  std::erase_if(callbacks,
                [](const auto& callback) { return (... || (dynamic_cast<const Kinds*>(callback.get()) != nullptr)); });
}

// Which messages are printed.
struct Verbosity {
  bool quiet = false;
  LogLevel log_level = LogLevel::info;

  void describe(FieldVisitor& visit) {
    visit({.name = "quiet", .help = "print warnings and errors only"}, &quiet);
    visit({.name = "log_level", .help = "which messages to print", .choices = {"info", "warning", "error"}},
          &log_level);
  }
  void apply(TrainerOptions& options) const {
    set_log_level(quiet && log_level == LogLevel::info ? LogLevel::warning : log_level);
    if (!quiet || options.barebones) return;
    if (!options.enable_progress_bar) {
      options.enable_progress_bar = false;
      remove_callbacks<ProgressBar, EvaluationTable>(options.callbacks);
    }
    if (!options.enable_model_summary) {
      options.enable_model_summary = false;
      remove_callbacks<ModelSummary>(options.callbacks);
    }
  }
};

}  // namespace

int run(int argc, char** argv, const AnyProgram& program) {
  const int exit_code = exit_code_of([&] {
    enter_working_directory();
    Verbosity verbosity;
    bool runs_compiled_code = is_compiled_code_allowed();
    const auto describe = [&](FieldVisitor& visit) {
      fulgur::internal::SectionVisitor model(visit, "model"), data(visit, "data"), trainer(visit, "trainer");
      program.describe_model(model);
      program.describe_data(data);
      visit({.name = "seed", .help = "seed of weights, data and order", .min = 0}, program.seed);
      visit({.name = "compiled_code", .help = "run native code that comes with a model's file"}, &runs_compiled_code);
      verbosity.describe(visit);
      program.trainer->describe(trainer);
    };
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    std::vector<std::shared_ptr<Callback>>& callbacks = program.trainer->callbacks;
    const auto num_defaults = std::ssize(callbacks);
    const auto fill = [&](std::string_view command) -> std::vector<Setting> {
      if (command != "validate" && command != "test" && command != "predict") return {};
      const auto checkpoint = checkpoint_for(command, *program.trainer);
      program.trainer->ckpt_path = checkpoint.string();
      return model_options_of(checkpoint, program);
    };
    const auto parsed = parse_command_line(
        arguments, {.path = argv[0], .describe = describe, .subcommands = commands_of(program.hooks), .fill = fill},
        process_environment_variables());
    if (!parsed) return;
    if (program.trainer->barebones) callbacks.erase(callbacks.begin(), callbacks.begin() + num_defaults);
    verbosity.apply(*program.trainer);
    allow_compiled_code(runs_compiled_code);
    Command command(program, *parsed, argv[0], in_shell(argc, argv), verbosity.quiet);
    command.run();
  });
  copy_output_to("");
  set_log_level(LogLevel::info);
  return exit_code;
}

}  // namespace fulgur::cli::internal
