#include "fulgur/optim/fused_update.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/instruction_sets.h"
#include "tests/testing/update_rules.h"

namespace fulgur::optim {
namespace {

using fulgur::testing::message_of;
using fulgur::testing::on_every_instruction_set;
using ::testing::HasSubstr;

struct Format {
  at::ScalarType grad_type;
  at::ScalarType copy_type;
  bool copies;
};

// All streams of an update, each with a guard on both sides. A shorter one begins with the same numbers.
struct Streams {
  static constexpr size_t kGuard = 64;
  std::vector<float> param, grad;
  std::vector<uint16_t> grad16, copy;
  std::vector<std::vector<float>> states;
  size_t size, offset;

  Streams(size_t num_elements, size_t num_states, size_t start = 0) : size(num_elements), offset(start) {
    const auto fill = [&](std::vector<float>& values, unsigned seed, float scale) {
      std::mt19937 generator(seed);
      std::normal_distribution<float> normal;
      values.assign(offset + size + kGuard, -77.0f);
      for (size_t i = 0; i < size; ++i) values[offset + i] = scale * normal(generator);
    };
    fill(param, 1, 1.0f);
    fill(grad, 2, 0.1f);
    states.resize(num_states);
    for (size_t i = 0; i < num_states; ++i) {
      fill(states[i], static_cast<unsigned>(3 + i), 0.1f);
      for (size_t k = offset; k < offset + size; ++k) states[i][k] *= states[i][k];  // second moments are >= 0
    }
    copy.assign(offset + size + kGuard, 0x7777);
    grad16.resize(offset + size + kGuard);
  }

  Slice<float> slice(const Format& format) {
    for (size_t i = 0; i < grad.size(); ++i) {
      grad16[i] = format.grad_type == at::kHalf ? c10::Half(grad[i]).x : c10::BFloat16(grad[i]).x;
    }
    Slice<float> result{.param = param.data() + offset,
                        .grad = grad16.data() + offset,
                        .grad_type = format.grad_type,
                        .copy_out = format.copies ? copy.data() + offset : nullptr,
                        .copy_type = format.copy_type,
                        .num_elements = static_cast<int64_t>(size)};
    if (format.grad_type == at::kFloat) result.grad = grad.data() + offset;
    for (size_t i = 0; i < states.size(); ++i) result.states[i] = states[i].data() + offset;
    return result;
  }

  void expect_same(const Streams& other, const std::string& what) const {
    const auto same = [&](const auto& a, const auto& b) {
      using Element = std::decay_t<decltype(a[0])>;
      return std::memcmp(a.data() + offset, b.data() + other.offset, size * sizeof(Element)) == 0;
    };
    EXPECT_TRUE(same(param, other.param)) << what;
    EXPECT_TRUE(same(copy, other.copy)) << what;
    for (size_t i = 0; i < states.size(); ++i) EXPECT_TRUE(same(states[i], other.states[i])) << what << ", state " << i;
  }

  void expect_untouched_outside(const std::string& what) const {
    for (size_t i = 0; i < param.size(); ++i) {
      if (i >= offset && i < offset + size) continue;
      ASSERT_EQ(param[i], -77.0f) << what;
      ASSERT_EQ(copy[i], 0x7777) << what;
      for (const auto& state : states) ASSERT_EQ(state[i], -77.0f) << what;
    }
  }
};

class FusedUpdate : public ::testing::TestWithParam<fulgur::testing::UpdateRule> {
 protected:
  static constexpr GradientScaling kScaling{.factor = 0.7, .clip_value = 0.12};

