// The kernels for GPUs without one: loops run what their threads do, and its bits are compared with the CPU's kernel.
#include "fulgur/optim/update_plan.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fulgur/optim/fused_update.h"
#include "tests/testing/update_rules.h"

namespace fulgur::optim::gpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Step>
void run(const UpdateLaunch<Step>& launch) {
  for (uint32_t block = 0; block < launch.num_blocks; ++block) {
    for (uint32_t thread = 0; thread < device_code::kThreads; ++thread) update_part(launch, block, thread);
  }
}

// What a GPU would do.
void update(const std::vector<RuleOfSlices>& rules, const std::vector<SliceOnGpu>& slices,
            const GradientScaling& scaling = {}) {
  with_step_of(rules.front().rule, [&]<class Step>() {
    for (const auto& launch : plan_update<Step>(rules, slices, &scaling.factor, scaling.clip_value)) run(launch);
  });
}

struct Formats {
  at::ScalarType grad, copy;
  bool copies;
};

// A tensor with its gradient, states and copy, each with a guard on both sides.
class Streams {
 public:
  Streams(size_t num_elements, size_t num_states, Formats formats, size_t offset, unsigned seed)
      : size_(num_elements), offset_(offset), formats_(formats), states_(num_states), copy_(room(), 0x7777) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, float scale) {
      values.assign(room(), -77.0F);
      for (size_t i = 0; i < size_; ++i) values[offset_ + i] = scale * normal(generator);
    };
    fill(param_, 1.0F);
    fill(grad_, 0.1F);
    for (std::vector<float>& state : states_) {
      fill(state, 0.1F);
      for (size_t i = 0; i < size_; ++i) state[offset_ + i] *= state[offset_ + i];  // second moments are >= 0
    }
    for (const float value : grad_) {
      grad16_.push_back(formats_.grad == at::kHalf ? c10::Half(value).x : c10::BFloat16(value).x);
    }
  }

  Slice<float> slice() {
    Slice<float> result{.param = param_.data() + offset_,
                        .grad = grad_.data() + offset_,
                        .grad_type = formats_.grad,
                        .num_elements = static_cast<int64_t>(size_)};
    if (formats_.grad != at::kFloat) result.grad = grad16_.data() + offset_;
    for (size_t k = 0; k < states_.size(); ++k) result.states[k] = states_[k].data() + offset_;
    if (formats_.copies) {
      result.copy_type = formats_.copy;
      result.copy_out =
          formats_.copy == at::kFloat ? static_cast<void*>(grad_.data() + offset_) : copy_.data() + offset_;
    }
    return result;
  }

  bool operator==(const Streams& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    bool equal = same(param_, other.param_) && same(grad_, other.grad_) && same(copy_, other.copy_);
    for (size_t k = 0; k < states_.size(); ++k) equal &= same(states_[k], other.states_[k]);
    return equal;
  }

 private:
  static constexpr size_t kGuard = 8;
  size_t room() const { return offset_ + size_ + kGuard; }

  size_t size_, offset_;
  Formats formats_;
  std::vector<float> param_, grad_;
  std::vector<std::vector<float>> states_;
  std::vector<uint16_t> grad16_, copy_;
};

constexpr Formats kFormats[] = {{at::kFloat, at::kFloat, false},   {at::kFloat, at::kHalf, true},
                                {at::kFloat, at::kFloat, true},    {at::kBFloat16, at::kBFloat16, true},
                                {at::kHalf, at::kHalf, true},      {at::kBFloat16, at::kHalf, true},
                                {at::kBFloat16, at::kFloat, false}};

// The rule with another learning rate, as another group of parameters or the next update would have.
Rule slower(Rule rule) {
  std::visit(
      [](auto& r) {
        if constexpr (requires { r.step_size; }) r.step_size *= 0.8;
        if constexpr (requires { r.lr; }) r.lr *= 0.8;
      },
      rule);
  return rule;
}

class UpdateOnGpu : public ::testing::TestWithParam<fulgur::testing::UpdateRule> {
 protected:
  // Tensors of many sizes, with all formats, aligned or not.
  std::vector<Streams> tensors() const {
    std::vector<Streams> made;
    for (const size_t size : {1, 3, 4, 7, 1023, 4096, 4099, 9000}) {
      for (const size_t offset : {0, 1, 4}) {
        const auto seed = static_cast<unsigned>(made.size());
        made.emplace_back(size, GetParam().num_states, kFormats[seed % std::size(kFormats)], offset, seed);
      }
    }
    return made;
  }

  // The tensors take the rules in turn.
  static std::vector<SliceOnGpu> slices(std::vector<Streams>& tensors, size_t num_rules) {
    std::vector<SliceOnGpu> found;
    for (Streams& streams : tensors) found.push_back({streams.slice(), found.size() % num_rules});
    return found;
  }

