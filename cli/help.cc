#include "fulgur/cli/help.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

constexpr size_t kNameWidth = 34, kWidth = 100;  // columns
constexpr const char* kIndent = "  ";

// A name and what is said about it, wrapped: "  --lr=0.001    learning rate".
std::string row(const std::string& name, std::string_view text) {
  std::string lines = kIndent + name;
  size_t column = lines.size();
  const auto go_to_text = [&] {
    if (column + 2 > kNameWidth) {
      lines += '\n';
      column = 0;
    }
    lines.append(kNameWidth - column, ' ');
    column = kNameWidth;
  };
  go_to_text();
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    if (column > kNameWidth && column + 1 + word.size() > kWidth) {
      lines += '\n';
      column = 0;
      go_to_text();
    }
    if (column > kNameWidth) {
      lines += ' ';
      ++column;
    }
    lines += word;
    column += word.size();
    text.remove_prefix(std::min(word.size() + 1, text.size()));
  }
  return lines + '\n';
}

std::string row(const Config& config, const Config::Option& option) {
  const std::string now = field_text(option.value);
  std::string help = option.help;
  if (!option.field.unit.empty()) help += fmt::format(", in {}", option.field.unit);
  if (!option.field.choices.empty()) help += fmt::format(" ({})", fmt::join(option.field.choices, ", "));
  return row(fmt::format("--{}={}", config.flag_of(option), now.empty() ? "TEXT" : now), help);
}

// "strategy" of "strategy.timeout_s"; "trainer" for an option that needs no section; empty for others without one.
std::string section_of(const Config& config, const Config::Option& option) {
  const std::string flag = config.flag_of(option);
  const size_t end = flag.rfind('.');
  if (end != std::string::npos) return flag.substr(0, end);
  return flag == option.path ? "" : "trainer";
}

std::vector<std::string> sections_of(const Config& config) {
  std::vector<std::string> sections;
  for (const Config::Option& option : config.options()) {
    const std::string section = section_of(config, option);
    if (std::ranges::find(sections, section) == sections.end()) sections.push_back(section);
  }
  return sections;
}

bool is_of_trainer(const Config::Option& option) { return option.path.starts_with("trainer."); }

std::string rows_of_programs_own() {
  return row("--config=FILE", "TOML file with options; of several the last one wins") +
         row("--print_config", "print all options as TOML, with where each comes from") +
         row("--help=all", "all options; --help=strategy: those of one section") +
         row("--completion=bash", "print a script that completes options in bash") +
         row("--doctor", "say what this machine has, and what would not work on it") +
         row("--version", "print the versions of fulgur and libtorch");
}

}  // namespace

std::string help_text(const Config& config, std::string_view program, std::span<const Subcommand> subcommands,
                      std::string_view about) {
  const std::string asked = canonical_name(about);
  std::string text;
  const auto add = [&](std::string_view title, const std::function<bool(const Config::Option&)>& shows) {
    std::string rows;
    for (const Config::Option& option : config.options()) {
      if (shows(option)) rows += row(config, option);
    }
    if (!rows.empty()) text += fmt::format("\n{}\n{}", title, rows);
  };
  if (asked.empty() || asked == "all") {
    text = fmt::format("usage: {}{} [--option=value ...]\n", program, subcommands.empty() ? "" : " [command]");
    std::string rows;
    for (const Subcommand& command : subcommands) {
      if (command.is_offered) rows += row(std::string(command.name), command.help);
    }
    if (!rows.empty()) text += fmt::format("\ncommands ({} if none is given)\n{}", subcommands[0].name, rows);
    text += "\n" + rows_of_programs_own();
  }
  const std::vector<std::string> sections = sections_of(config);
  if (asked.empty()) {
    for (const std::string& section : sections) {
      const auto is_here = [&](const Config::Option& option) {
        return section_of(config, option) == section && !is_of_trainer(option);
      };
      add(section.empty() ? "program" : section, is_here);
    }
    add("trainer: common options",
        [](const Config::Option& option) { return is_of_trainer(option) && option.field.is_common; });
    return text;
  }
  if (asked == "all") {
    for (const std::string& section : sections) {
      add(section.empty() ? "program" : section,
          [&](const Config::Option& option) { return section_of(config, option) == section; });
    }
    return text;
  }
  const auto is_asked_for = [&](const Config::Option& option) {
    const std::string flag = canonical_name(config.flag_of(option));
    return flag == asked || flag.starts_with(asked + ".") || section_of(config, option) == asked;
  };
  add(asked, is_asked_for);
  if (!text.empty()) return text.substr(1);
  std::vector<std::string> known{"all"};
  std::ranges::copy_if(sections, std::back_inserter(known), [](const std::string& name) { return !name.empty(); });
  throw UsageError("--help: " + unknown_name_message("section or option", about, known));
}

std::string bash_completion(const Config& config, std::string_view program, std::span<const Subcommand> subcommands) {
  std::vector<std::string> words;
  std::string cases;
  for (const Subcommand& command : subcommands) {
    if (command.is_offered) words.emplace_back(command.name);
  }
  for (const char* flag : {"--help", "--print_config", "--doctor", "--version"}) words.emplace_back(flag);
  words.emplace_back("--config=");
  for (const Config::Option& option : config.options()) {
    const std::string flag = "--" + config.flag_of(option);
    words.push_back(flag + "=");
    std::vector<std::string> values = option.field.choices;
    if (std::holds_alternative<bool*>(option.value) || std::holds_alternative<std::optional<bool>*>(option.value)) {
      values = {"true", "false"};
    }
    if (values.empty()) continue;
    cases +=
        fmt::format("    {}) COMPREPLY=($(compgen -W '{}' -- \"$value\")); return ;;\n", flag, fmt::join(values, " "));
  }
  std::string function = "_fulgur_" + std::string(program);
  std::ranges::replace_if(function, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  // Bash makes three words of --flag=value.
  return fmt::format(R"(# completes {program}: source <({program} --completion=bash)
{function}() {{
  local value=${{COMP_WORDS[COMP_CWORD]}} flag=
  if [[ $value == = ]]; then
    flag=${{COMP_WORDS[COMP_CWORD-1]}} value=
  elif [[ ${{COMP_WORDS[COMP_CWORD-1]}} == = ]]; then
    flag=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  case $flag in
    '') ;;
{cases}    *) COMPREPLY=($(compgen -f -- "$value")); return ;;
  esac
  COMPREPLY=($(compgen -W '{words}' -- "$value"))
  [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
}}
complete -F {function} {program}
)",
                     fmt::arg("program", program), fmt::arg("function", function), fmt::arg("cases", cases),
                     fmt::arg("words", fmt::join(words, " ")));
}

}  // namespace fulgur