  Streams updated(size_t size, const Format& format, size_t offset = 0) {
    Streams streams(size, GetParam().num_states, offset);
    for (int i = 0; i < 3; ++i) fused_update(GetParam().rule, streams.slice(format), kScaling);
    return streams;
  }
};

const Format kFormats[] = {{at::kFloat, at::kBFloat16, false},
                           {at::kFloat, at::kHalf, true},
                           {at::kBFloat16, at::kBFloat16, true},
                           {at::kHalf, at::kHalf, true},
                           {at::kBFloat16, at::kBFloat16, false}};

TEST_P(FusedUpdate, HasTheSameBitsOnEveryInstructionSet) {
  for (const Format& format : kFormats) {
    const Streams expected = updated(1003, format);
    on_every_instruction_set([&](const std::string& target) { updated(1003, format).expect_same(expected, target); });
  }
}

TEST_P(FusedUpdate, HasTheSameBitsForEveryNumberOfThreads) {
  Streams initial((1 << 21) + 12'345, GetParam().num_states);  // the copy is large enough to be streamed
  const auto updated_by = [&](int threads) {
    at::set_num_threads(threads);
    Streams streams = initial;
    fused_update(GetParam().rule, streams.slice(kFormats[2]), kScaling);
    return streams;
  };
  const Streams expected = updated_by(1);
  for (const int threads : {2, 3}) updated_by(threads).expect_same(expected, std::to_string(threads) + " threads");
  at::set_num_threads(1);
}

TEST_P(FusedUpdate, HasTheSameBitsHoweverItIsCut) {
  constexpr size_t kSize = 2000;
  const Streams expected = updated(kSize, kFormats[3]);
  for (const int64_t chunk : {1, 7, 16, 333, 1999}) {
    Streams streams(kSize, GetParam().num_states);
    for (int i = 0; i < 3; ++i) {
      const Slice<float> whole = streams.slice(kFormats[3]);
      for (int64_t begin = 0; begin < whole.num_elements; begin += chunk) {
        Slice<float> part = whole;
        part.param += begin;
        part.grad = static_cast<const uint16_t*>(whole.grad) + begin;
        part.copy_out = static_cast<uint16_t*>(whole.copy_out) + begin;
        for (size_t k = 0; k < streams.states.size(); ++k) part.states[k] += begin;
        part.num_elements = std::min(chunk, whole.num_elements - begin);
        fused_update(GetParam().rule, part, kScaling);
      }
    }
    streams.expect_same(expected, "chunks of " + std::to_string(chunk));
  }
}

TEST_P(FusedUpdate, TouchesNothingOutsideWhateverTheLengthAndAlignment) {
  for (const Format& format : kFormats) {
    const Streams expected = updated(100, format);
    on_every_instruction_set([&](const std::string& target) {
      for (size_t size = 0; size <= 70; ++size) {
        for (const size_t offset : {0, 1, 5}) {
          const std::string what = target + ", " + std::to_string(size) + " elements at " + std::to_string(offset);
          const Streams streams = updated(size, format, offset);
          streams.expect_same(expected, what);
          streams.expect_untouched_outside(what);
        }
      }
    });
  }
}

// A slice whose copy, of fp32, takes the place of the gradient.
Slice<float> in_place_of_gradient(Streams& streams) {
  Slice<float> slice = streams.slice(kFormats[0]);
  slice.copy_out = streams.grad.data() + streams.offset;
  slice.copy_type = at::kFloat;
  return slice;
}

TEST_P(FusedUpdate, ACopyMayTakeThePlaceOfTheGradient) {
  on_every_instruction_set([&](const std::string& target) {
    for (const size_t size : {1, 15, 16, 100}) {
      Streams streams(size, GetParam().num_states, size % 3), without = streams;
      fused_update(GetParam().rule, in_place_of_gradient(streams), kScaling);
      fused_update(GetParam().rule, without.slice(kFormats[0]), kScaling);
      streams.expect_same(without, target);
      streams.expect_untouched_outside(target);
      EXPECT_EQ(streams.grad, streams.param) << target;  // the guards around both are equal
    }
  });
}

TEST_P(FusedUpdate, ALargeCopyIsStreamedWithTheSameBits) {
  constexpr int64_t kSize = (1 << 20) + 7;
  Streams streams(kSize, GetParam().num_states);
  const at::Tensor out = torch::zeros({kSize + 1});  // begins at a multiple of 64 bytes
  ASSERT_EQ(reinterpret_cast<uintptr_t>(out.data_ptr()) % 64, 0);
  Slice<float> slice = streams.slice(kFormats[0]);
  slice.copy_out = out.mutable_data_ptr();
  slice.copy_type = at::kFloat;
  fused_update(GetParam().rule, slice, kScaling);
  EXPECT_EQ(std::memcmp(out.const_data_ptr(), streams.param.data(), kSize * sizeof(float)), 0);
  EXPECT_EQ(out[kSize].item<float>(), 0);
}

TEST_P(FusedUpdate, ACopyIsAheadByTheUpdateThatFollows) {
  Rule next = GetParam().rule;
  std::visit(
      [](auto& r) {
        if constexpr (requires { r.step_size; }) r.step_size *= 0.8;
        if constexpr (requires { r.lr; }) r.lr *= 0.8;
      },
      next);
  // The update that is expected uses the last gradient again, or none.
  for (const double share : {1.0, 0.0}) {
    const auto predicted = [&](const Format& format) {
      Streams streams(333, GetParam().num_states, 2);
      const bool in_place = format.copy_type == at::kFloat;
      const Slice<float> slice = in_place ? in_place_of_gradient(streams) : streams.slice(format);
      fused_update(GetParam().rule, slice, kScaling, {.next = next, .gradient = share});
      return streams;
    };
    const Streams got = predicted({at::kFloat, at::kFloat, true}), got16 = predicted(kFormats[1]);
    Streams followed(333, GetParam().num_states, 2);
    fused_update(GetParam().rule, followed.slice(kFormats[0]), kScaling);
    got.expect_same(followed, "the update itself");
    if (share == 0.0) std::ranges::fill(followed.grad, 0.0f);
    fused_update(next, followed.slice(kFormats[0]), kScaling);
    for (size_t i = 2; i < 335; ++i) {
      ASSERT_EQ(got.grad[i], followed.param[i]) << i;
      ASSERT_EQ(got16.copy[i], c10::Half(followed.param[i]).x) << i;
    }
    on_every_instruction_set([&](const std::string& target) {
      const Streams same = predicted({at::kFloat, at::kFloat, true});
      same.expect_same(got, target);
      EXPECT_EQ(same.grad, got.grad) << target;
    });
  }
}

TEST_P(FusedUpdate, ACopyMayRepeatTheLastUpdate) {
  on_every_instruction_set([&](const std::string& target) {
    Streams streams(100, GetParam().num_states);
    const std::vector<float> before = streams.param;
    fused_update(GetParam().rule, in_place_of_gradient(streams), kScaling, {.repeat = 0.75});
    for (size_t i = 0; i < 100; ++i) {
      const float after = streams.param[i];
      ASSERT_EQ(streams.grad[i], std::fma(0.75f, after - before[i], after)) << target;
    }
  });
}

TEST_P(FusedUpdate, ScalesAndClipsTheGradientFirst) {
  Streams inside(500, GetParam().num_states), before(500, GetParam().num_states);
  fused_update(GetParam().rule, inside.slice(kFormats[0]), kScaling);
  for (float& value : before.grad) {
    value = std::clamp(value * static_cast<float>(kScaling.factor), -static_cast<float>(kScaling.clip_value),
                       static_cast<float>(kScaling.clip_value));
  }
  fused_update(GetParam().rule, before.slice(kFormats[0]));
  inside.expect_same(before, GetParam().name);
}

TEST_P(FusedUpdate, KeepsANaNWhereItIs) {
  on_every_instruction_set([&](const std::string& target) {
    const Streams clean = updated(100, kFormats[1]);
    Streams streams(100, GetParam().num_states);
    streams.grad[50] = std::numeric_limits<float>::quiet_NaN();
    for (int i = 0; i < 3; ++i) fused_update(GetParam().rule, streams.slice(kFormats[1]), kScaling);
    EXPECT_TRUE(std::isnan(streams.param[50])) << target;
    EXPECT_TRUE(std::isnan(static_cast<float>(c10::Half(streams.copy[50], c10::Half::from_bits())))) << target;
    for (const size_t i : {49, 51}) EXPECT_EQ(streams.param[i], clean.param[i]) << target;
  });
}

// The same rule in fp64 gives the exact value, to the precision of fp32.
TEST_P(FusedUpdate, InSinglePrecisionRoundsTheUpdateInDoublePrecision) {
  Streams streams(333, GetParam().num_states);
  const auto widened = [](const std::vector<float>& values) {
    return std::vector<double>(values.begin(), values.end());
  };
  std::vector<double> param = widened(streams.param), grad = widened(streams.grad);
  std::vector<std::vector<double>> states;
  Slice<double> exact{.param = param.data(), .grad = grad.data(), .num_elements = 333};
  for (const auto& state : streams.states) states.push_back(widened(state));
  for (size_t i = 0; i < states.size(); ++i) exact.states[i] = states[i].data();
  fused_update(GetParam().rule, streams.slice(kFormats[0]), kScaling);
  fused_update(GetParam().rule, exact, kScaling);
  for (size_t i = 0; i < 333; ++i) EXPECT_NEAR(streams.param[i], param[i], 1e-6 * (1e-2 + std::fabs(param[i]))) << i;
}

INSTANTIATE_TEST_SUITE_P(, FusedUpdate, ::testing::ValuesIn(fulgur::testing::update_rules()),
                         [](const auto& test) { return test.param.name; });

// All NaNs count as equal: their bits depend on the arithmetic.
void expect_same_number(float actual, float expected, uint32_t bits) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(actual)) << std::hex << bits;
  } else {
    EXPECT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected)) << std::hex << bits;
  }
}

