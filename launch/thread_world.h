#pragma once

#include "fulgur/distributed/world.h"

namespace fulgur {

// During its lifetime, Trainers of this thread run on the ranks of `world` instead of the process's ranks, so that
// ranks can be threads of one process, as in tests.
class ThreadWorld {
 public:
  explicit ThreadWorld(World& world) : outer_(current_) { current_ = &world; }
  ~ThreadWorld() { current_ = outer_; }
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  static World* current() { return current_; }  // null: the ranks of the process

 private:
  static inline thread_local World* current_ = nullptr;
  World* outer_;
};

}  // namespace fulgur
