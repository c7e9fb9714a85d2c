#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fulgur::doctor {

enum class Verdict { good, warning, problem };

// What was found out about one thing, and what to do about it.
struct Check {
  std::string topic;
  std::string found;
  Verdict verdict = Verdict::good;
  std::string advice{};  // what to write or to change; empty if nothing
};

using Checks = std::vector<Check>;

bool any_problem(const Checks& checks);

// A line for each check, with a mark if something is wrong, and the advice below it. Lines are wrapped at `width`
// columns; a longer word has a line of its own.
std::string to_text(const Checks& checks, size_t width);

// What was found with its mark and the advice in one line: "warning: 0.1 GiB free in here; name another folder".
std::string to_line(const Check& check);

// {"works": bool, "checks": [{"topic": ..., "found": ..., "verdict": "good", "warning" or "problem", "advice": ...}]}
std::string to_json(const Checks& checks);

}  // namespace fulgur::doctor