TEST(FusedUpdateFormats, Every16BitGradientIsReadExactly) {
  std::vector<uint16_t> grad(1 << 16);
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = static_cast<uint16_t>(i);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    on_every_instruction_set([&](const std::string&) {
      std::vector<float> param(grad.size(), -0.0f);
      fused_update(SGDRule{.lr = -1.0}, Slice<float>{.param = param.data(),
                                                     .grad = grad.data(),
                                                     .grad_type = type,
                                                     .num_elements = static_cast<int64_t>(grad.size())});
      for (size_t i = 0; i < grad.size(); ++i) {
        expect_same_number(param[i],
                           type == at::kHalf ? static_cast<float>(c10::Half(grad[i], c10::Half::from_bits()))
                                             : static_cast<float>(c10::BFloat16(grad[i], c10::BFloat16::from_bits())),
                           static_cast<uint32_t>(i));
      }
    });
  }
}

// All upper halves of a float with lower halves around the points where rounding changes, for both formats.
TEST(FusedUpdateFormats, CopiesAreRoundedToNearestEvenAndNaNsKept) {
  std::vector<float> values;
  for (uint32_t upper = 0; upper < 1 << 16; ++upper) {
    for (const uint32_t lower :
         {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xffff}) {
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
  }
  const std::vector<float> grad(values.size(), 0.0f);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    on_every_instruction_set([&](const std::string&) {
      std::vector<float> param = values;
      std::vector<uint16_t> copy(values.size());
      fused_update(SGDRule{.lr = 0.0}, Slice<float>{.param = param.data(),
                                                    .grad = grad.data(),
                                                    .copy_out = copy.data(),
                                                    .copy_type = type,
                                                    .num_elements = static_cast<int64_t>(values.size())});
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::isinf(values[i])) continue;  // infinity * 0 (weight decay) is NaN; finite values round to it, too
        const auto bits = std::bit_cast<uint32_t>(values[i]);
        if (type == at::kHalf) {
          expect_same_number(c10::Half(copy[i], c10::Half::from_bits()), c10::Half(values[i]), bits);
        } else {
          expect_same_number(c10::BFloat16(copy[i], c10::BFloat16::from_bits()), c10::BFloat16(values[i]), bits);
        }
      }
    });
  }
}

