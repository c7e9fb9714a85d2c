#pragma once

#include "fulgur/doctor/check.h"

namespace fulgur::doctor {

// Starts a second rank on this host and exchanges 1 MB with it for a second, through shared memory and then over Gloo.
// The second rank is a process with the command line of this one, which must call exchange() too: is_second_rank() says
// that it is the one, and its result is empty. Call it once in a process. Takes about three seconds, and at most 20 if
// the ranks do not meet.
Checks check_exchange();

bool is_second_rank();

}  // namespace fulgur::doctor
