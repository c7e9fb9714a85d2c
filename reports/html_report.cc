#include "fulgur/reports/html_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/readable_bytes.h"
#include "fulgur/reports/line_chart.h"
#include "fulgur/reports/markup.h"

namespace fulgur {
namespace {

using Runs = std::span<const RunFolder>;
using Row = std::vector<std::string>;  // cells as HTML

constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; --text: #1f2328; --faint: #59636e; --grid: #d1d9e0; --page: #fff; --card: #f6f8fa;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #cf222e; --c5: #9a6700; --c6: #bf3989; --c7: #1b7c83;
  --c8: #57606a; --c9: #4d2d00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --faint: #9198a1; --grid: #3d444d; --page: #0d1117;
  --card: #151b23; --c0: #58a6ff; --c1: #f0883e; --c2: #56d364; --c3: #bc8cff; --c4: #ff7b72; --c5: #e3b341; --c6: #ff9bce;
  --c7: #76e3ea; --c8: #b1bac4; --c9: #d8b48a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1500px; font: 15px/1.45 system-ui, sans-serif; color: var(--text);
  background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin: 1.6em 0 0.5em; } h3 { font-size: 1em; margin: 0 0 4px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 10px; border: 1px solid var(--grid); border-radius: 6px; background: var(--card);
  break-inside: avoid; min-width: 0; }
figure > svg { display: block; width: 100%; height: auto; }
svg path { fill: none; stroke-width: 1.4; stroke-linecap: round; stroke-linejoin: round; }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--grid); stroke-width: 1; } svg .mark { stroke-width: 1; }
svg .dots { stroke-width: 4; }
svg.key { width: 22px; height: 8px; vertical-align: middle; } svg.key path { stroke-width: 3; stroke-linecap: butt; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.87em; }
th, td { padding: 2px 12px 2px 0; text-align: left; vertical-align: top; overflow-wrap: normal; }
th { font-weight: 600; color: var(--faint); } td { border-top: 1px solid var(--grid); font-variant-numeric: tabular-nums; }
figure table { font-size: 0.8em; } figure th, figure td { padding-right: 5px; }
.long td { overflow-wrap: anywhere; min-width: 8em; }
pre { margin: 0 0 1em; overflow-x: auto; font-size: 0.85em; }
.note { color: var(--faint); }
@media print { body { max-width: none; padding: 0; font-size: 11px; }
  .charts { grid-template-columns: repeat(2, 1fr); } .table { overflow: visible; } pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; height: auto; } }
)";

std::string colour_rules() {
  std::string rules;
  for (size_t i = 0; i < kNumColours; ++i) rules += fmt::format(".run{} {{ stroke: var(--c{}); }}\n", i, i);
  return rules;
}

std::string figure_of(double value) { return fmt::format("{:.9g}", value); }

std::string table(std::string_view style, const Row& head, const std::vector<Row>& rows) {
  const auto line = [](const Row& row, std::string_view tag) {
    std::string html = "<tr>";
    for (const std::string& cell : row) html += fmt::format("<{}>{}</{}>", tag, cell, tag);
    return html + "</tr>\n";
  };
  std::string html =
      fmt::format("<div class=\"table {}\"><table>\n<thead>{}</thead>\n<tbody>\n", style, line(head, "th"));
  for (const Row& row : rows) html += line(row, "td");
  return html + "</tbody></table></div>\n";
}

std::string run_cell(const RunFolder& run, size_t index) {
  return fmt::format("<svg class=\"key\" viewBox=\"0 0 22 8\"><path {} d=\"M1 4H21\"/></svg> {}", colour_of_run(index),
                     escape_html(run.name));
}

Row run_cells(Runs runs, std::string first) {
  Row cells{std::move(first)};
  for (size_t i = 0; i < runs.size(); ++i) cells.push_back(run_cell(runs[i], i));
  return cells;
}

