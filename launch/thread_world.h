#pragma once

#include "fulgur/distributed/world.h"

namespace fulgur {

// During its lifetime, Trainers of this thread run on the ranks of `world` instead of the process's ranks, so that
// ranks can be threads of one process, as in tests.
class ScopedThreadWorld {
 public:
  explicit ScopedThreadWorld(World& world) : outer_(current_) { current_ = &world; }
  ~ScopedThreadWorld() { current_ = outer_; }
  ScopedThreadWorld(const ScopedThreadWorld&) = delete;
  ScopedThreadWorld& operator=(const ScopedThreadWorld&) = delete;

  static World* current() { return current_; }  // null: the ranks of the process

 private:
  static inline thread_local World* current_ = nullptr;
  World* outer_;
};

}  // namespace fulgur
