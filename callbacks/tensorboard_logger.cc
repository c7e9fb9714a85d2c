#include "fulgur/callbacks/tensorboard_logger.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "fulgur/base/error.h"
#include "fulgur/base/host_name.h"
#include "fulgur/callbacks/event_file.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "events.out.tfevents.", kSuffix = ".fulgur";

bool is_event_file(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with(kPrefix) && name.ends_with(kSuffix);
}

std::vector<fs::path> event_files_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (is_event_file(entry.path())) found.push_back(entry.path());
  }
  return found;
}

// TensorBoard reads the files of a folder in the order of their names.
std::string name_of_file(size_t number, double time) {
  return fmt::format("{}{:05}.{:.6f}.{}{}", kPrefix, number, time, host_name(), kSuffix);
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

void TensorBoardLogger::on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) {
  Metrics with_epoch = metrics;
  with_epoch.try_emplace("epoch", static_cast<double>(trainer.state().epoch));
  const double time = seconds_since_1970();
  write(trainer, step, time, events::scalars(time, step, with_epoch));
}

void TensorBoardLogger::on_record(TrainerControl& trainer, const Record& record, int64_t step) {
  const double time = seconds_since_1970();
  write(trainer, step, time, events::record(time, step, record));
}

void TensorBoardLogger::write(TrainerControl& trainer, int64_t step, double time, const std::string& event) {
  if (!file_.is_open()) open(trainer, time);
  file_.append(event);
  next_step_ = std::max(next_step_, step + 1);
}

void TensorBoardLogger::open(TrainerControl& trainer, double time) {
  const fs::path& run_dir = trainer.run_dir();
  if (!run_dir_.empty() && run_dir_ != run_dir) {  // the files are those of an earlier Trainer
    file_.forget();
    earlier_.clear();
    next_step_ = 0;
    is_new_ = true;
  }
  run_dir_ = run_dir;
  const auto is_there = [&](const Written& file) { return fs::exists(run_dir / subfolder_ / file.name); };
  if (!file_.has_begun() && !std::ranges::all_of(earlier_, is_there)) {  // the checkpoint comes from elsewhere
    earlier_.clear();
    is_new_ = true;
  }
  if (is_new_) choose_folder(run_dir);
  const fs::path folder = run_dir / subfolder_;
  std::error_code ignored;  // where the folder cannot be used, opening the file tells why
  fs::create_directories(folder, ignored);
  if (!is_new_ && !file_.has_begun()) cut_to_checkpoint(folder);
  is_new_ = false;
  file_.open_in(folder, name_of_file(earlier_.size(), time));
  if (file_.has_begun()) return;
  file_.append(events::file_version(time));
  if (!earlier_.empty()) file_.append(events::session_start(time, next_step_));
}

void TensorBoardLogger::choose_folder(const fs::path& run_dir) {
  subfolder_.clear();
  for (int version = 1; !event_files_in(run_dir / subfolder_).empty(); ++version) {
    subfolder_ = fmt::format("v{}", version);
  }
}

// Removes files that are newer than the checkpoint, and cuts the others to their size when the checkpoint was saved.
void TensorBoardLogger::cut_to_checkpoint(const fs::path& folder) const {
  for (const fs::path& path : event_files_in(folder)) {
    std::error_code error;
    const auto known = std::ranges::find(earlier_, path.filename().string(), &Written::name);
    if (known == earlier_.end()) {
      fs::remove(path, error);
    } else if (static_cast<int64_t>(fs::file_size(path, error)) > known->num_bytes) {
      fs::resize_file(path, static_cast<uintmax_t>(known->num_bytes), error);
    }
    if (error)
      throw SetupError(fmt::format("TensorBoardLogger: cannot continue '{}': {}", path.string(), error.message()));
  }
}

void TensorBoardLogger::teardown(TrainerControl&, EntryPoint) { file_.close(); }

State TensorBoardLogger::state() const {
  State state;
  if (is_new_) return state;
  state.set("subfolder", subfolder_);
  state.set("next_step", next_step_);
  int64_t num_files = 0;
  const auto add = [&](const std::string& name, int64_t num_bytes) {
    const std::string prefix = fmt::format("files/{}/", num_files++);
    state.set(prefix + "name", name);
    state.set(prefix + "num_bytes", num_bytes);
  };
  for (const Written& written : earlier_) add(written.name, written.num_bytes);
  if (file_.has_begun()) add(file_.path().filename().string(), file_.size());
  state.set("num_files", num_files);
  return state;
}

// The state may come from another user, with any path in it: only names in the run's folder are taken.
void TensorBoardLogger::load_state(const State& state) {
  std::vector<Written> files;
  for (int64_t i = 0; i < state.get<int64_t>("num_files"); ++i) {
    const State file = state.child(fmt::format("files/{}", i));
    files.push_back({fs::path(file.get<std::string>("name")).filename(), file.get<int64_t>("num_bytes")});
    if (is_event_file(files.back().name) && files.back().num_bytes > 0) continue;
    throw CheckpointError(fmt::format("the state of TensorBoardLogger names '{}' of {} bytes, which is no event file",
                                      files.back().name, files.back().num_bytes));
  }
  next_step_ = state.get<int64_t>("next_step");
  if (file_.is_open()) {  // a validation that was cut short is undone
    if (files.size() > earlier_.size()) file_.cut(files.back().num_bytes);
    return;
  }
  subfolder_ = fs::path(state.get<std::string>("subfolder")).filename();
  if (subfolder_ == "." || subfolder_ == "..") {
    throw CheckpointError(
        fmt::format("the state of TensorBoardLogger names '{}', which is no folder of its own", subfolder_));
  }
  earlier_ = std::move(files);
  is_new_ = false;
  run_dir_.clear();
  file_.forget();  // an earlier fit of this process wrote it
}

}  // namespace fulgur