std::string overview(Runs runs) {
  std::vector<Row> rows;
  for (size_t i = 0; i < runs.size(); ++i) {
    std::string notes;
    for (const std::string& note : runs[i].notes) notes += fmt::format("<p class=\"note\">{}</p>", escape_html(note));
    const MetricTable& metrics = runs[i].metrics;
    const bool has_rows = metrics.num_rows > 0;
    rows.push_back({run_cell(runs[i], i) + notes, std::to_string(metrics.num_rows),
                    has_rows ? std::to_string(metrics.last_epoch) : "",
                    has_rows ? std::to_string(metrics.last_step) : ""});
  }
  return table("", {"run", "rows of metrics", "last epoch", "last step"}, rows);
}

// First, last, lowest and highest value of a curve.
Row figures_of(const RunFolder& run, size_t index, const MetricCurve& curve) {
  const MetricPoint *lowest = nullptr, *highest = nullptr;
  size_t num_nonfinite = 0;
  for (const MetricPoint& point : curve.points) {
    if (!std::isfinite(point.value)) {
      ++num_nonfinite;
      continue;
    }
    if (lowest == nullptr || point.value < lowest->value) lowest = &point;
    if (highest == nullptr || point.value > highest->value) highest = &point;
  }
  const auto cell = [](const MetricPoint* point) {
    return point == nullptr ? std::string("-") : fmt::format("{}<br>at {}", figure_of(point->value), point->step);
  };
  std::string name = run_cell(run, index);
  if (num_nonfinite > 0) {
    name += fmt::format("<p class=\"note\">{} of {} values are not finite</p>", num_nonfinite, curve.points.size());
  }
  return {name, cell(&curve.points.front()), cell(&curve.points.back()), cell(lowest), cell(highest)};
}

std::string metric_figure(Runs runs, const std::string& name) {
  std::vector<ChartLine> lines;
  std::vector<Row> rows;
  for (size_t i = 0; i < runs.size(); ++i) {
    const MetricCurve* curve = runs[i].metrics.find(name);
    if (curve == nullptr || curve->points.empty()) continue;
    lines.push_back({.points = curve->points, .run = i});
    rows.push_back(figures_of(runs[i], i, *curve));
  }
  return fmt::format("<figure>\n<h3>{}</h3>\n{}\n{}</figure>\n", escape_html(name), line_chart(name, lines),
                     table("", {"run", "first", "last", "lowest", "highest"}, rows));
}

std::string title_of(MetricKind kind) {
  switch (kind) {
    case MetricKind::loss:
      return "Loss";
    case MetricKind::score:
      return "Metrics";
    case MetricKind::optimization:
      return "Learning rate and gradients";
    case MetricKind::throughput:
      return "Throughput and waiting for data";
    case MetricKind::device:
      return "Memory and devices";
  }
  return "";
}

std::string metric_sections(Runs runs) {
  std::map<MetricKind, std::set<std::string>> names;
  for (const RunFolder& run : runs) {
    for (const MetricCurve& curve : run.metrics.curves) {
      if (!curve.points.empty()) names[kind_of_metric(curve.name)].insert(curve.name);
    }
  }
  if (names.empty()) return "<p>No metrics have been logged.</p>\n";
  std::string html;
  for (const auto& [kind, of_kind] : names) {
    html += fmt::format("<h2>{}</h2>\n<div class=\"charts\">\n", title_of(kind));
    for (const std::string& name : of_kind) html += metric_figure(runs, name);
    html += "</div>\n";
  }
  return html;
}

using Values = std::map<std::string, std::string>;

std::string value_cell(const Values& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? "<span class=\"note\">not set</span>" : escape_html(found->second);
}

// A row for each name, with the value of each run.
std::vector<Row> value_rows(const std::vector<Values>& values, bool only_differing) {
  std::set<std::string> names;
  for (const Values& of_run : values)
    std::ranges::transform(of_run, std::inserter(names, names.end()), &Values::value_type::first);
  std::vector<Row> rows;
  for (const std::string& name : names) {
    Row row{escape_html(name)};
    for (const Values& of_run : values) row.push_back(value_cell(of_run, name));
    const bool differs =
        std::ranges::any_of(row.begin() + 1, row.end(), [&](const auto& cell) { return cell != row[1]; });
    if (differs || !only_differing) rows.push_back(row);
  }
  return rows;
}

