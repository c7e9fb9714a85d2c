#pragma once

namespace fulgur::doctor {

// Looks at this host and tries what training needs: prints what it finds, and what to change where something would not
// work. Returns the exit code: 1 if there is a problem, otherwise 0. `as_json`: prints to_json() instead of lines. A
// program calls it at most once, before it has done anything else: the second rank that it starts has the same command
// line.
int examine(bool as_json);

}  // namespace fulgur::doctor
