#include "fulgur/cli/parse.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <span>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/base/toml_file.h"
#include "fulgur/base/version.h"
#include "fulgur/cli/config.h"
#include "fulgur/doctor/doctor.h"

namespace fulgur {
namespace {

// "--max-epochs=5" -> "--max_epochs=5": only the name of a flag is made canonical, never its value.
std::string canonical_flag(const std::string& argument) {
  if (!argument.starts_with("--")) return argument;
  const size_t end = std::min(argument.find('='), argument.size());
  return "--" + canonical_name(std::string_view(argument).substr(2, end - 2)) + argument.substr(end);
}

bool value_is_bool(const FieldValue& value) {
  return std::holds_alternative<bool*>(value) || std::holds_alternative<std::optional<bool>*>(value);
}

std::string type_name(const FieldValue& value) {
  constexpr const char* kNames[] = {"BOOL", "INT", "NUMBER", "TEXT", "TEXT", "BOOL", "INT", "INT", "NUMBER", "NUMBER"};
  return kNames[value.index()];
}

// What the arguments of a command line ask for.
struct Asked {
  std::vector<std::string> config_files{};
  bool prints_config = false, prints_version = false, examines_host = false;
  std::optional<std::string> help{}, completion{};
  std::vector<Setting> settings{};
  std::vector<std::string> problems{};
};

// The name of the first subcommand if `arguments` begin with none; removes it from them otherwise.
std::string take_subcommand(std::vector<std::string>& arguments, std::span<const Subcommand> subcommands) {
  if (subcommands.empty()) return "";
  if (arguments.empty() || arguments[0].starts_with('-')) return std::string(subcommands[0].name);
  const std::string given = arguments[0], wanted = canonical_name(given);
  std::vector<std::string> names;
  for (const Subcommand& subcommand : subcommands) names.emplace_back(subcommand.name);
  const auto found = std::ranges::find(names, wanted, [](const std::string& name) { return canonical_name(name); });
  if (found == names.end() && given.find('=') != std::string::npos) {
    throw UsageError(fmt::format("'{0}' is no command; options begin with two dashes: --{0}", given));
  }
  if (found == names.end()) throw UsageError(unknown_name_message("command", given, names));
  arguments.erase(arguments.begin());
  return *found;
}

// Prints what the command line asks for instead of a run: the version, help, or the completion. Returns false if it
// asks for none of these.
bool print_about(const Config& config, const ProgramDescription& program, const std::string& name, const Asked& asked) {
  if (asked.prints_version) {
    std::fputs(fmt::format("{}: fulgur {}, libtorch {}\n", name, version(), TORCH_VERSION).c_str(), stdout);
    return true;
  }
  if (asked.help) {
    std::fputs(help_text(config, name, program.subcommands, *asked.help).c_str(), stdout);
    return true;
  }
  if (!asked.completion) return false;
  if (canonical_name(*asked.completion) != "bash") {
    throw UsageError(
        fmt::format("--completion: there is no completion for '{}'; write --completion=bash", *asked.completion));
  }
  std::fputs(bash_completion(config, name, program.subcommands).c_str(), stdout);
  return true;
}

// Prints what doctor finds on this host, where runs are written to the Trainer's default_root_dir.
void examine_host(const Config& config) {
  doctor::ExamineOptions options;
  for (const Config::Option& option : config.options()) {
    std::string* const* folder = std::get_if<std::string*>(&option.value);
    if (option.path == "trainer.default_root_dir" && folder != nullptr && !(*folder)->empty())
      options.folder = **folder;
  }
  if (doctor::examine(options) != 0) throw std::runtime_error("not everything would work here: see above");
}

void add_flag(CLI::App& app, const Config& config, const Config::Option& option, Asked& asked) {
  const std::string name = config.flag_of(option), flag = "--" + name;
  const auto take = [&asked, path = option.path, flag,
                     is_switch = value_is_bool(option.value)](const CLI::results_t& results) {
    const std::string text = is_switch && results.back().empty() ? "true" : results.back();
    asked.settings.push_back({.path = path, .text = text, .origin = flag, .name = flag});
    return true;
  };
  CLI::Option* added = app.add_option(flag, take);
  added->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)->type_name(type_name(option.value));
  added->expected(value_is_bool(option.value) ? 0 : 1, 1);  // --logger is --logger=true, whatever the default
}

// Refuses the arguments that are no flags of the program.
void refuse(const std::vector<std::string>& extras, const Config& config, bool has_commands,
            std::vector<std::string>& problems) {
  bool has_flag = false;
  for (const std::string& extra : extras) {
    const size_t begin = extra.find_first_not_of('-');
    if (begin == 0 || begin == std::string::npos) continue;
    has_flag = true;
    const std::string name = extra.substr(begin, extra.find('=') - begin);
    problems.push_back(fmt::format("unknown flag '{}'; {}", name, config.advice_for(name)));
  }
  if (has_flag || extras.empty()) return;
  problems.push_back(fmt::format("unexpected argument '{}'; flags are written --name=value{}", extras.front(),
                                 has_commands ? ", and the command comes before them" : ""));
}

// Turns "--trainer.max_epochs" into "--max_epochs", if that is the flag's name.
std::string with_flag_name(const std::string& argument, const Config& config) {
  for (const Config::Option& option : config.options()) {
    const std::string whole = "--" + option.path;
    if (argument != whole && !argument.starts_with(whole + "=")) continue;
    return "--" + config.flag_of(option) + argument.substr(whole.size());
  }
  return argument;
}

// Throws UsageError with all problems, one of which needs no heading.
void throw_if_any(const std::vector<std::string>& problems) {
  if (problems.empty()) return;
  if (problems.size() == 1) throw UsageError(problems.front());
  throw UsageError(fmt::format("{} things are wrong:\n  {}", problems.size(), fmt::join(problems, "\n  ")));
}

}  // namespace

