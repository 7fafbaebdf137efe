// Operations between the matrix products of a layer, each as one pass without intermediate tensors.
//
//   add_rms_norm     x (+ delta, rounded) -> stream; stream / rms * weight -> normed
//   qkv_rope_cache   [q heads | k heads | v heads] of a token
//                      q: norm, rotate -> out[token]
//                      k: norm, rotate -> cache[block, 0, head, offset]
//                      v:                cache[block, 1, head, offset]
//                    with scales the cache is in 8 bits (fp8.h)
//   gated            activation(gate) * up
//
// Every row (a token, or one head of a token) is computed alone, in one order: a sum of squares is 16 partial sums, one
// per lane, added by the fixed tree of `reduce_add`. Sizes need not be multiples of 16; missing lanes are 0.

#include "fp8.h"
#include "gemm_tile.h"
#include "operators.h"
#include "rows.h"

#include <algorithm>
#include <optional>
#include <tuple>

namespace weft {
namespace {

using namespace vec;

// Calls f(T(), W()): types of x and of norm weights (x's type or float).
template <class F>
auto by_dtypes(const Tensor& x, bool wide, const char* op, F f) {
  return by_dtype(x, op, [&]<class T>(T) { return wide ? f(T(), float()) : f(T(), T()); });
}

bool is_norm_weight(const Tensor& weight, const Tensor& x, int64_t n) {
  return weight.dim() == 1 && weight.size(0) == n && weight.is_contiguous() &&
         (weight.dtype() == x.dtype() || weight.dtype() == Dtype::f32);
}

void check_norm(const Tensor& x, const Tensor& weight, const char* op) {
  WEFT_CHECK(x.dim() >= 1 && is_norm_weight(weight, x, x.size(-1)), op, ": weight");
}

}  // namespace

Tensor rms_norm(const Tensor& given, const Tensor& weight, double eps) {
  check_norm(given, weight, "rms_norm");
  const Tensor x = in_order(given);
  Tensor normed = empty_tensor(x.sizes(), x.dtype());
  const int64_t n = weight.size(0), rows = n ? x.numel() / n : 0;
  by_dtypes(x, weight.dtype() == Dtype::f32, "rms_norm", [&]<class T, class W>(T, W) {
    const T* from = x.const_data_ptr<T>();
    const W* w = weight.const_data_ptr<W>();
    T* to = normed.mutable_data_ptr<T>();
    over_rows_later(rows, n, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        norm_row<T, W>(from + r * n, nullptr, w, float(eps), n, nullptr, to + r * n);
    });
  });
  return normed;
}

// Overwrites x with the stream.
Tensor add_rms_norm_(const Tensor& x, const Tensor& given, const Tensor& weight, double eps) {
  check_norm(x, weight, "add_rms_norm");
  WEFT_CHECK(x.is_contiguous() && given.sizes() == x.sizes() && given.dtype() == x.dtype(), "add_rms_norm: delta");
  const Tensor delta = in_order(given);
  Tensor normed = empty_tensor(x.sizes(), x.dtype());
  const int64_t n = weight.size(0), rows = n ? x.numel() / n : 0;
  by_dtypes(x, weight.dtype() == Dtype::f32, "add_rms_norm", [&]<class T, class W>(T, W) {
    const T* add = delta.const_data_ptr<T>();
    const W* w = weight.const_data_ptr<W>();
    T *stream = x.mutable_data_ptr<T>(), *to = normed.mutable_data_ptr<T>();
    over_rows_later(rows, n, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        norm_row<T, W>(stream + r * n, add + r * n, w, float(eps), n, stream + r * n, to + r * n);
    });
  });
  return normed;
}

namespace {

// Process one head: from -> to, normalized if there is a weight, the first 2 * half dims rotated. `line`: dim floats.
template <class T, class W>
void rope_head(const T* from, const W* weight, float eps, const float* cos, const float* sin, int64_t dim, int64_t half,
               T* line, T* to) {
  if (weight) {
    norm_row<T, W>(from, nullptr, weight, eps, dim, nullptr, line);
    from = line;
  }
  in_steps(half, [&](int64_t i, int n) {
    const vf a = take(from + i, n), b = take(from + half + i, n), c = take(cos + i, n), s = take(sin + i, n);
    put(to + i, a * c - b * s, n);
    put(to + half + i, b * c + a * s, n);
  });
  if (2 * half < dim) std::memcpy(to + 2 * half, from + 2 * half, size_t(dim - 2 * half) * sizeof(T));
}

}  // namespace

