// Makes one page of one run or several, which a browser shows without a network; docs/reports.md says what it has:
//   bazel run //tools:report -- runs/first runs/second --out=report.html
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/reports/command.h"
#include "fulgur/reports/html_report.h"
#include "fulgur/reports/run_folder.h"

namespace {

namespace fs = std::filesystem;

bool has_runs(const fs::path& folder) {
  std::error_code error;
  return std::ranges::any_of(fs::directory_iterator(folder, error),
                             [](const auto& entry) { return fulgur::is_run_folder(entry.path()); });
}

fulgur::RunFolder read(const fs::path& folder) {
  try {
    return fulgur::read_run_folder(folder);
  } catch (const fulgur::UsageError& error) {
    if (fulgur::is_run_folder(folder) || !has_runs(folder)) throw;
    throw fulgur::UsageError(std::string(error.what()) + "; for a page of all of them write " +
                             (folder / "*").string());
  }
}

// The folders without a link to one of them: runs/* has runs/latest too.
std::vector<fs::path> without_links(const std::vector<fs::path>& folders) {
  std::vector<fs::path> kept;
  std::ranges::copy_if(folders, std::back_inserter(kept), [&](const fs::path& folder) {
    std::error_code error;
    return !fs::is_symlink(folder, error) || std::ranges::none_of(folders, [&](const fs::path& other) {
      return !fs::is_symlink(other, error) && fs::equivalent(folder, other, error);
    });
  });
  return kept;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Makes a page of runs: curves, memory, profiles, differing options, environment and checkpoints.");
  std::vector<fs::path> folders;
  fs::path out;
  app.add_option("runs", folders, "folders of runs, such as runs/version_0")->required();
  app.add_option("--out", out,
                 "file to write; default: report.html in the run's folder, with several runs in the present folder");
  return fulgur::run_command(app, argc, argv, [&] {
    folders = without_links(folders);
    std::vector<fulgur::RunFolder> runs;
    for (const fs::path& folder : folders) runs.push_back(read(folder));
    if (out.empty()) out = folders.size() == 1 ? folders[0] / "report.html" : fs::path("report.html");
    const std::string page = fulgur::html_report(runs);
    fulgur::replace_file_atomically(out, [&](fulgur::FileWriter& file) { file.write(page.data(), page.size()); });
    std::cout << out.string() << '\n';
    return 0;
  });
}
