#include "fulgur/callbacks/evaluation_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <string_view>

namespace fulgur {

EvaluationTable::EvaluationTable(Options options) : options_(options) {
  if (options_.out == nullptr) options_.out = &std::cout;
}

std::shared_ptr<EvaluationTable> EvaluationTable::make(Options options) {
  return std::make_shared<EvaluationTable>(options);
}

void EvaluationTable::on_validation_end(TrainerControl& trainer) {
  if (trainer.state().entry_point == EntryPoint::validate) print(trainer);
}

void EvaluationTable::on_test_end(TrainerControl& trainer) { print(trainer); }

void EvaluationTable::print(TrainerControl& trainer) const {
  constexpr std::string_view kTitle = "metric";
  const Metrics& metrics = trainer.metrics().epoch_metrics();
  size_t width = kTitle.size();
  for (const auto& [name, value] : metrics) width = std::max(width, name.size());
  const std::string rule = fmt::format("{:-<{}}\n", "", width + 14);
  std::string table = rule + fmt::format("{:<{}}  {}\n", kTitle, width, to_string(trainer.state().stage)) + rule;
  for (const auto& [name, value] : metrics) table += fmt::format("{:<{}}  {:.9g}\n", name, width, value);
  *options_.out << table << rule << std::flush;
}

}  // namespace fulgur
