#pragma once

#include <ATen/Parallel.h>

namespace fulgur {

// Limits the operations of the calling thread to one intra-op thread, because the other cores are busy. ATen also gives
// this number to threads that start later; code that starts threads restores its own number by ScopedIntraOpThreads.
inline void use_one_intra_op_thread() {
  at::get_num_threads();  // the first call in a thread sets the number: later it would overwrite ours
  at::set_num_threads(1);
}

// Restores, in its destructor, the number of intra-op threads of its constructor.
class ScopedIntraOpThreads {
 public:
  ScopedIntraOpThreads() : num_threads_(at::get_num_threads()) {}
  ~ScopedIntraOpThreads() { at::set_num_threads(num_threads_); }
  ScopedIntraOpThreads(const ScopedIntraOpThreads&) = delete;
  ScopedIntraOpThreads& operator=(const ScopedIntraOpThreads&) = delete;

 private:
  const int num_threads_;
};

}  // namespace fulgur