std::optional<ParsedCommandLine> parse_command_line(std::vector<std::string> arguments,
                                                    const ProgramDescription& program,
                                                    const EnvironmentVariables& variables) {
  Config config(program.describe);
  Asked asked;
  const std::string name = std::filesystem::path(program.path).filename().string();
  ParsedCommandLine parsed{.subcommand = take_subcommand(arguments, program.subcommands)};
  CLI::App app("", name);
  app.set_help_flag();
  app.allow_extras();
  app.add_option("--config", asked.config_files)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)->expected(1);
  app.add_flag("--print_config", asked.prints_config);
  app.add_flag("--version", asked.prints_version);
  app.add_flag("--doctor", asked.examines_host);
  const auto add_text = [&app](const std::string& names, std::optional<std::string>& text) {
    app.add_option(names,
                   [&text](const CLI::results_t& results) {
                     text = results.back();
                     return true;
                   })
        ->expected(0, 1);
  };
  add_text("--help,-h", asked.help);
  add_text("--completion", asked.completion);
  for (const Config::Option& option : config.options()) add_flag(app, config, option, asked);
  std::vector<std::string> reversed;  // the order that CLI11 takes
  for (auto argument = arguments.rbegin(); argument != arguments.rend(); ++argument) {
    std::string flag = with_flag_name(canonical_flag(*argument), config);
    if (flag.starts_with("--") && flag.find('=') == flag.size() - 1) {  // CLI11 would take the next flag for the value
      reversed.emplace_back();
      flag.pop_back();
    }
    reversed.push_back(std::move(flag));
  }
  try {
    app.parse(reversed);
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string message = error.what(), flag = message.substr(0, message.find(':'));
    throw UsageError(fmt::format("{0} needs a value; write {0}=value", flag));
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (print_about(config, program, name, asked)) return std::nullopt;
  std::vector<Setting> settings;
  for (const std::string& file : asked.config_files) read_toml(file, settings, asked.problems);
  std::ranges::move(settings_of(variables), std::back_inserter(settings));
  refuse_variables_without_dots(variables, config, asked.problems);
  std::ranges::move(asked.settings, std::back_inserter(settings));
  config.set(settings, asked.problems);
  if (asked.examines_host) {  // also if other options are wrong
    examine_host(config);
    return std::nullopt;
  }
  refuse(app.remaining(), config, !program.subcommands.empty(), asked.problems);
  config.make_objects(asked.problems);
  if (program.fill && asked.problems.empty()) config.fill(program.fill(parsed.subcommand), asked.problems);
  config.check(asked.problems);
  throw_if_any(asked.problems);
  parsed.config = config.to_toml();
  for (const Config::Option& option : config.options()) {
    const bool is_of_environment = option.name.starts_with("FULGUR_");
    if (!option.is_default() && !is_of_environment) parsed.set.push_back(option.path);
  }
  if (!asked.prints_config) return parsed;
  std::fputs(parsed.config.c_str(), stdout);
  return std::nullopt;
}

}  // namespace fulgur
