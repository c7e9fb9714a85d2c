#include "fulgur/strategies/engine/engine_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

int64_t to_bytes(double mib) { return static_cast<int64_t>(mib * (1 << 20)); }

void check_base(std::string_view base) {
  const std::string name = canonical_name(base);
  if (name == Dp::kName) {
    throw UsageError(
        "strategy 'delayed_update' does not go over 'dp': its replicas read the weights while the next step computes, "
        "which a late update would have to change; use base 'ddp'");
  }
  const std::vector<std::string> known{"ddp", "ddp_sharded", "single_device", "zero_offload"};
  if (std::ranges::find(known, name) == known.end())
    throw UsageError(unknown_name_message("base of strategy 'delayed_update'", base, known));
}

template <class Options>
EngineOptions with_ranks(const Options& options) {
  return {.world = WorldOptions{.timeout_s = options.timeout_s, .connect_timeout_s = options.connect_timeout_s},
          .buckets = {.first_bucket_bytes = to_bytes(options.first_bucket_mib),
                      .bucket_cap_bytes = to_bytes(options.bucket_cap_mib)},
          .broadcast_buffers = options.broadcast_buffers};
}

template <class Options>
EngineOptions sharded(const Options& options) {
  EngineOptions engine = with_ranks(options);
  engine.shard = true;
  engine.each_micro_batch = canonical_name(options.reduce) == "each_micro_batch";
  return engine;
}

template <class Options>
EngineOptions offloaded(const Options& options) {
  EngineOptions engine = sharded(options);
  engine.host_ratio = options.ratio;
  engine.update_threads = options.update_threads;
  return engine;
}

// Throws UsageError if a setting that has no effect differs from its default.
template <class Options, class Value>
void check_unset(const Options& options, Value Options::* setting, std::string_view name, std::string_view because) {
  const Value unset = Options().*setting;
  if (options.*setting == unset) return;
  throw UsageError(fmt::format("strategy '{}': {} = {} would have no effect with {}; leave it at {}", Options::kName,
                               name, options.*setting, because, unset));
}

void check_settings(const ZeroOffload& preset) {
  if (preset.ratio > 0) return;
  check_unset(preset, &ZeroOffload::update_threads, "update_threads", "ratio = 0, which leaves nothing on the host");
}

void check_settings(const DelayedUpdate& preset) {
  using D = DelayedUpdate;
  const std::string base = canonical_name(preset.base);
  const std::string because = fmt::format("base = '{}'", base);
  if (base != ZeroOffload::kName) check_unset(preset, &D::ratio, "ratio", because);
  if (base != ZeroOffload::kName && base != DdpSharded::kName) check_unset(preset, &D::reduce, "reduce", because);
  if (base != SingleDevice::kName) return;
  check_unset(preset, &D::broadcast_buffers, "broadcast_buffers", because);
  check_unset(preset, &D::timeout_s, "timeout_s", because);
  check_unset(preset, &D::connect_timeout_s, "connect_timeout_s", because);
}

EngineOptions options_of(const SingleDevice&) { return {}; }
EngineOptions options_of(const Dp&) { return {}; }
EngineOptions options_of(const Ddp& preset) { return with_ranks(preset); }

EngineOptions options_of(const DdpSharded& preset) {
  EngineOptions engine = sharded(preset);
  engine.each_micro_batch = engine.each_micro_batch && preset.stage == 2;
  return engine;
}

EngineOptions options_of(const ZeroOffload& preset) {
  check_settings(preset);
  return offloaded(preset);
}

EngineOptions options_of(const DelayedUpdate& preset) {
  check_base(preset.base);
  check_settings(preset);
  const std::string base = canonical_name(preset.base);
  EngineOptions engine = base == ZeroOffload::kName  ? offloaded(preset)
                         : base == DdpSharded::kName ? sharded(preset)
                                                     : with_ranks(preset);
  if (base == SingleDevice::kName) engine.world.reset();
  engine.update_threads = preset.update_threads;
  engine.delayed = true;
  engine.warmup_steps = preset.warmup_steps;
  return engine;
}

}  // namespace

EngineOptions engine_options(const Preset& preset) {
  return std::visit([](const auto& options) { return options_of(options); }, preset);
}

void check_devices(const Preset& preset, const std::vector<c10::Device>& devices, int64_t num_nodes) {
  if (engine_options(preset).world || (devices.size() == 1 && num_nodes == 1)) return;
  if (std::holds_alternative<Dp>(preset)) {
    if (num_nodes == 1) return;
    throw UsageError(
        fmt::format("strategy 'dp' is one process on one machine, but num_nodes = {}; set it to 1 or write "
                    "strategy = 'ddp'",
                    num_nodes));
  }
  const bool is_base = std::holds_alternative<DelayedUpdate>(preset);
  throw UsageError(
      fmt::format("strategy '{}' trains on one device, but devices = {} and num_nodes = {}; set both to 1 or write "
                  "{} = 'ddp'",
                  is_base ? "delayed_update' over 'single_device" : "single_device", devices.size(), num_nodes,
                  is_base ? "strategy.base" : "strategy"));
}

}  // namespace fulgur
