#pragma once

#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "core/callback.h"
#include "core/serial_worker.h"
#include "distributed/collective.h"

namespace fulgur {

// Writes the checkpoints of a run that hooks ask for: at once, or while fit trains at the end of the running step.
// Every rank makes the same calls. Threading: the training thread; with SaveOptions::async files are written on a
// thread of its own, one checkpoint at a time, and what goes wrong there is thrown by the next call, which first does
// what it is to do unless the ranks do not reach each other any more.
class CheckpointSaver {
 public:
  using Path = std::filesystem::path;
  using MakeContent = std::function<CheckpointContent(bool weights_only)>;
  using Saved = std::function<void(const Path& folder, const SaveOptions& options)>;

  // `group` is borrowed. `saved` is called on every rank, once a checkpoint is whole.
  CheckpointSaver(Collective& group, MakeContent content, Saved saved);
  ~CheckpointSaver();  // waits for the thread; its errors are logged
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // While it is true, what is asked for waits for at_boundary().
  void set_in_training(bool in_training) { in_training_ = in_training; }

  void save(const Path& folder, const SaveOptions& options);
  bool is_asked_for(const Path& folder) const;  // and not yet there
  void at_boundary();                           // fit is between two steps
  void finish();                                // waits until everything is written

  // The run fails: what is being written beside it ends.
  void abort(std::string_view reason);

 private:
  struct Request {
    Path folder;
    SaveOptions options;
  };
  struct Writing {
    Request request;
    std::shared_future<void> done;
  };
  class FirstError;
  void write_requests(FirstError& error);
  void write(const Request& request);
  void write_beside(const Request& request);
  void end_writing();

  Collective& group_;
  MakeContent content_;
  Saved saved_;
  bool in_training_ = false;
  std::vector<Request> requests_;
  std::shared_ptr<Collective> own_group_;  // of the thread
  std::optional<Writing> writing_;
  std::unique_ptr<SerialWorker> thread_;
};

}  // namespace fulgur