std::string config_section(Runs runs) {
  std::vector<Values> values;
  for (const RunFolder& run : runs) values.push_back(run.config);
  const std::vector<Row> all = value_rows(values, false), differing = value_rows(values, true);
  if (all.empty()) return "";
  std::string html = "<h2>Options</h2>\n";
  if (runs.size() > 1) {
    html += differing.empty() ? "<p>All options are the same.</p>\n"
                              : "<h3>What differs</h3>\n" + table("long", run_cells(runs, "option"), differing);
  }
  return html + fmt::format("<details><summary>All {} options</summary>\n{}</details>\n", all.size(),
                            table("long", run_cells(runs, "option"), all));
}

constexpr std::string_view kMemory = "memory_of_strategy";  // a key of env.json, whose value is a printed table

std::string text_block(const RunFolder& run, size_t index, std::string_view title, std::string_view text) {
  return fmt::format("<h3>{} {}</h3>\n<pre>{}</pre>\n", run_cell(run, index), escape_html(title), escape_html(text));
}

std::string memory_section(Runs runs) {
  std::string html;
  for (size_t i = 0; i < runs.size(); ++i) {
    const std::string* memory = runs[i].find_environment(kMemory);
    if (memory != nullptr && !memory->empty()) html += text_block(runs[i], i, "", *memory);
  }
  return html.empty() ? "" : "<h2>Memory by strategy</h2>\n" + html;
}

std::string profile_section(Runs runs) {
  std::string html;
  for (size_t i = 0; i < runs.size(); ++i) {
    for (const auto& [name, text] : runs[i].profiles) html += text_block(runs[i], i, name, text);
  }
  return html.empty() ? "" : "<h2>Profile</h2>\n" + html;
}

std::string environment_section(Runs runs) {
  std::vector<std::string> names;  // in the order of env.json
  for (const RunFolder& run : runs) {
    for (const auto& [name, value] : run.environment) {
      if (name != kMemory && std::ranges::count(names, name) == 0) names.push_back(name);
    }
  }
  if (names.empty()) return "";
  std::vector<Row> rows;
  for (const std::string& name : names) {
    rows.push_back({escape_html(name)});
    for (const RunFolder& run : runs) {
      const std::string* value = run.find_environment(name);
      rows.back().push_back(value == nullptr ? "" : escape_html(*value));
    }
  }
  return "<h2>Environment</h2>\n" + table("long", run_cells(runs, ""), rows);
}

std::string checkpoint_section(Runs runs) {
  std::vector<Row> rows;
  for (size_t i = 0; i < runs.size(); ++i) {
    for (const CheckpointSummary& checkpoint : runs[i].checkpoints) {
      const std::string_view links = checkpoint.is_best && checkpoint.is_last ? "best, last"
                                     : checkpoint.is_best                     ? "best"
                                     : checkpoint.is_last                     ? "last"
                                                                              : "";
      rows.push_back(
          {run_cell(runs[i], i), escape_html(checkpoint.name), checkpoint.step ? std::to_string(*checkpoint.step) : "",
           readable_bytes(checkpoint.num_bytes),
           checkpoint.score ? fmt::format("{} {}", escape_html(checkpoint.monitor), figure_of(*checkpoint.score)) : "",
           std::string(links)});
    }
  }
  if (rows.empty()) return "";
  return "<h2>Checkpoints</h2>\n" + table("", {"run", "checkpoint", "step", "size", "score", "link"}, rows);
}

}  // namespace

std::string html_report(Runs runs) {
  std::string names;
  for (const RunFolder& run : runs) names += (names.empty() ? "" : ", ") + escape_html(run.name);
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{}</title>\n"
      "<style>{}{}</style>\n</head>\n<body>\n<h1>{}</h1>\n{}{}{}{}{}{}{}</body>\n</html>\n",
      names, kStyle, colour_rules(), names, overview(runs), metric_sections(runs), memory_section(runs),
      profile_section(runs), config_section(runs), environment_section(runs), checkpoint_section(runs));
}

}  // namespace fulgur
