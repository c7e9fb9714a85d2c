#pragma once

#include <span>
#include <string>

#include "fulgur/reports/run_folder.h"

namespace fulgur {

// A page about one run or several: a chart for each metric with a line for each run, the memory that each strategy
// takes, profiles, what differs between their options, their environments and checkpoints. The page needs no network
// and no script, follows the reader's choice of light or dark, and can be printed. Figures are written as metrics.csv
// has them, with up to nine digits.
std::string html_report(std::span<const RunFolder> runs);

}  // namespace fulgur
