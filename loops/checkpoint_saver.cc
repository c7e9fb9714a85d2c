#include "fulgur/loops/checkpoint_saver.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/trace.h"

namespace fulgur {
namespace {

// Runs `call` and keeps its error. A DistributedError is thrown at once: ranks that cannot reach each other can do
// nothing more together.
template <class Call>
void run(FirstError& error, const Call& call) {
  try {
    call();
  } catch (const DistributedError&) {
    throw;
  } catch (...) {
    error.keep(std::current_exception());
  }
}

}  // namespace

CheckpointSaver::CheckpointSaver(Collective& group, WithContent with_content, Saved saved)
    : group_(group), with_content_(std::move(with_content)), saved_(std::move(saved)) {}

CheckpointSaver::~CheckpointSaver() { close(); }

void CheckpointSaver::close() {
  is_closed_ = true;
  try {
    if (writing_) writing_->done.get();
  } catch (...) {
    log_warning("the checkpoint '{}' was not written: {}", writing_->request.folder.string(),
                text_of(std::current_exception()));
  }
  thread_.reset();
  writing_.reset();
  own_group_.reset();
}

void CheckpointSaver::save(const Path& folder, const SaveOptions& options) {
  const Path target = std::filesystem::absolute(folder);
  requests_.push_back({target.has_filename() ? target : target.parent_path(), options});  // "a/" is a
  if (in_training_) return;
  FirstError error;
  write_requests(error);
  error.rethrow();
}

bool CheckpointSaver::is_asked_for(const Path& folder) const {
  return (writing_ && writing_->request.folder == folder) ||
         std::ranges::count(requests_, folder, &Request::folder) > 0;
}

void CheckpointSaver::at_boundary() {
  using std::chrono::seconds;
  FirstError error;
  if (writing_ && writing_->done.wait_for(seconds(0)) == std::future_status::ready) run(error, [&] { end_writing(); });
  write_requests(error);
  error.rethrow();
}

void CheckpointSaver::finish() {
  FirstError error;
  run(error, [&] { end_writing(); });
  write_requests(error);
  run(error, [&] { end_writing(); });
  error.rethrow();
}

void CheckpointSaver::abort(const std::string& reason) {
  in_training_ = false;
  requests_.clear();
  if (own_group_) own_group_->abort(reason);
}

void CheckpointSaver::write_requests(FirstError& error) {
  for (const Request& request : std::exchange(requests_, {})) {
    run(error, [&] { end_writing(); });
    run(error, [&] { write(request); });
  }
}

void CheckpointSaver::write(const Request& request) {
  const trace::Span span("save checkpoint");
  if (request.options.async) return write_in_background(request);
  with_content_(request.options.weights_only, [&](const CheckpointContent& content) {
    write_checkpoint(request.folder, content, group_, request.options.links);
  });
  saved_(request.folder, request.options);
}

void CheckpointSaver::write_in_background(const Request& request) {
  if (thread_ == nullptr) {
    own_group_ = group_.duplicate();
    thread_ = std::make_unique<JobQueue>();
  }
  const auto content = std::make_shared<CheckpointContent>();
  with_content_(request.options.weights_only, [&](CheckpointContent& now) {
    // Only rank 0 writes the weights and the state of the run.
    *content = group_.rank() == 0 ? std::move(now)
                                  : CheckpointContent{.rank = std::move(now.rank), .ranges = std::move(now.ranges)};
    make_independent(*content);
  });
  writing_ = {request, thread_->run([this, content, request] {
                const trace::Span span("write checkpoint");
                write_checkpoint(request.folder, *content, *own_group_, request.options.links);
              })};
}

void CheckpointSaver::end_writing() {
  if (!writing_) return;
  const Writing ended = *std::exchange(writing_, std::nullopt);
  ended.done.get();
  saved_(ended.request.folder, ended.request.options);
}

}  // namespace fulgur
