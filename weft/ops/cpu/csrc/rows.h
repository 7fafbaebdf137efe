// Independent rows of elements: norms, and division of rows over threads.
//
// A row's sum of squares is 16 partial sums, one per lane, added by the fixed tree of `reduce_add`. Sizes need not be
// multiples of 16; missing lanes are 0.
#pragma once

#include "crew.h"
#include "vector.h"

#include <algorithm>

namespace weft {
namespace {

using namespace vec;

// Number of elements below which waking other threads costs more than it gains.
constexpr int64_t kGrain = 1 << 15;

template <class F>
void over_rows(int64_t rows, int64_t width, F f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
  if (rows <= grain) return f(0, rows);
  spread(rows, grain, f);
}

// The same, left behind if there is a crew: f owns its captures.
template <class F>
void over_rows_later(int64_t rows, int64_t width, F f) {
  spread_later(rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), f);
}

template <class F>
inline void in_steps(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, int(n - i));
}

template <class T>
inline vf take(const T* p, int n) {
  return n == kLanes ? load(p) : load_n(p, n);
}
template <class T>
inline void put(T* p, vf x, int n) {
  n == kLanes ? store(p, x) : store_n(p, x, n);
}

inline float inverse_rms(float squares, int64_t n, float eps) { return 1.0f / std::sqrt(squares / float(n) + eps); }

// Write x (+ delta) to stream, and the norm to normed. stream may be x.
template <class T, class W>
void norm_row(const T* x, const T* delta, const W* weight, float eps, int64_t n, T* stream, T* normed) {
  vf squares = splat(0.0f);
  in_steps(n, [&](int64_t i, int lanes) {
    vf y = take(x + i, lanes);
    if (delta) {
      put(stream + i, y + take(delta + i, lanes), lanes);
      y = take(stream + i, lanes);  // the rounded value
    }
    squares = fma(y, y, squares);
  });
  const vf scale = splat(inverse_rms(reduce_add(squares), n, eps));
  const T* from = delta ? stream : x;
  in_steps(n, [&](int64_t i, int lanes) {
    put(normed + i, take(from + i, lanes) * scale * take(weight + i, lanes), lanes);
  });
}

template <class F>
auto by_dtype(const Tensor& x, const char* op, F f) {
  if (x.dtype() == Dtype::bf16) return f(bf16());
  WEFT_CHECK(x.dtype() == Dtype::f32, op, ": bfloat16 or float32, not ", x.dtype());
  return f(float());
}

}  // namespace
}  // namespace weft
