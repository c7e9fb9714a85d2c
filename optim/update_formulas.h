// The arithmetic of an update, written once for the vectors of every CPU and for the scalars of a GPU. This file is
// included inside a namespace, possibly several times in a file, so there is no #pragma once. Before that the namespace
// has, for a tag type D of its numbers:
//   FULGUR_FORMULA                         how functions are declared
//   V<D>, Lane<D>                          a vector of numbers and one of them; + - * / < > work on vectors
//   rounded(d, double), zero(d), one(d)    vectors of one number
//   fma(d, a, b, c)                        a * b + c, rounded once
//   root(v), negated(v), chosen(mask, yes, no)
// Roots, quotients and sums are IEEE's, products are fused only by fma(), so results have the same bits everywhere.

// mean + weight * (value - mean). With a weight of 1 the mean, which may be much larger, leaves no trace.
template <class D>
FULGUR_FORMULA V<D> lerp(D d, V<D> mean, V<D> value, V<D> weight) {
  return chosen(weight < one(d), fma(d, weight, value - mean, mean), value);
}

// mean + weight * (value^2 - mean); not below 0
template <class D>
FULGUR_FORMULA V<D> lerp_square(D d, V<D> mean, V<D> value, V<D> weight) {
  return chosen(weight < one(d), fma(d, weight, fma(d, value, value, negated(mean)), mean), value * value);
}

// How a gradient is changed before the rule uses it.
template <class D>
struct Scaling {
  D d;
  V<D> factor, clip_value;
  bool clips;
  FULGUR_FORMULA V<D> operator()(V<D> grad) const {
    grad = grad * factor;
    if (!clips) return grad;
    grad = chosen(grad > clip_value, clip_value, grad);
    return chosen(grad < negated(clip_value), negated(clip_value), grad);
  }
};

// ---- The rules: update_rules.h has their formulas. `present` is null for a state that is left out.

template <class D>
struct AdamStep {
  using Settings = AdamRule;
  static constexpr size_t kNumStates = 2;
  D d;
  V<D> weight1, weight2, eps, step_size, inv_root, l2, decay;
  AdamStep() = default;
  explicit AdamStep(const AdamRule& rule)
      : weight1(rounded(d, rule.one_minus_beta1)),
        weight2(rounded(d, rule.one_minus_beta2)),
        eps(rounded(d, rule.eps)),
        step_size(rounded(d, rule.step_size)),
        inv_root(rounded(d, rule.inv_root_bias_correction2)),
        l2(rounded(d, rule.l2)),
        decay(rounded(d, rule.decay)) {}
  FULGUR_FORMULA V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const*) const {
    grad = fma(d, l2, param, grad);
    states[0] = lerp(d, states[0], grad, weight1);
    states[1] = lerp_square(d, states[1], grad, weight2);
    const V<D> divisor = fma(d, root(states[1]), inv_root, eps);
    return param - fma(d, decay, param, step_size * (states[0] / divisor));
  }
};

template <class D>
struct SGDStep {
  using Settings = SGDRule;
  static constexpr size_t kNumStates = 1;
  D d;
  V<D> minus_lr, minus_loss, weight, l2;  // momentum is 1 + minus_loss, more exactly than it could be rounded
  bool nesterov;
  SGDStep() = default;
  explicit SGDStep(const SGDRule& rule)
      : minus_lr(rounded(d, -rule.lr)),
        minus_loss(rounded(d, rule.momentum - 1.0)),
        weight(rounded(d, rule.one_minus_dampening)),
        l2(rounded(d, rule.l2)),
        nesterov(rule.nesterov) {}
  FULGUR_FORMULA V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const* present) const {
    grad = fma(d, l2, param, grad);
    V<D> direction = grad;
    if (present[0]) {
      states[0] = fma(d, weight, grad, fma(d, minus_loss, states[0], states[0]));
      direction = nesterov ? fma(d, minus_loss, states[0], states[0] + grad) : states[0];
    }
    return fma(d, minus_lr, direction, param);
  }
};

template <class D>
struct AdagradStep {
  using Settings = AdagradRule;
  static constexpr size_t kNumStates = 1;
  D d;
  V<D> minus_lr, eps, l2;
  AdagradStep() = default;
  explicit AdagradStep(const AdagradRule& rule)
      : minus_lr(rounded(d, -rule.lr)), eps(rounded(d, rule.eps)), l2(rounded(d, rule.l2)) {}
  FULGUR_FORMULA V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const*) const {
    grad = fma(d, l2, param, grad);
    states[0] = fma(d, grad, grad, states[0]);
    return fma(d, minus_lr, grad / (root(states[0]) + eps), param);
  }
};

template <class D>
struct RMSpropStep {
  using Settings = RMSpropRule;
  static constexpr size_t kNumStates = 3;
  D d;
  V<D> minus_lr, weight, eps, momentum, l2;
  RMSpropStep() = default;
  explicit RMSpropStep(const RMSpropRule& rule)
      : minus_lr(rounded(d, -rule.lr)),
        weight(rounded(d, rule.one_minus_alpha)),
        eps(rounded(d, rule.eps)),
        momentum(rounded(d, rule.momentum)),
        l2(rounded(d, rule.l2)) {}
  FULGUR_FORMULA V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const* present) const {
    grad = fma(d, l2, param, grad);
    states[0] = lerp_square(d, states[0], grad, weight);
    V<D> variance = states[0];
    if (present[2]) {
      states[2] = lerp(d, states[2], grad, weight);
      variance = fma(d, negated(states[2]), states[2], variance);
      variance = chosen(variance < zero(d), zero(d), variance);  // below 0 by rounding only
    }
    V<D> direction = grad / (root(variance) + eps);
    if (present[1]) direction = states[1] = fma(d, momentum, states[1], direction);
    return fma(d, minus_lr, direction, param);
  }
};

template <class D>
struct LionStep {
  using Settings = LionRule;
  static constexpr size_t kNumStates = 1;
  D d;
  V<D> lr, weight1, weight2, decay;
  LionStep() = default;
  explicit LionStep(const LionRule& rule)
      : lr(rounded(d, rule.lr)),
        weight1(rounded(d, rule.one_minus_beta1)),
        weight2(rounded(d, rule.one_minus_beta2)),
        decay(rounded(d, rule.decay)) {}
  FULGUR_FORMULA V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const*) const {
    const V<D> mean = lerp(d, states[0], grad, weight1);
    states[0] = lerp(d, states[0], grad, weight2);
    V<D> step = mean * lr;  // the result if mean is 0 or NaN
    step = chosen(mean > zero(d), lr, step);
    step = chosen(mean < zero(d), negated(lr), step);
    return param - fma(d, decay, param, step);
  }
};

// ---- What a copy of the parameters is ahead by: optim/update_rules.h, Prediction.

enum class Ahead { none, by_next, by_repeat };

template <class Step, class D>
struct Lookahead {
  Ahead ahead;
  Step next;
  V<D> next_gradient, repeat;
  // `before` and `param` are the parameter before and after its update by the gradient.
  FULGUR_FORMULA V<D> operator()(V<D> before, V<D> param, V<D> grad, V<D>* states, Lane<D>* const* present) const {
    if (ahead == Ahead::by_next) param = next(param, grad * next_gradient, states, present);
    if (ahead == Ahead::by_repeat) param = fma(D(), repeat, param - before, param);
    return param;
  }
};
