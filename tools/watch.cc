// Shows how far a run is, its last metrics and how they went, from another shell than the one that trains:
//   bazel run //tools:watch -- runs/latest
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <ctime>
#include <iostream>
#include <string>
#include <thread>

#include "fulgur/base/terminal_size.h"
#include "fulgur/reports/command.h"
#include "fulgur/reports/run_folder.h"
#include "fulgur/reports/run_picture.h"

namespace {

using Seconds = std::chrono::duration<double>;

// Pictures but the first, which reads all that there is, take at most this share of a core: whoever trains on the
// machine needs the rest.
constexpr double kShareOfCore = 0.01;

// The size of the terminal; 80 columns and any height if the output is none.
fulgur::PictureOptions picture_options() {
  const auto size = fulgur::terminal_size();
  if (!size) return {};
  return {.width = size->columns, .height = size->rows > 1 ? size->rows - 1 : 0};
}

// Overwrites the last picture on a terminal.
void show(const std::string& picture) {
  const bool is_terminal = isatty(STDOUT_FILENO) == 1;
  std::cout << (is_terminal ? "\x1b[H\x1b[J" : "") << picture << (is_terminal ? "" : "\n") << std::flush;
}

struct Frame {
  std::string picture;
  bool is_last = false;  // the run has ended
};

// A run that has ended is read once more: it may have written its last rows since.
Frame frame_of(fulgur::ProgressReader& reader, fulgur::PictureOptions options) {
  const auto now = std::chrono::system_clock::now();
  const fulgur::RunFolder* run = &reader.read();
  const fulgur::RunLife life = life_of(*run, now);
  const bool has_ended = life.state == fulgur::RunLife::State::ended;
  if (has_ended) run = &reader.read();
  fulgur::RunProgress progress = progress_of(*run, now);
  progress.life = life;
  return {.picture = run_picture(*run, progress, options), .is_last = has_ended};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Shows how far a run is, its last metrics and how they went, until it has ended, or until Ctrl-C.");
  std::string folder;
  bool once = false;
  double every_s = 2.0;
  size_t width = 0;
  app.add_option("run", folder, "folder of a run, such as runs/latest")->required();
  app.add_flag("--once", once, "show one picture and end");
  app.add_option("--every_s", every_s, "seconds from one picture to the next, at least; default: 2")
      ->check(CLI::Range(0.1, 1e6));
  app.add_option("--width", width, "columns of the picture; default: those of the terminal");
  return fulgur::run_command(app, argc, argv, [&] {
    fulgur::ProgressReader reader(folder);
    bool is_first = true;
    while (true) {
      fulgur::PictureOptions options = picture_options();
      if (width > 0) options.width = width;
      const std::clock_t begin = std::clock();
      const Frame frame = frame_of(reader, options);
      if (once) {
        std::cout << frame.picture;
        return 0;
      }
      show(frame.picture);
      if (frame.is_last) return 0;
      const Seconds spent(is_first ? 0.0 : double(std::clock() - begin) / CLOCKS_PER_SEC);
      is_first = false;
      std::this_thread::sleep_for(std::max(Seconds(every_s), spent / kShareOfCore));
    }
  });
}
