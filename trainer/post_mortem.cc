#include "fulgur/trainer/post_mortem.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/view_as_real.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cmath>
#include <ctime>
#include <exception>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "fulgur/base/exception_text.h"
#include "fulgur/base/trace.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/numbered_files.h"
#include "fulgur/doctor/environment.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kConfigBytes = 1 << 20;

// JSON has no number for values that are not finite: they become text.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(fmt::format("{}", value)); }

// The result of a call, or a text with the reason why there is none.
template <class Call>
Json or_reason(const Call& call) {
  try {
    return call();
  } catch (...) {
    return fmt::format("unknown: {}", text_of(std::current_exception()));
  }
}

Json shape_of(const at::Tensor& tensor) {
  if (!tensor.is_nested()) return tensor.sizes().vec();
  Json shapes = Json::array();
  for (const at::Tensor& part : tensor.unbind()) shapes.push_back(part.sizes().vec());
  return shapes;
}

// All numbers of a tensor of any layout, as a flat strided tensor of real numbers.
at::Tensor numbers_of(const at::Tensor& tensor) {
  at::Tensor values = tensor.detach();
  if (values.is_nested()) {
    values = values.values();
  } else if (values.layout() == at::kSparse) {
    values = values.coalesce().values();
  } else if (values.layout() != at::kStrided) {
    values = values.to_dense();
  }
  if (values.is_complex()) values = at::view_as_real(values.resolve_conj());
  if (values.scalar_type() == at::kBool) values = values.to(at::kByte);
  return values.reshape({-1});
}

// Sets lowest, highest and num_non_finite.
void describe_values(const at::Tensor& tensor, Json& description) {
  at::Tensor values = numbers_of(tensor);
  if (values.is_floating_point()) {
    if (values.element_size() < 4) values = values.to(at::kFloat);  // there are no minima of 8 bits
    const at::Tensor is_finite = values.isfinite();
    const int64_t num_finite = is_finite.sum().item<int64_t>();
    description["num_non_finite"] = values.numel() - num_finite;
    if (num_finite < values.numel()) values = values.masked_select(is_finite);
  } else {
    description["num_non_finite"] = 0;
  }
  if (values.numel() == 0) return;
  const auto [lowest, highest] = values.aminmax();
  if (values.is_floating_point()) {
    description["lowest"] = lowest.item<double>();
    description["highest"] = highest.item<double>();
  } else {
    description["lowest"] = lowest.item<int64_t>();
    description["highest"] = highest.item<int64_t>();
  }
}

Json describe_tensor(const std::string& name, const at::Tensor& tensor, bool can_read_devices) {
  Json description{{"name", name},
                   {"shape", or_reason([&] { return shape_of(tensor); })},
                   {"dtype", c10::toString(tensor.scalar_type())},
                   {"device", tensor.device().str()}};
  if (!tensor.is_cpu() && !can_read_devices) {
    description["values"] = "not read: after a collective has failed the device may never answer";
    return description;
  }
  try {
    describe_values(tensor, description);
  } catch (...) {
    description["values"] = fmt::format("unknown: {}", text_of(std::current_exception()));
  }
  return description;
}

Json describe_batch(const PostMortem& found) {
  if (found.batch.empty()) return nullptr;
  Json tensors = Json::array();
  for (const auto& [name, tensor] : found.batch) {
    tensors.push_back(describe_tensor(name, tensor, found.can_read_devices));
  }
  return tensors;
}

Json describe_spans() {
  Json spans = Json::array();
  for (const trace::RecentSpan& span : trace::recent_spans()) {
    spans.push_back(
        {{"name", span.name}, {"thread", span.thread}, {"ended_s_ago", span.ended_s}, {"seconds", span.seconds}});
  }
  return spans;
}

Json describe_metrics(const Metrics& metrics) {
  Json values = Json::object();
  for (const auto& [name, value] : metrics) values[name] = number(value);
  return values;
}

Json describe_options(TrainerOptions options) {
  struct Collector final : FieldVisitor {
    Json values = Json::object();
    void operator()(const Field& field, FieldValue value) override {
      if (field.applies) values[std::string(field.name)] = field_text(value);
    }
  } collector;
  options.describe(collector);
  return collector.values;
}

// The newest config.toml as text, which cli::run has written when fit started; null if there is none.
Json config_of(const fs::path& run_dir) {
  const fs::path file = last_numbered(run_dir, "config", ".toml");
  return file.empty() ? Json() : Json(read_text_file(file, kConfigBytes));
}

// The command line of this process, one text for each argument.
Json arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  Json all = Json::array();
  for (std::string argument; std::getline(file, argument, '\0');) all.push_back(argument);
  return all;
}

Json describe_environment(const PostMortem& found, const fs::path& run_dir) {
  Json environment{{"arguments", arguments()},
                   {"strategy_and_devices", found.strategy_and_devices},
                   {"world_size", found.world_size}};
  environment.update(doctor::describe_environment(run_dir));
  return environment;
}

Json describe(const PostMortem& found, const fs::path& run_dir) {
  const RunState& state = found.state;
  return {{"error", found.error},
          {"time", fmt::format("{:%FT%TZ}", fmt::gmtime(std::time(nullptr)))},
          {"rank", found.rank},
          {"entry_point", to_string(state.entry_point)},
          {"stage", to_string(state.stage)},
          {"is_sanity_check", state.sanity_checking},
          {"epoch", state.epoch},
          {"global_step", state.global_step},
          {"batch_idx", state.batch_idx},
          {"ranks", found.places},
          {"batch", describe_batch(found)},
          {"metrics", describe_metrics(found.metrics)},
          {"spans", describe_spans()},
          {"config", or_reason([&] { return config_of(run_dir); })},
          {"trainer_options", or_reason([&] { return describe_options(found.options); })},
          {"environment", or_reason([&] { return describe_environment(found, run_dir); })}};
}

}  // namespace

void write_post_mortem(const PostMortem& found, const fs::path& run_dir, const fs::path& folder) {
  fs::create_directory(folder);
  const std::string text =
      describe(found, run_dir).dump(2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace) + "\n";
  TemporaryFile file(folder / fmt::format("rank-{}.json", found.rank));
  file.writer().write(text.data(), text.size());
  file.commit();
}

std::string free_post_mortem_name(const std::filesystem::path& run_dir) {
  return next_numbered(run_dir, "post_mortem", "").filename();
}

}  // namespace fulgur
