#include "tools/scaling/tables.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace fulgur::scaling {
namespace {

template <class Make>
std::vector<TableRow> rows_of(const Scenario& scenario, const Make& make) {
  std::vector<TableRow> rows;
  for (const int64_t ranks : scenario.ranks()) {
    TableRow& row = rows.emplace_back(TableRow{.ranks = ranks});
    for (size_t s = 0; s < row.outcomes.size(); ++s) row.outcomes[s] = make(kCompared[s], ranks);
  }
  return rows;
}

const std::optional<Outcome>& of(const TableRow& row, Compared strategy) {
  return row.outcomes[static_cast<size_t>(strategy)];
}

// Says on which numbers of ranks `better` is faster than `worse` by more than a thousandth.
std::string say_where_ahead(const std::vector<TableRow>& rows, Compared better, Compared worse) {
  std::vector<int64_t> ahead, alone;
  for (const TableRow& row : rows) {
    const auto &a = of(row, better), &b = of(row, worse);
    if (a && !b) alone.push_back(row.ranks);
    if (a && b && a->flops_per_s > 1.001 * b->flops_per_s) ahead.push_back(row.ranks);
  }
  std::string text = fmt::format("{} is {}ahead of {}", name_of(better), ahead.empty() ? "never " : "", name_of(worse));
  if (!ahead.empty()) text += fmt::format(" on {} ranks", fmt::join(ahead, ", "));
  if (!alone.empty()) text += fmt::format("; it alone fits on {} ranks", fmt::join(alone, ", "));
  return text + '\n';
}

}  // namespace

std::vector<TableRow> weak_scaling(Scenario& scenario) {
  return rows_of(scenario, [&](Compared strategy, int64_t ranks) { return scenario.weak(strategy, ranks); });
}

std::vector<TableRow> strong_scaling(Scenario& scenario) {
  return rows_of(scenario, [&](Compared strategy, int64_t ranks) { return scenario.strong(strategy, ranks); });
}

std::string assumptions(const Scenario& scenario) {
  const Machine& machine = scenario.machine();
  const Device& device = machine.device;
  const ModelShape& shape = scenario.shape();
  return fmt::format(
      "Computed, not measured. The order of exchanges is that of the engine, recorded on {} layers of width 16.\n"
      "model: {} layers of width {}, {:.2f} billion parameters, samples of {} tokens, {}, forward computed again\n"
      "{}: {:.0f} TFLOPS reached, {:.0f} GB at {:.2f} TB/s, {:.0f} GB/s to its host, whose memory gives it {:.1f} "
      "GB/s; "
      "{}\n"
      "{} within a host: {:.0f} GB/s of a rank, {:.0f} us; {}\n"
      "{} between hosts of {} ranks: {:.1f} GB/s of a host, {:.0f} us; {}\n",
      shape.layers, shape.layers, shape.width, static_cast<double>(shape.num_params()) / 1e9, scenario.options().tokens,
      scenario.options().precision, device.name, device.flops_per_s / 1e12, device.memory_bytes / 1e9,
      device.memory_bytes_per_s / 1e12, device.to_host_bytes_per_s / 1e9, device.host_bytes_per_s / 1e9, device.source,
      machine.within.name, machine.within.bytes_per_s / 1e9, machine.within.latency_s * 1e6, machine.within.source,
      machine.between.name, machine.ranks_per_host, machine.between.bytes_per_s / 1e9, machine.between.latency_s * 1e6,
      machine.between.source);
}

std::string closely(Scenario& scenario) {
  const int64_t ranks = scenario.options().hosts * scenario.options().ranks_per_host;
  std::string text =
      fmt::format("{} hosts of {} ranks\n{:<18}{:>7}{:>10}{:>10}{:>10}{:>10}{:>12}{:>12}{:>12}{:>10}{:>10}\n",
                  scenario.options().hosts, scenario.options().ranks_per_host, "a step", "batch", "s", "compute s",
                  "update s", "exposed s", "GB within", "GB between", "GB down/up", "GB rank", "GB host");
  for (const Compared strategy : kCompared) {
    const auto outcome = scenario.weak(strategy, ranks);
    if (!outcome) {
      text += fmt::format("{:<18}{:>7}\n", name_of(strategy), "does not fit");
      continue;
    }
    const StepTime& time = outcome->time;
    const double on_host = static_cast<double>(outcome->memory.on_host);
    const double of_rank = static_cast<double>(outcome->memory.total()) - on_host + outcome->activation_bytes;
    text += fmt::format(
        "{:<18}{:>7}{:>10.3f}{:>10.3f}{:>10.3f}{:>10.3f}{:>12.2f}{:>12.2f}{:>12.2f}{:>10.2f}{:>10.2f}\n",
        name_of(strategy), outcome->batch, time.step_s, time.compute_s, time.update_s, time.exposed_s,
        time.bytes_within / 1e9, time.bytes_between / 1e9, time.bytes_to_host / 1e9, of_rank / 1e9, on_host / 1e9);
  }
  return text +
         "within: sent by a rank to ranks of its host; between: sent by a host to others; rank: model and "
         "activations\n";
}

