#include "fulgur/callbacks/monitored.h"

#include <fmt/format.h>

#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"

namespace fulgur {

void warn_if_never_validated(TrainerControl& trainer, std::string_view callback, const std::string& monitor) {
  if (trainer.state().has_validation || !monitor.starts_with("val") || !trainer.is_global_zero()) return;
  log_warning(
      "{} follows '{}', but fit does not validate: there is no val loader, or limit_val_batches is 0. If training logs "
      "no metric of that name, fit ends with an error after the first epoch; set another monitor",
      callback, monitor);
}

void throw_unknown_monitor(TrainerControl& trainer, std::string_view callback, const std::string& monitor,
                           const Metrics& metrics) {
  std::vector<std::string> names;
  for (const auto& [name, value] : metrics) names.push_back(name);
  throw SetupError(fmt::format("{}: {}{}", callback, unknown_name_message("monitor", monitor, names),
                               trainer.state().has_validation ? "" : "; fit does not validate"));
}

}  // namespace fulgur
