#include "fulgur/strategies/engine/flat_parameters.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <compare>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/huge_pages.h"
#include "fulgur/base/logging.h"

namespace fulgur {
namespace {

constexpr int64_t kRangeAlignment = 64;  // elements

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Named {
  std::string name;
  size_t position;  // in registration order
};
using Names = std::unordered_map<const c10::TensorImpl*, Named>;

Names names_of(const torch::nn::Module& module) {
  Names names;
  for (const auto& item : module.named_parameters()) {
    names.try_emplace(item.value().unsafeGetTensorImpl(), Named{item.key(), names.size()});
  }
  return names;
}

void check(const at::Tensor& param, const Optimizer& optimizer, const Names& names) {
  const auto found = names.find(param.unsafeGetTensorImpl());
  if (found == names.end()) {
    throw UsageError(c10::str(optimizer.name(), " was given a tensor of shape ", param.sizes(),
                              " that is not a parameter of the module; register_parameter() it, and tie weights so "
                              "that the registered tensor is the one in use"));
  }
  if (param.is_complex()) {  // torch's optimizers in C++ update most of them wrongly
    throw UsageError(
        fmt::format("parameter '{}' is complex, which optimizers cannot train; register torch::view_as_real() of it, "
                    "and take torch::view_as_complex() of that in forward",
                    found->second.name));
  }
  if (!param.is_non_overlapping_and_dense()) {
    throw UsageError(
        fmt::format("the elements of parameter '{}' do not lie densely in memory; register a contiguous() "
                    "copy of it",
                    found->second.name));
  }
}

// A parameter's state is saved under its name, so only one optimizer can have it. Two would also undo the loss scale
// twice.
void check_is_in_one_optimizer(const Optimizers& optimizers, const Names& names) {
  std::unordered_map<const c10::TensorImpl*, size_t> optimizer_of;
  for (size_t o = 0; o < optimizers.size(); ++o) {
    for (const at::Tensor& param : optimizers[o].params()) {
      const size_t other = optimizer_of.emplace(param.unsafeGetTensorImpl(), o).first->second;
      if (other == o) continue;
      const auto named = names.find(param.unsafeGetTensorImpl());
      throw UsageError(fmt::format(
          "parameter '{}' is given to two optimizers, number {} ({}) and number {} ({}), each of which would keep a "
          "state of its own for it; leave it in one of them, or give what they share to an optimizer of its own and "
          "step that one together with either",
          named == names.end() ? "" : named->second.name, other, optimizers[other].name(), o, optimizers[o].name()));
    }
  }
}

// The key of parameters that lie in a bucket together.
struct Run {
  size_t optimizer, group;
  c10::ScalarType dtype;
  auto operator<=>(const Run&) const = default;
};

// Cuts parameters into buckets, without memory yet. Parameters are added in the order in which backward finishes
// them. A Run has one open bucket at a time; buckets that are opened before any is full are small.
class BucketCutter {
 public:
  explicit BucketCutter(const BucketOptions& options) : options_(options) {}

  void add(const Run& run, const std::string& name, const at::Tensor& param) {
    const auto element_size = static_cast<int64_t>(c10::elementSize(run.dtype));
    const int64_t alignment = std::max<int64_t>(1, options_.slot_alignment_bytes / element_size);
    const int64_t num_elements = round_up(param.numel(), alignment);
    Open alone;
    Open* open = &alone;
    if (param.numel() * element_size >= options_.large_bytes) {
      any_is_full_ = true;
      alone = new_bucket(run);
    } else {
      const auto [place, is_new] = open_.try_emplace(run);
      open = &place->second;
      const bool is_full = !is_new && (open->end + num_elements) * element_size > open->cap_bytes;
      any_is_full_ = any_is_full_ || is_full;
      if (is_new || is_full) *open = new_bucket(run);
    }
    Cut& cut = cut_[open->bucket];
    cut.bucket.slots.push_back({name, param, open->end, param.numel()});
    cut.bucket.num_bytes = round_up(open->end + param.numel(), options_.world_size * kRangeAlignment) * element_size;
    cut.last = num_added_++;
    open->end += num_elements;
  }

  // Returns the buckets in the order in which backward fills them.
  std::vector<FlatParameters::Bucket> take() {
    std::ranges::sort(cut_, {}, &Cut::last);
    std::vector<FlatParameters::Bucket> buckets;
    for (Cut& cut : cut_) buckets.push_back(std::move(cut.bucket));
    return buckets;
  }

 private:
  struct Open {
    size_t bucket = 0;
    int64_t cap_bytes = 0;
    int64_t end = 0;  // in elements
  };
  struct Cut {
    FlatParameters::Bucket bucket;
    size_t last = 0;  // the number of the parameter that was added last
  };

  Open new_bucket(const Run& run) {
    cut_.push_back({.bucket = {.optimizer = run.optimizer, .group = run.group}});
    return {.bucket = cut_.size() - 1,
            .cap_bytes = any_is_full_ ? options_.bucket_cap_bytes : options_.first_bucket_bytes};
  }

