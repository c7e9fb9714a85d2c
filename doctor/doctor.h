#pragma once

#include <filesystem>

namespace fulgur::doctor {

struct ExamineOptions {
  bool prints_json = false;            // prints to_json() instead of lines
  std::filesystem::path folder = ".";  // where runs would be written; need not exist yet
};

// Looks at this host and tries what training needs: prints what it finds, and what to change where something would not
// work. Returns the exit code: 1 if there is a problem, otherwise 0. A program calls it at most once, before it has
// done anything else: the second rank that it starts has the same command line.
int examine(const ExamineOptions& options);

}  // namespace fulgur::doctor
