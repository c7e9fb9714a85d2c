#pragma once

#include "fulgur/doctor/check.h"

namespace fulgur::doctor {

// Lets check_exchange() start a run of its own: removes the variables of launchers from this process's environment.
// Call it before check_exchange(), in the process that starts the second rank.
void prepare_exchange();

// Starts a second rank on this host and exchanges 1 MB with it for a second, through shared memory and then over Gloo,
// if a connection to the loopback can be made. The second rank is a process with the command line of this one. It must
// call check_exchange() too, and ignore the result. Call it once in a process. Takes about three seconds, and up to
// nine more if the ranks do not meet or an exchange does not end: 5 s until that is noticed, the rest until the second
// rank has been ended.
Checks check_exchange();

// Whether this process is the second rank. Ask before prepare_exchange(), after which the answer is true in both.
bool is_second_rank();

}  // namespace fulgur::doctor
