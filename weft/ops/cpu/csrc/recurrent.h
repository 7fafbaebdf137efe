// Parts of recurrent mixers (delta.cpp, mamba.cpp, mamba1.cpp): functions of a token, the causal convolution, and rows
// with their states.
//
//   panel  consecutive tokens of a row, computed together
//   task   a part of a row: a few heads. Tasks share nothing that a task writes
//
// A row of a decode step stores the state after each token in a separate copy, so its panels have one token. Other rows
// store only the last state, in copy 0.
#pragma once

#include "rows.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

namespace weft {
namespace {

// Elements of all states times tokens below which waking other threads costs more than the threads gain.
constexpr int64_t kAlone = 1 << 15;

// Scratch memory of this thread, valid until the next call. Retained: decode makes one call per layer. Aligned to cache
// lines.
inline float* scratch(int64_t floats) {
  static thread_local std::vector<float> memory;
  if (memory.size() < size_t(floats) + kLanes) memory.resize(size_t(floats) + kLanes);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

inline vf exponential(vf x) { return exp2v(x * splat(kLog2E)); }
inline vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exponential(splat(0.0f) - x)); }
inline vf silu(vf x) { return x / (splat(1.0f) + exponential(splat(0.0f) - x)); }

// log(1 + e^x), relative error below 1e-6: max(x, 0) + log(1 + y), y = e^-|x|, by 2 artanh(y / (2 + y)).
inline vf softplus(vf x) {
  const vf y = exponential(splat(0.0f) - vabs(x));
  const vf s = y / (splat(2.0f) + y), z = s * s;
  vf p = splat(1.0f / 15);
  p = fma(p, z, splat(1.0f / 13));
  p = fma(p, z, splat(1.0f / 11));
  p = fma(p, z, splat(1.0f / 9));
  p = fma(p, z, splat(1.0f / 7));
  p = fma(p, z, splat(1.0f / 5));
  p = fma(p, z, splat(1.0f / 3));
  p = fma(p, z, splat(1.0f));
  return fma(s + s, p, vmax(x, splat(0.0f)));
}

// Values widened from T return unchanged, numbers below 2^-126 included.
inline void unwiden(float value, bf16* to) { to->x = uint16_t(float_to_bits(value) >> 16); }
inline void unwiden(float value, float* to) { *to = value; }

// Neighbouring channels of a causal convolution, for one row.
template <class T>
struct Channels {
  const T* from;  // [tokens, channels], a token every `stride`
  int64_t stride;
  const float* taps;  // [K, channels], a tap every `taps_stride`; the tap of the oldest input first
  int64_t taps_stride;
  const float* bias;  // [channels], or null
  const T* past;      // [K - 1, channels], an input every `line`: the previous inputs; null: zeros
  T* next;            // the same: the K - 1 inputs before the token after the last. May be `past`
  int64_t line;
};

// One vector of channels from `c` on, `lanes` of it real. kWhole: all of them; a test for each token would cost a third
// of the time.
template <int K, bool kWhole, class T>
inline void convolve_lanes(const Channels<T>& from, int c, int lanes, int tokens, float* to, int64_t to_stride) {
  const auto get = [&](const auto* p) { return kWhole ? load(p + c) : load_n(p + c, lanes); };
  vf w[K], x[K];
  for (int j = 0; j < K; ++j) w[j] = get(from.taps + j * from.taps_stride);
  for (int j = 0; j < K - 1; ++j) x[j] = from.past ? get(from.past + j * from.line) : splat(0.0f);
  const vf bias = from.bias ? get(from.bias) : splat(0.0f);
  for (int t = 0; t < tokens; ++t) {
    x[K - 1] = get(from.from + t * from.stride);
    vf y = x[0] * w[0];
    for (int j = 1; j < K; ++j) y = fma(x[j], w[j], y);
    store(to + t * to_stride + c, silu(y + bias));
    for (int j = 0; j < K - 1; ++j) x[j] = x[j + 1];
  }
  for (int j = 0; j < K - 1; ++j) {
    float line[kLanes];
    store(line, x[j]);
    for (int i = 0; i < (kWhole ? kLanes : lanes); ++i) unwiden(line[i], from.next + j * from.line + c + i);
  }
}

// silu of the convolution of `dim` channels -> to, a token every `to_stride`. `dim` is rounded up to whole vectors; the
// channels that are added are 0.
template <int K, class T>
void convolve(const Channels<T>& from, int tokens, int dim, float* to, int64_t to_stride) {
  int c = 0;
  for (; c + kLanes <= dim; c += kLanes) convolve_lanes<K, true>(from, c, kLanes, tokens, to, to_stride);
  if (c < dim) convolve_lanes<K, false>(from, c, dim - c, tokens, to, to_stride);
}

// Rows of a segment, and the places of their states.
struct StateRows {
  const int32_t* offsets;  // [count + 1]: first token of each row
  const int64_t *starts, *slots, *live;
  int64_t count, copies;
  bool each;  // true for the rows of a decode step