TEST(FusedUpdateErrors, NameWhatIsMissing) {
  float value = 0;
  const auto refusal = [](const Rule& rule, const Slice<float>& slice) {
    return message_of<c10::ValueError>([&] { fused_update(rule, slice); });
  };
  EXPECT_THAT(refusal(SGDRule{}, {.param = &value, .num_elements = 1}), HasSubstr("param or grad is null"));
  EXPECT_THAT(refusal(AdamRule{}, {.param = &value, .grad = &value, .states = {&value}, .num_elements = 1}),
              HasSubstr("needs state 1"));
  EXPECT_THAT(refusal(SGDRule{}, {.param = &value, .grad = &value, .grad_type = at::kDouble, .num_elements = 1}),
              HasSubstr("a gradient of type Double for parameters of type Float"));
  EXPECT_THAT(
      refusal(SGDRule{},
              {.param = &value, .grad = &value, .copy_out = &value, .copy_type = at::kDouble, .num_elements = 1}),
      HasSubstr("a copy of type Double"));
  const Slice<float> slice{.param = &value, .grad = &value, .num_elements = 1};
  EXPECT_THAT(message_of<c10::ValueError>([&] { fused_update(SGDRule{}, slice, {}, {.next = LionRule{}}); }),
              HasSubstr("the update that is predicted is by another rule"));
  fused_update(AdamRule{}, Slice<float>{});  // an empty slice is allowed
}

}  // namespace
}  // namespace fulgur::optim
