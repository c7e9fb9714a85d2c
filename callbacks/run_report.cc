#include "fulgur/callbacks/run_report.h"

#include <filesystem>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/base/first_error.h"
#include "fulgur/base/trace.h"
#include "fulgur/base/working_directory.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/reports/html_report.h"
#include "fulgur/reports/run_folder.h"

namespace fulgur {
namespace {

void write_report(const std::filesystem::path& folder) {
  const trace::Span span("write report");
  const RunFolder run = read_run_folder(short_path(folder));
  const std::string page = html_report({&run, 1});
  replace_file_atomically(folder / "report.html", [&](FileWriter& file) { file.write(page.data(), page.size()); });
}

}  // namespace

void RunReport::setup(TrainerControl&, EntryPoint) { has_failed_ = false; }

void RunReport::on_exception(TrainerControl&, const std::exception& error) {
  has_failed_ = dynamic_cast<const InterruptedError*>(&error) == nullptr;
}

void RunReport::teardown(TrainerControl& trainer, EntryPoint entry_point) {
  const bool is_fit = entry_point == EntryPoint::fit;
  const bool adds_metrics = entry_point == EntryPoint::validate || entry_point == EntryPoint::test;
  if (has_failed_ || (!is_fit && (!adds_metrics || folder_of_fit_.empty()))) return;
  FirstError error;
  error.run([&] {
    const std::filesystem::path& folder = trainer.run_dir();
    if (!is_run_folder(folder) || (!is_fit && folder != folder_of_fit_)) return;
    write_report(folder);
    folder_of_fit_ = folder;
  });
  error.warn("report.html is not written");
}

}  // namespace fulgur
