#include "fulgur/cli/command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/base/working_directory.h"
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

// Adds a flag for every field.
class FlagAdder final : public FieldVisitor {
 public:
  explicit FlagAdder(CLI::App& app) : app_(app) {}

  void operator()(const Field& field, FieldValue value) override {
    const std::string flag = fmt::format("--{}", field.name);
    names_.emplace_back(field.name);
    CLI::Option* option = app_.add_option(
        flag,
        [field, value, flag](const CLI::results_t& results) {
          Field flag_field = field;
          flag_field.name = flag;
          const bool is_switch = value_is_bool(value) && results.back().empty();
          set_field(flag_field, value, is_switch ? "true" : results.back());
          return true;
        },
        help_text(field));
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)->type_name(type_name(value));
    if (value_is_bool(value)) {
      option->expected(0, 1)->type_name("BOOL=" +
                                        field_text(value));  // --logger is --logger=true, whatever the default
    } else {
      option->expected(1)->default_str(field_text(value));
    }
  }

  const std::vector<std::string>& names() const { return names_; }

 private:
  CLI::App& app_;
  std::vector<std::string> names_;
};

[[noreturn]] void refuse(const std::vector<std::string>& extras, const std::vector<std::string>& known) {
  for (const std::string& extra : extras) {
    const size_t name = extra.find_first_not_of('-');
    if (name == 0 || name == std::string::npos) continue;
    throw UsageError(unknown_name_message("flag", extra.substr(name, extra.find('=') - name), known));
  }
  throw UsageError(fmt::format("unexpected argument '{}'; flags are written --name=value", extras.front()));
}

// Prints the message after the prefix `who`, "[rank 1] " or empty, and returns `exit_code`.
int report(int exit_code, const std::string& who, const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "%serror: %s\n", who.c_str(), message.c_str());
  return exit_code;
}

}  // namespace

bool parse_flags(const std::vector<std::string>& arguments, const std::string& program,
                 const DescribeFields& describe) {
  CLI::App app("", std::filesystem::path(program).filename().string());
  app.allow_extras();
  FlagAdder adder(app);
  describe(adder);
  std::vector<std::string> reversed;  // the order that CLI11 takes
  for (auto argument = arguments.rbegin(); argument != arguments.rend(); ++argument) {
    std::string flag = canonical_flag(*argument);
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
  if (const auto extras = app.remaining(); !extras.empty()) refuse(extras, adder.names());
  return true;
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
