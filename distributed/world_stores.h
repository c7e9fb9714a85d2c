#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fulgur {

// Two connections to the store where the ranks of a World meet, so that a call that waits on one does not block the
// other. This is a header of its own because programs that only train need not know c10d.
struct WorldStores {
  explicit WorldStores(const c10::intrusive_ptr<c10d::Store>& store)
      : for_groups(store), for_heartbeat(store->clone()) {}

  c10::intrusive_ptr<c10d::Store> for_groups;
  c10::intrusive_ptr<c10d::Store> for_heartbeat;
};

}  // namespace fulgur
