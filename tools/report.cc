// Makes one page of one run or several, which a browser shows without a network; docs/reports.md says what it has:
//   bazel run //tools:report -- runs/first runs/second --out=report.html
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/reports/command.h"
#include "fulgur/reports/html_report.h"
#include "fulgur/reports/run_folder.h"

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  CLI::App app("Makes a page of runs: curves, memory, profiles, differing options, environment and checkpoints.");
  std::vector<fs::path> folders;
  fs::path out;
  app.add_option("runs", folders, "folders of runs, such as runs/version_0")->required();
  app.add_option("--out", out,
                 "file to write; default: report.html in the run's folder, with several runs in the present folder");
  return fulgur::run_command(app, argc, argv, [&] {
    std::vector<fulgur::RunFolder> runs;
    for (const fs::path& folder : folders) runs.push_back(fulgur::read_run_folder(folder));
    if (out.empty()) out = folders.size() == 1 ? folders[0] / "report.html" : fs::path("report.html");
    const std::string page = fulgur::html_report(runs);
    fulgur::replace_file_atomically(out, [&](fulgur::FileWriter& file) { file.write(page.data(), page.size()); });
    std::cout << out.string() << '\n';
    return 0;
  });
}