std::string to_text(std::string_view title, const Scenario& scenario, const std::vector<TableRow>& rows) {
  std::string text = fmt::format("{}: seconds of a step, and TFLOPS of a rank ({} on {})\n{:<7}", title,
                                 scenario.machine().device.name, scenario.machine().between.name, "ranks");
  for (const Compared strategy : kCompared) text += fmt::format("{:>20}", name_of(strategy));
  text += '\n';
  for (const TableRow& row : rows) {
    text += fmt::format("{:<7}", row.ranks);
    for (const auto& outcome : row.outcomes) {
      const std::string cell = outcome
                                   ? fmt::format("{:.3f} {:7.1f}", outcome->time.step_s, outcome->flops_per_s / 1e12)
                                   : std::string("does not fit");
      text += fmt::format("{:>20}", cell);
    }
    text += '\n';
  }
  return text;
}

std::string crossings(const std::vector<TableRow>& rows) {
  std::string text;
  for (const auto& [a, b] : {std::pair(Compared::offload, Compared::sharded), {Compared::hybrid, Compared::sharded}}) {
    text += say_where_ahead(rows, a, b) + say_where_ahead(rows, b, a);
  }
  return text;
}

std::string picture(const Scenario& scenario, const std::vector<TableRow>& rows) {
  constexpr double kWidth = 640, kHeight = 400, kLeft = 60, kRight = 150, kTop = 30, kBottom = 50;
  constexpr const char* kColours[] = {"#222222", "#0072b2", "#009e73", "#d55e00"};
  double highest = 0;
  for (const TableRow& row : rows) {
    for (const auto& outcome : row.outcomes) highest = std::max(highest, outcome ? outcome->flops_per_s / 1e12 : 0.0);
  }
  const double tick = std::pow(10.0, std::floor(std::log10(std::max(highest, 1.0)))) / 2;
  const double top = std::max(tick, std::ceil(highest / tick) * tick);  // highest is 0 where nothing fits
  const auto x = [&](size_t row) {
    return kLeft + (kWidth - kLeft - kRight) * static_cast<double>(row) /
                       static_cast<double>(std::max<size_t>(1, rows.size() - 1));
  };
  const auto y = [&](double value) { return kTop + (kHeight - kBottom - kTop) * (top - value) / top; };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"13\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n"
      "<text x=\"{2}\" y=\"16\">TFLOPS of a rank, {3:.0f} billion parameters, {4}, {5} between hosts "
      "(computed)</text>\n",
      kWidth, kHeight, kLeft, static_cast<double>(scenario.shape().num_params()) / 1e9, scenario.machine().device.name,
      scenario.machine().between.name);
  for (double value = 0; value <= top; value += tick) {
    svg += fmt::format("<path d=\"M{} {:.1f}H{}\" stroke=\"#dddddd\"/>\n", kLeft, y(value), kWidth - kRight);
    svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:g}</text>\n", kLeft - 8, y(value) + 4, value);
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x(r), kHeight - kBottom + 18,
                       rows[r].ranks);
  }
  svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">ranks</text>\n", (kLeft + kWidth - kRight) / 2,
                     kHeight - 10);
  for (size_t s = 0; s < std::size(kCompared); ++s) {
    std::string path;
    for (size_t r = 0; r < rows.size(); ++r) {
      if (!rows[r].outcomes[s]) continue;
      path +=
          fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x(r), y(rows[r].outcomes[s]->flops_per_s / 1e12));
    }
    if (path.empty()) continue;
    svg += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path, kColours[s]);
    svg += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"{}\">{}</text>\n", kWidth - kRight + 12, 60 + 20 * s,
                       kColours[s], name_of(kCompared[s]));
  }
  return svg + "</svg>\n";
}

}  // namespace fulgur::scaling