  const BucketOptions& options_;
  std::vector<Cut> cut_;
  std::map<Run, Open> open_;
  bool any_is_full_ = false;
  size_t num_added_ = 0;
};

void fill(FlatParameters::Bucket& bucket, const BucketOptions& options) {
  const c10::NoGradGuard no_grad;
  const at::Tensor& first = bucket.slots.front().param;
  const int64_t num_elements = bucket.num_bytes / static_cast<int64_t>(first.element_size());
  const at::TensorOptions like = first.options().requires_grad(false);
  bucket.flat =
      options.allocate ? options.allocate(num_elements, like) : in_huge_pages(at::empty({num_elements}, like)).zero_();
  for (const auto& slot : bucket.slots) {
    const at::Tensor view = view_in(bucket.flat, slot);
    view.copy_(slot.param);
    at::Tensor(slot.param).set_data(view);
  }
}

// Cuts the parameters that `wanted` chooses into buckets, without memory yet.
template <class Wanted>
std::vector<FlatParameters::Bucket> cut(const torch::nn::Module& module, const Optimizers& optimizers,
                                        const BucketOptions& options, std::optional<c10::ScalarType> dtype,
                                        const Wanted& wanted) {
  struct Member {
    Run run;
    at::Tensor param;
    const Named* named;
  };
  const Names names = names_of(module);
  check_is_in_one_optimizer(optimizers, names);
  std::vector<Member> members;
  for (size_t o = 0; o < optimizers.size(); ++o) {
    for (size_t g = 0; g < optimizers[o].groups().size(); ++g) {
      for (const at::Tensor& param : optimizers[o].groups()[g].params) {
        if (!wanted(param)) continue;
        check(param, optimizers[o], names);
        const c10::ScalarType dtype_in_bucket = dtype.value_or(param.scalar_type());
        members.push_back({{o, g, dtype_in_bucket}, param, &names.at(param.unsafeGetTensorImpl())});
      }
    }
  }
  std::ranges::sort(members, std::ranges::greater(), [](const Member& member) { return member.named->position; });
  BucketCutter cutter(options);
  for (const Member& member : members) cutter.add(member.run, member.named->name, member.param);
  return cutter.take();
}

}  // namespace

at::Tensor view_in(const at::Tensor& flat, const FlatParameters::Slot& slot) {
  return flat.as_strided(slot.param.sizes(), slot.param.strides(), flat.storage_offset() + slot.begin);
}

std::vector<FlatParameters::Bucket> FlatParameters::plan(const torch::nn::Module& module, const Optimizers& optimizers,
                                                         const BucketOptions& options,
                                                         std::optional<c10::ScalarType> dtype) {
  return cut(module, optimizers, options, dtype, [](const at::Tensor& param) { return param.requires_grad(); });
}

FlatParameters::FlatParameters(const torch::nn::Module& module, const Optimizers& optimizers,
                               const BucketOptions& options, const Generations& generations) {
  std::set<int64_t> turns{0};
  std::unordered_map<const c10::TensorImpl*, int64_t> turn_of;
  for (const auto& item : module.named_parameters()) {
    const auto found = generations.find(item.key());
    if (found == generations.end()) continue;
    if (found->second != kOutside) turns.insert(found->second);
    turn_of.try_emplace(item.value().unsafeGetTensorImpl(), found->second);
  }
  for (const int64_t turn : turns) {
    append_if(module, optimizers, options, turn, [&](const at::Tensor& param) {
      const auto found = turn_of.find(param.unsafeGetTensorImpl());
      return found == turn_of.end() ? turn == 0 && param.requires_grad() : found->second == turn;
    });
  }
}

void FlatParameters::append(const torch::nn::Module& module, const Optimizers& optimizers,
                            const BucketOptions& options) {
  const int64_t generation = buckets_.empty() ? 1 : buckets_.back().generation + 1;
  append_if(module, optimizers, options, generation,
            [&](const at::Tensor& param) { return param.requires_grad() && !contains(param); });
}

template <class Wanted>
void FlatParameters::append_if(const torch::nn::Module& module, const Optimizers& optimizers,
                               const BucketOptions& options, int64_t generation, const Wanted& wanted) {
  auto added = cut(module, optimizers, options, /*dtype=*/{}, wanted);
  for (Bucket& bucket : added) {
    fill(bucket, options);
    bucket.generation = generation;
    for (const Slot& slot : bucket.slots) members_.insert(slot.param.unsafeGetTensorImpl());
    buckets_.push_back(std::move(bucket));
  }
}

FlatParameters::~FlatParameters() {
  const c10::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    for (Slot& slot : bucket.slots) {
      try {
        if (slot.param.is_alias_of(bucket.flat)) slot.param.set_data(slot.param.detach().clone());
      } catch (const std::exception& error) {
        log_warning("parameter '{}' stays a view of its bucket: {}", slot.name, error.what());
      }
    }
    bucket.flat.reset();
  }
}

bool FlatParameters::contain_all_trainable(const Optimizers& optimizers) const {
  return std::ranges::all_of(optimizers, [&](const auto& optimizer) {
    return std::ranges::all_of(optimizer->groups(), [&](const Optimizer::Group& group) {
      return std::ranges::all_of(group.params,
                                 [&](const at::Tensor& param) { return !param.requires_grad() || contains(param); });
    });
  });
}

void FlatParameters::check_in_place() const {
  for (const Bucket& bucket : buckets_) {
    const auto* flat = static_cast<const std::byte*>(bucket.flat.const_data_ptr());
    const auto element_size = static_cast<int64_t>(bucket.flat.element_size());
    for (const Slot& slot : bucket.slots) {
      // A tensor without elements has no address.
      const bool in_place =
          slot.num_elements == 0 || (slot.param.const_data_ptr() == flat + slot.begin * element_size &&
                                     slot.param.scalar_type() == bucket.flat.scalar_type());
      TORCH_CHECK(in_place, "parameter '", slot.name,
                  "' no longer lies where the strategy put it, so that updates would miss it; do not cast the module "
                  "or torch::load() into it while it is trained");
    }
  }
}

}  // namespace fulgur
