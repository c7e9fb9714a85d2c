#pragma once

#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/first_error.h"
#include "fulgur/base/job_queue.h"
#include "fulgur/checkpoint/checkpoint_writer.h"
#include "fulgur/core/callback.h"
#include "fulgur/distributed/collective.h"

namespace fulgur {

// Writes the checkpoints that the hooks of a run request: at once, or, while fit trains, at the end of the running
// step. Every rank makes the same calls. Threading: the training thread. With SaveOptions::async a background thread
// writes the files, one checkpoint at a time; an error in that thread is thrown by the next call, after the work of
// that call, or at once if it is a DistributedError.
class CheckpointSaver {
 public:
  using Path = std::filesystem::path;
  // Calls `use` with what is to be written, which is valid until `use` returns.
  using WithContent = std::function<void(bool weights_only, const std::function<void(CheckpointContent&)>& use)>;
  using Saved = std::function<void(const Path& folder, const SaveOptions& options)>;

  // `group` is borrowed. `saved` is called on every rank, once a checkpoint is complete.
  CheckpointSaver(Collective& group, WithContent with_content, Saved saved);
  ~CheckpointSaver();  // calls close()
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // While `in_training` is true, requests wait for at_boundary().
  void set_in_training(bool in_training) { in_training_ = in_training; }

  void save(const Path& folder, const SaveOptions& options);
  bool is_asked_for(const Path& folder) const;  // requested or being written, but not yet complete
  void at_boundary();                           // called by fit at a step boundary
  void finish();                                // waits until everything is written
  void end_writing();                           // waits for what is being written; requests stay

  // Waits for the background thread, and logs its error. Afterwards nothing can be saved.
  void close();
  bool is_closed() const { return is_closed_; }

  // Called when the run fails: drops all requests and aborts the write in the background.
  void abort(const std::string& reason);

 private:
  struct Request {
    Path folder;
    SaveOptions options;
  };
  struct Writing {
    Request request;
    std::shared_future<void> done;
  };
  void write_requests(FirstError& error);
  void write(const Request& request);
  void write_in_background(const Request& request);

  Collective& group_;
  WithContent with_content_;
  Saved saved_;
  bool in_training_ = false, is_closed_ = false;
  std::vector<Request> requests_;
  std::shared_ptr<Collective> own_group_;  // the background thread's group; null until the first async save
  std::optional<Writing> writing_;
  std::unique_ptr<JobQueue> thread_;
};

}  // namespace fulgur
