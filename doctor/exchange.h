#pragma once

#include "fulgur/doctor/check.h"

namespace fulgur::doctor {

// Makes the ranks of check_exchange() a run of their own: takes what a launcher has set out of this process's
// environment. Call it before check_exchange(), in the process that starts the second rank.
void prepare_exchange();

// Starts a second rank on this host and exchanges 1 MB with it for a second, through shared memory and then over Gloo,
// if a connection to the loopback can be made. The second rank is a process with the command line of this one, which
// must call check_exchange() too: is_second_rank() says that it is the one, and its result is empty. Call it once in a
// process. Takes about three seconds, and up to nine more if the ranks do not meet or an exchange does not end: 5 s
// until that is noticed, the rest until the second rank has been ended.
Checks check_exchange();

bool is_second_rank();

}  // namespace fulgur::doctor