Tensor qkv_rope_cache(const Tensor& qkv, int64_t heads, int64_t kv_heads, const std::optional<Tensor>& q_weight,
                      const std::optional<Tensor>& k_weight, double eps, const Tensor& cos, const Tensor& sin,
                      const Tensor& cache, const Tensor& writes, const std::optional<Tensor>& scales) {
  constexpr int64_t kMost = 512;
  WEFT_CHECK(cache.dim() == 5 && cache.size(1) == 2 && cache.size(2) == kv_heads && cache.is_contiguous(),
             "qkv_rope_cache: cache");
  const int64_t tokens = qkv.size(0), dim = cache.size(4), block = cache.size(3), width = (heads + 2 * kv_heads) * dim;
  WEFT_CHECK(qkv.dim() == 2 && qkv.size(1) == width && qkv.stride(1) == 1 && dim <= kMost, "qkv_rope_cache: qkv");
  WEFT_CHECK(cos.dim() == 2 && cos.size(0) == tokens && cos.sizes() == sin.sizes() && 2 * cos.size(1) <= dim &&
                 cos.is_contiguous() && sin.is_contiguous() && cos.dtype() == Dtype::f32 && sin.dtype() == Dtype::f32,
             "qkv_rope_cache: angles");
  WEFT_CHECK(writes.dim() == 1 && writes.size(0) == tokens && writes.is_contiguous(), "qkv_rope_cache: writes");
  const auto is_float = [](const std::optional<Tensor>& weight) {
    return weight.has_value() && weight->dtype() == Dtype::f32;
  };
  const bool wide = is_float(q_weight) || is_float(k_weight);
  for (const auto* weight : {&q_weight, &k_weight})
    WEFT_CHECK(!weight->has_value() || (is_norm_weight(**weight, qkv, dim) && wide == is_float(*weight)),
               "qkv_rope_cache: norm weight");
  WEFT_CHECK(cache.dtype() == (scales ? Dtype::f8 : qkv.dtype()), "qkv_rope_cache: the cache has another dtype");
  WEFT_CHECK(!scales || (dim % kLanes == 0 && scales->dtype() == Dtype::f32 && scales->is_contiguous() &&
                         scales->sizes() == cache.sizes().leading(4)),
             "qkv_rope_cache: scales");
  const int64_t half = cos.size(1), places = cache.size(0) * block;
  const int64_t* place = writes.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t)
    WEFT_CHECK(place[t] >= 0 && place[t] < places, "qkv_rope_cache: token ", t, " goes to ", place[t], " of ", places);
  Tensor q = empty_tensor({tokens, heads, dim}, qkv.dtype());
  by_dtypes(qkv, wide, "qkv_rope_cache", [&]<class T, class W>(T, W) {
    const T* from = qkv.const_data_ptr<T>();
    const W* qw = q_weight ? q_weight->const_data_ptr<W>() : nullptr;
    const W* kw = k_weight ? k_weight->const_data_ptr<W>() : nullptr;
    const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
    T *to = q.mutable_data_ptr<T>(), *kv = scales ? nullptr : cache.mutable_data_ptr<T>();
    uint8_t* codes = scales ? static_cast<uint8_t*>(cache.mutable_data_ptr()) : nullptr;
    float* line_scales = scales ? scales->mutable_data_ptr<float>() : nullptr;
    const int64_t stride = qkv.stride(0), plane = block * dim;
    over_rows_later(tokens, width, [=](int64_t begin, int64_t end) {
      T line[kMost], key[kMost];
      for (int64_t t = begin; t < end; ++t) {
        const T* row = from + t * stride;
        const float *ct = c + t * half, *st = s + t * half;
        for (int64_t h = 0; h < heads; ++h)
          rope_head<T, W>(row + h * dim, qw, float(eps), ct, st, dim, half, line, to + (t * heads + h) * dim);
        const int64_t first = place[t] / block * 2 * kv_heads * block + place[t] % block;  // in lines
        for (int64_t h = 0; codes && h < kv_heads; ++h) {
          const int64_t k = first + h * block, v = k + kv_heads * block;
          rope_head<T, W>(row + (heads + h) * dim, kw, float(eps), ct, st, dim, half, line, key);
          line_scales[k] = quantize_line(key, dim, codes + k * dim);
          line_scales[v] = quantize_line(row + (heads + kv_heads + h) * dim, dim, codes + v * dim);
        }
        if (codes) continue;
        T* k = kv + first * dim;
        for (int64_t h = 0; h < kv_heads; ++h) {
          rope_head<T, W>(row + (heads + h) * dim, kw, float(eps), ct, st, dim, half, line, k + h * plane);
          std::memcpy(k + (kv_heads + h) * plane, row + (heads + kv_heads + h) * dim, size_t(dim) * sizeof(T));
        }
      }
    });
  });
  return q;
}

// activation(gate) * up, the activation rounded to x's dtype before the product. code: see gemm_tile.h.
Tensor gated(const Tensor& given, int64_t code) {
  WEFT_CHECK(code >= 1 && code <= 4, "gated: activation ", code);
  WEFT_CHECK(given.dim() >= 1 && given.size(-1) % 2 == 0, "gated: shape");
  const Tensor x = in_order(given);
  auto sizes = x.sizes().vec();
  sizes.back() /= 2;
  Tensor made = empty_tensor(sizes, x.dtype());
  const int64_t n = sizes.back(), rows = n ? made.numel() / n : 0;
  by_dtype(x, "gated", [&]<class T>(T) {
    const T* from = x.const_data_ptr<T>();
    T* to = made.mutable_data_ptr<T>();
    over_rows_later(rows, 4 * n, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        in_steps(n, [&](int64_t i, int lanes) {
          const vf gate = take(from + 2 * r * n + i, lanes), up = take(from + (2 * r + 1) * n + i, lanes);
          T rounded[kLanes];
          store(rounded, activate(gate, Activation(code)));
          put(to + r * n + i, load(rounded) * up, lanes);
        });
    });
  });
  return made;
}

}  // namespace weft
