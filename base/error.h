#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace fulgur {

// A setting that cannot be used: an unknown name, a value out of range, options that contradict each other. The message
// says what was requested, what was found and what to write instead. Settings are checked before training starts; a
// call that the running fit cannot serve throws it, too. A program that runs through cli/ prints it and exits with 2.
struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The module and its data cannot be run as they are: a step is missing, there is no optimizer, a loader is empty, the
// loss is not a scalar. The message says what to add or change.
struct SetupError : std::logic_error {
  using std::logic_error::logic_error;
};

// Samples could not be read: a dataset takes too long, or draws random numbers that nobody could repeat.
struct DataError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A file or folder of a checkpoint could not be written or read. The message names the path and the reason.
struct CheckpointError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A signal ended a run: the running step was finished and, where there is a ModelCheckpoint, saved.
struct InterruptedError : std::runtime_error {
  InterruptedError(const std::string& message, int signal_number)
      : std::runtime_error(message), signal(signal_number), exit_code(128 + signal_number) {}

  int signal;
  int exit_code;  // 128 + signal number, as in a shell
};

// Ranks could not work together: one died, threw, hangs or cannot be reached. The message names the rank and what it
// was doing.
struct DistributedError : std::runtime_error {
  explicit DistributedError(const std::string& message, std::optional<int64_t> rank = std::nullopt, int code = 1)
      : std::runtime_error(message), failed_rank(rank), exit_code(code) {}

  std::optional<int64_t> failed_rank;  // the rank at fault; nullopt: not known
  int exit_code;                       // the failed rank's exit code if it has ended; default 1
  bool rank_is_ending = false;         // the failed rank has reported its failure, and is cleaning up
};

}  // namespace fulgur