  void expect_the_bits_of_the_cpu(const std::vector<RuleOfSlices>& rules, const GradientScaling& scaling) const {
    std::vector<Streams> ours = tensors(), theirs = tensors();
    for (int step = 0; step < 3; ++step) {
      update(rules, slices(ours, rules.size()), scaling);
      for (const SliceOnGpu& each : slices(theirs, rules.size())) {
        fused_update(rules[each.rule].rule, each.slice, scaling, rules[each.rule].prediction);
      }
    }
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i] == theirs[i]) << "tensor " << i;
  }
};

TEST_P(UpdateOnGpu, HasTheBitsOfTheCpu) {
  const Rule rule = GetParam().rule;
  expect_the_bits_of_the_cpu({{rule}, {slower(rule)}}, {.factor = 0.7, .clip_value = 0.12});
  expect_the_bits_of_the_cpu({{rule}}, {});
}

TEST_P(UpdateOnGpu, CopiesAreAheadByThePrediction) {
  const Rule rule = GetParam().rule;
  expect_the_bits_of_the_cpu({{rule, {.next = slower(rule)}},
                              {rule, {.next = slower(rule), .gradient = 0.0}},
                              {rule, {.repeat = 0.75}},
                              {rule}},
                             {.factor = 0.7});
}

INSTANTIATE_TEST_SUITE_P(, UpdateOnGpu, ::testing::ValuesIn(fulgur::testing::update_rules()),
                         [](const auto& test) { return test.param.name; });

// Where the tables of a launch are full, another one follows; no tensor is lost and none is updated twice.
TEST(UpdatePlan, LongTablesAreCutIntoLaunches) {
  constexpr size_t kTensors = 2 * kMaxTensors + 5, kRules = 50;
  std::vector<float> params(kTensors, 1.0F), grads(kTensors, 1.0F);
  std::vector<RuleOfSlices> rules;
  for (size_t r = 0; r < kRules; ++r) rules.push_back({SGDRule{.lr = static_cast<double>(r + 1)}});
  for (const size_t num_rules : {size_t{1}, size_t{16}, kRules}) {
    std::vector<SliceOnGpu> slices;
    for (size_t i = 0; i < kTensors; ++i) {
      params[i] = 0.0F;
      slices.push_back({{.param = &params[i], .grad = &grads[i], .num_elements = 1}, i % num_rules});
      slices.push_back({{.param = nullptr, .grad = nullptr, .num_elements = 0}, i % num_rules});
    }
    const auto launches = plan_update<SGDStep<Scalar>>(rules, slices, nullptr, kInfinity);
    EXPECT_EQ(launches.size(),
              num_rules <= kMaxCoefficients ? 3 : (kTensors + kMaxCoefficients - 1) / kMaxCoefficients);
    for (const auto& launch : launches) run(launch);
    for (size_t i = 0; i < kTensors; ++i) ASSERT_EQ(params[i], -static_cast<float>(i % num_rules + 1)) << i;
  }
  EXPECT_TRUE(plan_update<SGDStep<Scalar>>(rules, {}, nullptr, kInfinity).empty());
}

TEST(UpdatePlan, RefusesOtherTypes) {
  float param = 0;
  const std::vector<SliceOnGpu> slices{
      {{.param = &param, .grad = &param, .grad_type = at::kDouble, .num_elements = 1}}};
  EXPECT_THROW(plan_update<SGDStep<Scalar>>({{SGDRule{}}}, slices, nullptr, kInfinity), c10::ValueError);
}

// All NaNs count as equal.
void expect_same_number(float actual, float expected, uint32_t bits) {
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(actual)) << std::hex << bits;
  } else {
    ASSERT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected)) << std::hex << bits;
  }
}

TEST(DeviceCode, Every16BitNumberIsReadExactly) {
  for (uint32_t i = 0; i < 1 << 16; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    expect_same_number(device_code::from_fp16(bits), c10::Half(bits, c10::Half::from_bits()), i);
    expect_same_number(device_code::from_bf16(bits), c10::BFloat16(bits, c10::BFloat16::from_bits()), i);
  }
}

// All upper halves of a float with lower halves around the points where rounding changes, for both formats.
TEST(DeviceCode, NumbersAreRoundedToNearestEvenAndNaNsKept) {
  for (uint32_t upper = 0; upper < 1 << 16; ++upper) {
    for (const uint32_t lower :
         {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xffff}) {
      const uint32_t bits = upper << 16 | lower;
      const auto value = std::bit_cast<float>(bits);
      expect_same_number(device_code::from_fp16(device_code::to_fp16(value)), c10::Half(value), bits);
      expect_same_number(device_code::from_bf16(device_code::to_bf16(value)), c10::BFloat16(value), bits);
    }
  }
}

}  // namespace
}  // namespace fulgur::optim::gpu