  static StateRows of(const char* op, const Tensor& offsets, const Tensor& starts, const Tensor& slots,
                      const Tensor& live, const Tensor& state, bool each, int64_t tokens) {
    const int64_t count = offsets.size(0) - 1;
    for (const Tensor* column : {&starts, &slots, &live})
      WEFT_CHECK(column->dim() == 1 && column->size(0) == count && column->is_contiguous(), op, ": rows");
    StateRows made{offsets.const_data_ptr<int32_t>(),
                   starts.const_data_ptr<int64_t>(),
                   slots.const_data_ptr<int64_t>(),
                   live.const_data_ptr<int64_t>(),
                   count,
                   state.size(1),
                   each};
    made.check(op, tokens, state.size(0));
    return made;
  }

  // Calls f(first token, tokens, from, to) for each panel of a row. from, to: copy of the state, counted over all
  // slots; from -1: zeros.
  template <class F>
  void panels(int64_t row, int most, F f) const {
    const int32_t begin = offsets[row], tokens = offsets[row + 1] - begin;
    const int step = each ? 1 : most;
    for (int32_t t = 0; t < tokens; t += step) {
      const int64_t copy = t == 0 ? live[row] : each ? t - 1 : 0;
      const int64_t from = t == 0 && starts[row] == 0 ? -1 : slots[row] * copies + copy;
      f(int64_t(begin) + t, int(std::min(step, tokens - t)), from, slots[row] * copies + (each ? t : 0));
    }
  }

  // Runs task(row, part) of a worker for all rows and `parts` parts; `make` makes the worker of a thread. The tasks are
  // left behind if there is a crew: `make` owns its captures. alone: for one thread.
  template <class Make>
  void over_tasks(int64_t parts, bool alone, Make make) const {
    std::vector<int64_t> order(count);  // the longest first, so threads end together
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return offsets[a + 1] - offsets[a] > offsets[b + 1] - offsets[b];
    });
    const int64_t tasks = count * parts;
    if (Crew* crew = Crew::current()) {
      const int64_t loops = alone ? 1 : tasks;
      crew->later(loops, [=, order = std::move(order)](int64_t loop) {
        auto worker = make();
        for (int64_t i = loop; i < tasks; i += loops) worker.task(order[i / parts], int(i % parts));
      });
      return;
    }
    std::atomic<int64_t> next{0};
    const auto work = [&](int64_t, int64_t) {
      auto worker = make();
      for (int64_t i; (i = next++) < tasks;) worker.task(order[i / parts], int(i % parts));
    };
    spread(alone ? 1 : team(), 1, work);
  }

 private:
  void check(const char* op, int64_t tokens, int64_t all) const {
    WEFT_CHECK(offsets[0] == 0 && offsets[count] == tokens, op, ": q_offsets do not cover the tokens");
    for (int64_t r = 0; r < count; ++r) {
      const int64_t n = offsets[r + 1] - offsets[r];
      WEFT_CHECK(n >= 0 && (!each || n <= copies), op, ": row ", r, " has ", n, " tokens and ", copies,
                 " copies of its state");
      WEFT_CHECK(slots[r] >= 0 && slots[r] < all, op, ": row ", r, " is in slot ", slots[r], " of ", all);
      WEFT_CHECK(live[r] >= 0 && live[r] < copies, op, ": row ", r, " reads copy ", live[r], " of ", copies);
    }
  }
};

// A part [slots, copies, heads, lines, dim] of the states.
template <class T>
T* state_part(const char* op, const Tensor& part, const Tensor& state, int64_t heads, int64_t lines, int64_t dim) {
  WEFT_CHECK(part.dim() == 5 && part.is_contiguous() && part.size(0) == state.size(0) &&
                 part.size(1) == state.size(1) && part.size(2) == heads && part.size(3) == lines && part.size(4) == dim,
             op, ": state of shape ", part.sizes());
  return part.mutable_data_ptr<T>();
}

inline bool is_floats(const Tensor& x, Sizes sizes) {
  return x.dtype() == Dtype::f32 && x.is_contiguous() && x.sizes() == sizes;
}

// True for [rows, columns] whose rows may have strides.
inline bool is_rows(const Tensor& x, int64_t rows, int64_t columns, Dtype type) {
  return x.dim() == 2 && x.size(0) == rows && x.size(1) == columns && x.stride(1) == 1 && x.dtype() == type;
}

}  // namespace
}  // namespace weft
