#pragma once

#include <cstddef>
#include <optional>
#include <variant>

// The element-wise update rules and the coefficients of one update by them. In the formulas p is an element of a
// parameter, g its gradient, or g + l2 * p where the rule has an l2 (weight decay that is added to the gradient); the
// states are further numbers per element. Source: torch.optim, except for Lion.
namespace fulgur::optim {

// States: m, v, both from 0.   m += one_minus_beta1 * (g - m);   v += one_minus_beta2 * (g^2 - v);
// p -= decay * p + step_size * m / (sqrt(v) * inv_root_bias_correction2 + eps).
struct AdamRule {
  double one_minus_beta1 = 0.1;
  double one_minus_beta2 = 1e-3;
  double eps = 1e-8;
  double step_size = 1e-3;                 // lr / (1 - beta1^t) at the t-th update, from 1
  double inv_root_bias_correction2 = 1.0;  // 1 / sqrt(1 - beta2^t)
  double l2 = 0.0;                         // Adam
  double decay = 0.0;                      // AdamW: lr * weight_decay
};

// States: b, from 0, or none.   b = momentum * b + one_minus_dampening * g;
// p -= lr * b; with nesterov lr * (g + momentum * b), without a state lr * g.
struct SGDRule {
  double lr = 1e-3;
  double momentum = 0.0;
  double one_minus_dampening = 1.0;  // 1 at a parameter's first update
  double l2 = 0.0;
  bool nesterov = false;
};

// States: sum.   sum += g^2;   p -= lr * g / (sqrt(sum) + eps).
struct AdagradRule {
  double lr = 1e-2;  // the decayed learning rate
  double eps = 1e-10;
  double l2 = 0.0;
};

// States: s, from 0; then b, or null for no momentum; then a, or null for not centered; both from 0.
// s += one_minus_alpha * (g^2 - s);   a += one_minus_alpha * (g - a);   q = g / (sqrt(s - a^2) + eps);
// b = momentum * b + q;   p -= lr * b, or lr * q.
struct RMSpropRule {
  double lr = 1e-2;
  double one_minus_alpha = 1e-2;
  double eps = 1e-8;
  double momentum = 0.0;
  double l2 = 0.0;
};

// States: m, from 0.   p -= decay * p + lr * sign(m + one_minus_beta1 * (g - m));   m += one_minus_beta2 * (g - m).
// Source: Chen et al. 2023, arXiv:2302.06675.
struct LionRule {
  double lr = 1e-4;
  double one_minus_beta1 = 0.1;
  double one_minus_beta2 = 0.01;
  double decay = 0.0;  // lr * weight_decay
};

using Rule = std::variant<AdamRule, SGDRule, AdagradRule, RMSpropRule, LionRule>;

// Whether a rule carries a direction from one update to the next, so that most of an update is known before its
// gradient is. Without momentum nothing is known: an update by a gradient of 0 is 0, except for decay.
inline bool has_momentum(const Rule& rule) {
  if (const auto* adam = std::get_if<AdamRule>(&rule)) return adam->one_minus_beta1 < 1.0;
  if (const auto* sgd = std::get_if<SGDRule>(&rule)) return sgd->momentum != 0.0;
  if (const auto* rmsprop = std::get_if<RMSpropRule>(&rule)) return rmsprop->momentum != 0.0;
  if (const auto* lion = std::get_if<LionRule>(&rule)) return lion->one_minus_beta1 < 1.0;
  return false;  // Adagrad
}

constexpr size_t kMaxStates = 3;  // largest number of states of a rule

// What is added to a copy of the updated parameters: a prediction of their next update. By default nothing is added.
struct Prediction {
  std::optional<Rule> next{};  // coefficients of the predicted update; without them `repeat` decides
  double gradient = 1.0;       // the predicted update assumes this multiple of the last gradient
  double repeat = 0.0;         // the prediction is this multiple of the last update; unused if there is `next`
};

}  // namespace fulgur::optim
