#include "fulgur/cli/options_page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/callbacks/callback_registry.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/optim/lr_scheduler_registry.h"
#include "fulgur/optim/optimizer_registry.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {
namespace {

// Rows of a table: an option, its default and its meaning.
class Rows final : public FieldVisitor {
 public:
  void operator()(const Field& field, FieldValue value) override {
    if (skips_ && skips_(field.name)) return;
    const std::string by_default = field_text(value);
    std::string meaning(field.help);
    if (!field.unit.empty()) meaning += fmt::format(", in {}", field.unit);
    if (!field.choices.empty()) meaning += fmt::format(": {}", fmt::join(field.choices, ", "));
    const bool has_min = std::isfinite(field.min), has_max = std::isfinite(field.max);
    if (has_min && has_max) {
      meaning += fmt::format("; {} to {}", field.min, field.max);
    } else if (has_min) {
      meaning += fmt::format("; at least {}", field.min);
    } else if (has_max) {
      meaning += fmt::format("; at most {}", field.max);
    }
    text += fmt::format("| `{}` |{} | {} |\n", field.name, by_default.empty() ? "" : " `" + by_default + "`", meaning);
  }
  void list(const Field& field, const ObjectList&) override {
    text += fmt::format("| `[[{}]]` | | {} |\n", field.name, field.help);
  }

  explicit Rows(std::function<bool(std::string_view)> skips = {}) : skips_(std::move(skips)) {}
  std::string text;

 private:
  std::function<bool(std::string_view)> skips_;
};

std::string table(const std::string& rows) {
  if (rows.empty()) return "No options.\n";
  return "| option | default | |\n|---|---|---|\n" + rows;
}

template <class Registry>
std::string section(std::string_view title, std::string_view intro, const Registry& registry) {
  std::string text = fmt::format("\n## {}\n\n{}\n", title, intro);
  for (const std::string& name : registry.names()) {
    Rows rows;
    registry.begin(name)->describe(rows);
    text += fmt::format("\n### {}\n\n{}", name, table(rows.text));
  }
  return text;
}

}  // namespace

std::string options_page() {
  const auto is_of_a_choice = [](std::string_view name) {
    return name.starts_with("strategy.") || name.starts_with("optimizer.") || name.starts_with("scheduler.");
  };
  Rows trainer(is_of_a_choice), loader;
  TrainerOptions().describe(trainer);
  DataLoaderOptions().describe(loader);

  std::string text =
      "# Options\n\n"
      "Written by `./bazelw run //tools:options_page`, from the descriptions in the source. "
      "[configuration.md](configuration.md) says how they are given. Where a table has no default, it is the empty "
      "text.\n"
      "\n## Trainer\n\n"
      "Flags `--max_epochs=5`, or the section `[trainer]` of a file.\n\n";
  text += table(trainer.text);
  text +=
      "\n## Strategies\n\nFlags `--strategy=ddp --strategy.timeout_s=60`, or the section `[strategy]` with a `type`.\n";
  for (const std::string& name : strategy_registry().names()) {
    Rows rows;
    strategy_registry().create(name)->describe(rows);
    text += fmt::format("\n### {}\n\n{}", name, table(rows.text));
  }
  text +=
      section("Optimizers",
              "For a Module without configure_optimizers: `--optimizer=AdamW --optimizer.lr=3e-4`, or `[optimizer]` "
              "with a `type`.",
              optim::optimizer_registry());
  Rows group;
  ParamGroupOptions().describe(group);
  text += "\n### Parameter groups\n\n`[[optimizer.groups]]` in a file.\n\n" + table(group.text);
  text +=
      section("Schedules",
              "`--scheduler=StepLR --scheduler.step_size=10`, or `[scheduler]` with a `type`, for the optimizer of the "
              "options. All have `interval` (`epoch` or `step`), `frequency`, `monitor`, `strict` and `name` (of the "
              "learning rate in logs), too.",
              optim::lr_scheduler_registry());
  text +=
      section("Callbacks", "`[[callbacks]]` or `[[loggers]]` in a file, each with its `type`.", callback_registry());
  text += "\n## DataLoader\n\nFor the options of a data module: `visit({.name = \"loader\"}, &loader)`.\n\n" +
          table(loader.text);
  return text;
}

}  // namespace fulgur
