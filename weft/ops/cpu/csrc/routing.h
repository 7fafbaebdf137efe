// Experts and weights of a token: weft/ops/routing.py is the definition.
//
// Each token is routed independently, by one sequence of operations on its float32 logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

namespace weft {
namespace {

using namespace vec;

constexpr int64_t kMostChosen = 64;  // maximum number of experts, or groups, chosen by a token

enum class Scoring : int { softmax = 0, sigmoid = 1, sqrtsoftplus = 2 };

struct Rule {
  int64_t experts, top_k;
  Scoring scoring;
  bool renormalize;
  int64_t groups, top_groups;  // groups 1: none
  bool top2;                   // a group counts by the sum of its best two scores, otherwise by the best
  float scale;
  const float* correction;  // [experts] or null: added for the choice only
};

// The best of the shown values, best first; the first of equal values wins. NaN counts as infinite.
struct Best {
  int64_t most, count = 0;
  float values[kMostChosen];
  int32_t ids[kMostChosen];

  explicit Best(int64_t most) : most(most) {}

  void show(float value, int64_t id) {
    if (std::isnan(value)) value = kInf;
    if (count == most && !(value > values[most - 1])) return;
    int64_t at = count < most ? count++ : most - 1;
    for (; at > 0 && value > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = value, ids[at] = int32_t(id);
  }
};

template <class F>
inline void over_lanes(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes) f(i, int(std::min<int64_t>(kLanes, n - i)));
}

inline float softplus_root(float x) { return std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x))); }

// Scores of all experts; `from` and `to` have `n` elements.
inline void score(const float* from, int64_t n, Scoring scoring, float* to) {
  if (scoring == Scoring::sqrtsoftplus) {
    for (int64_t i = 0; i < n; ++i) to[i] = softplus_root(from[i]);
    return;
  }
  if (scoring == Scoring::sigmoid) {
    over_lanes(
        n, [&](int64_t i, int lanes) { store_n(to + i, sigmoid_times(splat(1.0f), load_n(from + i, lanes)), lanes); });
    return;
  }
  float most = from[0];
  for (int64_t i = 1; i < n; ++i) most = std::max(most, from[i]);
  vf sums = splat(0.0f);
  over_lanes(n, [&](int64_t i, int lanes) {
    const vf e = exp2v((load_n(from + i, lanes) - splat(most)) * splat(kLog2E));
    store_n(to + i, e, lanes);
    sums = sums + load_n(to + i, lanes);
  });
  const vf inverse = splat(1.0f / reduce_add(sums));
  over_lanes(n, [&](int64_t i, int lanes) { store_n(to + i, load_n(to + i, lanes) * inverse, lanes); });
}

// Writes the groups with selectable experts to `open` [groups].
inline void open_groups(const Rule& rule, const float* choice, uint8_t* open) {
  const int64_t size = rule.experts / rule.groups;
  Best best(rule.top_groups);
  for (int64_t group = 0; group < rule.groups; ++group) {
    Best inside(rule.top2 ? std::min<int64_t>(2, size) : 1);
    for (int64_t i = 0; i < size; ++i) inside.show(choice[group * size + i], i);
    best.show(inside.count > 1 ? inside.values[0] + inside.values[1] : inside.values[0], group);
  }
  std::fill(open, open + rule.groups, uint8_t(0));
  for (int64_t i = 0; i < best.count; ++i) open[best.ids[i]] = 1;
}

// logits [experts] -> ids, weights [top_k]. fixed: given ids [top_k], or null. scratch: 2 * experts floats and `groups`
// bytes.
inline void route_token(const Rule& rule, const float* logits, const int64_t* fixed, int32_t* ids, float* weights,
                        float* scratch) {
  const int64_t n = rule.experts, k = rule.top_k;
  const bool by_logit = rule.scoring == Scoring::softmax && !rule.correction && !(rule.groups > 1 && rule.top2);
  const bool of_chosen = rule.scoring == Scoring::softmax && rule.renormalize;  // a softmax over the chosen alone
  float *scores = scratch, *corrected = scratch + n;
  if (!by_logit || !of_chosen) score(logits, n, rule.scoring, scores);
  if (fixed) {
    for (int64_t j = 0; j < k; ++j) ids[j] = int32_t(fixed[j]);
  } else {
    const float* choice = by_logit ? logits : scores;
    if (rule.correction) {
      for (int64_t i = 0; i < n; ++i) corrected[i] = scores[i] + rule.correction[i];
      choice = corrected;
    }
    uint8_t* open = reinterpret_cast<uint8_t*>(scratch + 2 * n);
    const int64_t groups = std::max<int64_t>(1, rule.groups), size = n / groups;
    if (groups > 1) open_groups(rule, choice, open);
    Best best(k);
    for (int64_t group = 0; group < groups; ++group) {
      if (groups > 1 && !open[group]) continue;
      for (int64_t i = group * size; i < (group + 1) * size; ++i) best.show(choice[i], i);
    }
    std::copy(best.ids, best.ids + k, ids);
  }
  float sum = 0.0f;
  if (of_chosen) {
    float most = logits[ids[0]];
    for (int64_t j = 1; j < k; ++j) most = std::max(most, logits[ids[j]]);
    for (int64_t j = 0; j < k; ++j) sum += weights[j] = std::exp(logits[ids[j]] - most);
  } else {
    for (int64_t j = 0; j < k; ++j) sum += weights[j] = scores[ids[j]];
    sum += 1e-20f;
  }
  for (int64_t j = 0; j < k; ++j) weights[j] = (rule.renormalize ? weights[j] / sum : weights[j]) * rule.scale;
}

}  // namespace
}  // namespace weft
