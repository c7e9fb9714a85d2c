#pragma once

namespace fulgur {

// Whether native code that a model's file brings along may be loaded into this process: what //tools:compile_step puts
// into a program, a package of AOTInductor. Such code does whatever its author wants, as a program does. True at first.
bool is_compiled_code_allowed();
void allow_compiled_code(bool is_allowed);

}  // namespace fulgur
