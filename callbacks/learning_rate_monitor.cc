#include "fulgur/callbacks/learning_rate_monitor.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "fulgur/base/names.h"

namespace fulgur {
namespace {

// lr-AdamW, or the name of each group below that.
std::vector<std::string> names_of_groups(const std::string& optimizer, const std::vector<Optimizer::Group>& groups) {
  if (groups.size() == 1) return {optimizer};
  std::vector<std::string> names;
  for (const Optimizer::Group& group : groups) {
    names.push_back(group.name.empty() ? fmt::format("{}/pg{}", optimizer, names.size() + 1)
                                       : fmt::format("{}/{}", optimizer, group.name));
  }
  return names;
}

std::vector<std::vector<std::string>> names_of(const Optimizers& optimizers) {
  std::vector<std::string> chosen(optimizers.size());
  for (const auto& [optimizer, config] : optimizers.schedulers()) chosen[optimizer] = config.name;
  std::map<std::string, int> seen;
  std::vector<std::vector<std::string>> names;
  for (size_t i = 0; i < chosen.size(); ++i) {
    std::string name = chosen[i].empty() ? fmt::format("lr-{}", optimizers[i].name()) : chosen[i];
    if (const int number = seen[name]++; number > 0) name += fmt::format("-{}", number);
    names.push_back(names_of_groups(name, optimizers[i].groups()));
  }
  return names;
}

}  // namespace

void LearningRateMonitorOptions::describe(FieldVisitor& visit) {
  visit({.name = "logging_interval", .help = "when the learning rate is logged", .choices = {"step", "epoch"}},
        &logging_interval);
  visit({.name = "log_weight_decay", .help = "log the weight decay too"}, &log_weight_decay);
}

LearningRateMonitor::LearningRateMonitor(Options options) : options_(std::move(options)) {
  check_fields("LearningRateMonitor", options_);
  options_.logging_interval = canonical_name(options_.logging_interval);
}

std::shared_ptr<LearningRateMonitor> LearningRateMonitor::make(Options options) {
  return std::make_shared<LearningRateMonitor>(std::move(options));
}

void LearningRateMonitor::on_fit_start(TrainerControl&) { names_.clear(); }

void LearningRateMonitor::on_train_epoch_start(TrainerControl& trainer) {
  if (options_.logging_interval == "epoch") log(trainer);
}

BatchAction LearningRateMonitor::on_train_batch_start(TrainerControl& trainer, const Batch&, int64_t) {
  if (options_.logging_interval == "step") log(trainer);
  return BatchAction::run;
}

void LearningRateMonitor::log(TrainerControl& trainer) {
  const Optimizers& optimizers = trainer.optimizers();
  const auto has_names = [&](size_t i) { return names_[i].size() == optimizers[i].groups().size(); };
  bool is_known = names_.size() == optimizers.size();
  for (size_t i = 0; is_known && i < names_.size(); ++i) is_known = has_names(i);
  if (!is_known) names_ = names_of(optimizers);  // at the first call, and once a group was added
  const LogOptions options{.batch_size = 1};     // so that the mean over an epoch needs no batch
  for (size_t i = 0; i < names_.size(); ++i) {
    for (size_t g = 0; g < names_[i].size(); ++g) {
      const Optimizer::Group& group = optimizers[i].groups()[g];
      trainer.metrics().log(names_[i][g], group.lr, options);
      if (options_.log_weight_decay) trainer.metrics().log(names_[i][g] + "-weight_decay", group.weight_decay, options);
    }
  }
}

}  // namespace fulgur
