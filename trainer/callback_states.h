#pragma once

#include <memory>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/core/callback.h"

namespace fulgur {

using CallbackList = std::vector<std::shared_ptr<Callback>>;

// Throws SetupError if two callbacks would keep their states in a checkpoint under the same key.
void check_state_keys(const CallbackList& callbacks);

// The states of all callbacks, as a checkpoint keeps them: under the type of the callback, followed in braces by its
// state_key() if it has one, as in "ModelCheckpoint{monitor=val_loss}".
State states_of(const CallbackList& callbacks);

// Gives every callback its state in `saved`. Checkpoints of version 0 number the callbacks of one type in list order:
// "ModelCheckpoint", "ModelCheckpoint-2". If `warns` is true, logs a warning for states that no callback takes.
void load_states(const CallbackList& callbacks, const State& saved, bool warns);

// Whether each state in `saved` is that of a callback of the same type and state_key(), that is with the same options.
bool has_same_callbacks(const CallbackList& callbacks, const State& saved);

}  // namespace fulgur
