#pragma once

namespace fulgur {

// Whether this process may load native code from a model's file: the AOTInductor package that //tools:compile_step
// adds. Such code can do anything that a program can. Default: true.
bool is_compiled_code_allowed();
void allow_compiled_code(bool is_allowed);

}  // namespace fulgur
