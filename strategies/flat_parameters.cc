#include "strategies/flat_parameters.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/logging.h"

namespace fulgur {
namespace {

constexpr int64_t kSlotAlignmentBytes = 64;
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
  if (!param.is_non_overlapping_and_dense()) {
    throw UsageError(
        fmt::format("the elements of parameter '{}' do not lie densely in memory; register a contiguous() "
                    "copy of it",
                    found->second.name));
  }
}

template <class Visit>
void for_each_trainable(const Optimizers& optimizers, const Visit& visit) {
  for (size_t o = 0; o < optimizers.size(); ++o) {
    for (size_t g = 0; g < optimizers[o].groups().size(); ++g) {
      for (const at::Tensor& param : optimizers[o].groups()[g].params) {
        if (param.requires_grad()) visit(o, g, param);
      }
    }
  }
}

// A parameter's state is saved under its name: two optimizers could not both have one. Their steps would undo the loss
// scale twice, too.
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

// Cuts parameters into buckets, as yet without memory.
class BucketCutter {
 public:
  explicit BucketCutter(const BucketOptions& options) : options_(options) {}

  void begin_run() { open_ = false; }

  void add(size_t optimizer, size_t group, const std::string& name, const at::Tensor& param, int64_t element_size) {
    const int64_t alignment = std::max<int64_t>(1, kSlotAlignmentBytes / element_size);
    const int64_t num_elements = round_up(param.numel(), alignment);
    const int64_t cap = buckets_.size() <= 1 ? options_.first_bucket_bytes : options_.bucket_cap_bytes;
    if (!open_ || (end_ + num_elements) * element_size > cap) {
      buckets_.push_back({.optimizer = optimizer, .group = group});
      open_ = true;
      end_ = 0;
    }
    FlatParameters::Bucket& bucket = buckets_.back();
    bucket.slots.push_back({name, param, end_, param.numel()});
    bucket.num_bytes = round_up(end_ + param.numel(), options_.world_size * kRangeAlignment) * element_size;
    end_ += num_elements;
  }

  std::vector<FlatParameters::Bucket> take() { return std::move(buckets_); }

 private:
  const BucketOptions& options_;
  std::vector<FlatParameters::Bucket> buckets_;
  bool open_ = false;
  int64_t end_ = 0;  // of the open bucket
};

// The memory of a parameter in its bucket, with the parameter's own strides (channels_last).
at::Tensor view_in(const at::Tensor& flat, const FlatParameters::Slot& slot) {
  return flat.as_strided(slot.param.sizes(), slot.param.strides(), flat.storage_offset() + slot.begin);
}

void fill(FlatParameters::Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  const at::Tensor& first = bucket.slots.front().param;
  bucket.flat =
      at::zeros({bucket.num_bytes / static_cast<int64_t>(first.element_size())}, first.options().requires_grad(false));
  for (const auto& slot : bucket.slots) {
    const at::Tensor view = view_in(bucket.flat, slot);
    view.copy_(slot.param);
    at::Tensor(slot.param).set_data(view);
  }
}

}  // namespace

std::vector<FlatParameters::Bucket> FlatParameters::plan(const torch::nn::Module& module, const Optimizers& optimizers,
                                                         const BucketOptions& options,
                                                         std::optional<c10::ScalarType> dtype) {
  struct Member {
    size_t optimizer, group;
    at::Tensor param;
    const Named* named;
    c10::ScalarType dtype;
  };
  const Names names = names_of(module);
  check_is_in_one_optimizer(optimizers, names);
  std::vector<Member> members;
  for_each_trainable(optimizers, [&](size_t o, size_t g, const at::Tensor& param) {
    check(param, optimizers[o], names);
    members.push_back({o, g, param, &names.at(param.unsafeGetTensorImpl()), dtype ? *dtype : param.scalar_type()});
  });
  const auto run_of = [](const Member& m) { return std::tuple(m.optimizer, m.group, m.dtype); };
  std::ranges::sort(members, [&](const Member& a, const Member& b) {
    return run_of(a) != run_of(b) ? run_of(a) < run_of(b) : a.named->position > b.named->position;
  });
  BucketCutter cutter(options);
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    if (i == 0 || run_of(member) != run_of(members[i - 1])) cutter.begin_run();
    cutter.add(member.optimizer, member.group, member.named->name, member.param,
               static_cast<int64_t>(c10::elementSize(member.dtype)));
  }
  return cutter.take();
}

FlatParameters::FlatParameters(const torch::nn::Module& module, const Optimizers& optimizers,
                               const BucketOptions& options)
    : buckets_(plan(module, optimizers, options)) {
  for_each_trainable(
      optimizers, [&](size_t, size_t, const at::Tensor& param) { trainable_.push_back(param.unsafeGetTensorImpl()); });
  for (Bucket& bucket : buckets_) fill(bucket);
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

bool FlatParameters::are_those_of(const Optimizers& optimizers) const {
  auto known = trainable_.begin();
  bool same = true;
  for_each_trainable(optimizers, [&](size_t, size_t, const at::Tensor& param) {
    same = same && known != trainable_.end() && *known++ == param.unsafeGetTensorImpl();
  });
  return same && known == trainable_.end();
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
