#include "fulgur/base/compiled_code.h"

#include <atomic>

namespace fulgur {
namespace {

std::atomic<bool> is_allowed_here = true;

}  // namespace

bool is_compiled_code_allowed() { return is_allowed_here; }

void allow_compiled_code(bool is_allowed) { is_allowed_here = is_allowed; }

}  // namespace fulgur
