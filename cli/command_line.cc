#include "fulgur/cli/command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <optional>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/base/working_directory.h"
#include "fulgur/cli/config.h"
#include "fulgur/cli/toml_file.h"
#include "fulgur/launch/session.h"

namespace fulgur {
namespace {

// "--max-epochs=5" -> "--max_epochs=5": only the name of a flag is made canonical, never its value.
std::string canonical_flag(const std::string& argument) {
  if (!argument.starts_with("--")) return argument;
  const size_t end = std::min(argument.find('='), argument.size());
  return "--" + canonical_name(std::string_view(argument).substr(2, end - 2)) + argument.substr(end);
}

std::string help_text(const Field& field) {
  if (field.choices.empty()) return std::string(field.help);
  return fmt::format("{} ({})", field.help, fmt::join(field.choices, ", "));
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
  bool prints_config = false;
  std::vector<Setting> settings{};
  std::vector<std::string> problems{};
};

void add_flag(CLI::App& app, const Config& config, const Config::Option& option, Asked& asked) {
  const std::string name = config.flag_of(option), flag = "--" + name;
  const auto take = [&asked, path = option.path, flag,
                     is_switch = value_is_bool(option.value)](const CLI::results_t& results) {
    const std::string text = is_switch && results.back().empty() ? "true" : results.back();
    asked.settings.push_back({.path = path, .text = text, .origin = flag, .name = flag});
    return true;
  };
  CLI::Option* added = app.add_option(flag, take, help_text(option.field));
  added->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)->type_name(type_name(option.value));
  const std::string now = field_text(option.value);
  if (value_is_bool(option.value)) {
    added->expected(0, 1)->type_name("BOOL=" + now);  // --logger is --logger=true, whatever the default
  } else {
    added->expected(1)->default_str(now);
  }
}

// What is no flag of the program.
void refuse(const std::vector<std::string>& extras, const Config& config, std::vector<std::string>& problems) {
  std::vector<std::string> known;
  for (const Config::Option& option : config.options()) known.push_back(config.flag_of(option));
  bool has_flag = false;
  for (const std::string& extra : extras) {
    const size_t name = extra.find_first_not_of('-');
    if (name == 0 || name == std::string::npos) continue;
    has_flag = true;
    problems.push_back(unknown_name_message("flag", extra.substr(name, extra.find('=') - name), known));
  }
  if (has_flag || extras.empty()) return;
  problems.push_back(fmt::format("unexpected argument '{}'; flags are written --name=value", extras.front()));
}

// "--trainer.max_epochs" is "--max_epochs" where that is the name.
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

// Prints the message after the prefix `who`, "[rank 1] " or empty, and returns `exit_code`.
int report(int exit_code, const std::string& who, const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "%serror: %s\n", who.c_str(), message.c_str());
  return exit_code;
}

}  // namespace

bool parse_flags(const std::vector<std::string>& arguments, const std::string& program, const DescribeFields& describe,
                 const EnvironmentVariables& variables) {
  Config config(describe);
  Asked asked;
  CLI::App app("", std::filesystem::path(program).filename().string());
  app.allow_extras();
  app.add_option("--config", asked.config_files, "TOML file with options; of several the last one wins")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->expected(1)
      ->type_name("FILE");
  app.add_flag("--print_config", asked.prints_config, "print all options as TOML, with where each comes from");
  for (const Config::Option& option : config.options()) add_flag(app, config, option, asked);
  std::vector<std::string> reversed;  // the order that CLI11 takes
  for (auto argument = arguments.rbegin(); argument != arguments.rend(); ++argument) {
    std::string flag = with_flag_name(canonical_flag(*argument), config);
    if (flag.starts_with("--") && flag.ends_with('=')) {  // CLI11 would take the next flag for the value
      reversed.emplace_back();
      flag.pop_back();
    }
    reversed.push_back(std::move(flag));
  }
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return false;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  std::vector<Setting> settings;
  for (const std::string& file : asked.config_files) read_toml(file, settings, asked.problems);
  std::ranges::move(settings_of(variables), std::back_inserter(settings));
  std::ranges::move(asked.settings, std::back_inserter(settings));
  config.set(settings, asked.problems);
  refuse(app.remaining(), config, asked.problems);
  config.make_objects(asked.problems);
  throw_if_any(asked.problems);
  if (!asked.prints_config) return true;
  std::fputs(config.to_toml().c_str(), stdout);
  return false;
}

void enter_working_directory() { std::filesystem::current_path(working_directory()); }

int exit_code_of(const std::function<void()>& body) {
  try {
    std::exception_ptr failure;
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
    failure = process_session::end(failure);
    if (failure != nullptr) std::rethrow_exception(failure);
    return 0;
  } catch (const UsageError&) {
    return report(2, log_prefix(), text_of(std::current_exception()));
  } catch (const InterruptedError& error) {
    return report(error.exit_code, "", error.what());
  } catch (const DistributedError& error) {  // the message names the ranks
    return report(error.exit_code, "", error.what());
  } catch (...) {
    return report(1, log_prefix(), text_of(std::current_exception()));
  }
}

}  // namespace fulgur
