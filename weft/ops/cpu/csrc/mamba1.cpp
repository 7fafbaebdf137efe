// Mamba 1 between its projections, two calls a segment: the convolution, and the recurrence with its gate. Every
// channel has a state [state] of its own. A head is an equal part of the channels.
//
//   x, steps, z, out   [T, heads * dim]; B, C: [T, state]
//   state              convolution inputs [.., heads, K - 1, dim]; S [.., heads, state, dim]
//
//   task   one head of one row
//   panel  up to kPanel consecutive tokens of a task
//   block  up to kBlock channels of a panel; a whole head for one token, so S is read in order
//            dt      = softplus(step + bias), u = dt x                             [tokens, channels]
//   lines  N lines of S for 16 channels, held in registers for a panel
//            S_n     = e^(-rate_n dt) S_n + u B_n      for each token
//            y      += S_n C_n                         in the order of n
//   out = (y + skip x) silu(z)
//
// Every element of S and y is one chain of operations over tokens and lines, in order: whatever the blocks, panels,
// chunks, threads and other rows. So the form is invariant. State and sums are float; activations are widened exactly,
// and rounded once at the end of each call.
//
// Source: Gu and Dao 2023, arXiv 2312.00752.

#include "operators.h"
#include "recurrent.h"

#include <optional>

namespace weft {
namespace {

constexpr int kPanel = 16;
constexpr int kBlock = 4 * kLanes;
constexpr int kLines = WEFT_AVX512 ? 4 : 2;  // lines of S in registers, beside their rates

int64_t whole(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// Data of one call of the convolution; pointers into its tensors.
template <class T>
struct ConvolutionCall {
  const T* x;
  T *out, *state;
  const float *taps, *bias;
  StateRows rows;
  int64_t stride, out_stride, heads, dim;
};

template <class T, int K>
class ConvolutionWorker {
 public:
  explicit ConvolutionWorker(const ConvolutionCall<T>& call) : c_(call), made_(scratch(kPanel * kBlock)) {}

  void task(int64_t row, int head) {
    c_.rows.panels(row, kPanel, [&](int64_t first, int tokens, int64_t from, int64_t to) {
      for (int64_t at = 0; at < c_.dim; at += kBlock)
        block(first, tokens, head, at, int(std::min<int64_t>(kBlock, c_.dim - at)), from, to);
    });
  }

 private:
  // Channels at .. at + size of a head. from, to: copy of the state, counted over all slots; from -1: zeros.
  void block(int64_t first, int tokens, int head, int64_t at, int size, int64_t from, int64_t to) {
    const int64_t channel = head * c_.dim + at, lines = (K - 1) * c_.dim;
    convolve<K, T>(
        {c_.x + first * c_.stride + channel, c_.stride, c_.taps + channel, c_.heads * c_.dim,
         c_.bias ? c_.bias + channel : nullptr, from < 0 ? nullptr : c_.state + (from * c_.heads + head) * lines + at,
         c_.state + (to * c_.heads + head) * lines + at, c_.dim},
        tokens, size, made_, kBlock);
    for (int t = 0; t < tokens; ++t) {
      T* out = c_.out + (first + t) * c_.out_stride + channel;
      in_steps(size, [&](int64_t i, int n) { put(out + i, load(made_ + t * kBlock + i), n); });
    }
  }

  const ConvolutionCall<T>& c_;
  float* made_;  // [kPanel, kBlock]
};

template <class T, int K>
void run_convolution(const ConvolutionCall<T>& c, int64_t tokens) {
  const bool alone = tokens * c.heads * c.dim * K <= kAlone;
  c.rows.over_tasks(c.heads, alone, [c] { return ConvolutionWorker<T, K>(c); });
}

// The tokens of a panel, for 16 channels of a head.
struct Panel {
  int tokens, lanes;    // lanes: real channels
  int64_t dim, size;    // channels of the head; elements of B and C
  int64_t width;        // from token to token of dt, u and y
  const float *b, *c;   // [tokens, size]
  const float *dt, *u;  // -log2(e) dt, and dt x
  float* y;             // S C
};

// N lines of S from line n on: from (null: zeros) to the lines after the last token, possibly in the same memory. Adds
// to y of each token.
template <int N>
void advance_lines(const Panel& p, int64_t n, const float* from, float* to, const float* rate) {
  vf s[N], rates[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    s[i] = from ? take(from + (n + i) * p.dim, p.lanes) : splat(0.0f);
    rates[i] = take(rate + (n + i) * p.dim, p.lanes);
  }
  const float *b = p.b + n, *c = p.c + n;
  for (int t = 0; t < p.tokens; ++t, b += p.size, c += p.size) {
    const vf dt = load(p.dt + t * p.width), u = load(p.u + t * p.width);
    vf y = n ? load(p.y + t * p.width) : splat(0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      s[i] = fma(s[i], exp2v(rates[i] * dt), u * splat(b[i]));
      y = fma(s[i], splat(c[i]), y);
    }
    store(p.y + t * p.width, y);
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) put(to + (n + i) * p.dim, s[i], p.lanes);
}

// Data of one call of the recurrence; pointers into its tensors.
template <class T>
struct ScanCall {
  const T *x, *steps, *b, *c, *z;
  int64_t x_stride, steps_stride, b_stride, c_stride, z_stride;
  T* out;
  float* state;
  const float *rate, *step_bias, *skip;
  StateRows rows;
  int64_t out_stride, heads, dim, size;  // size: of B and C
};

template <class T>
class ScanWorker {
 public:
  explicit ScanWorker(const ScanCall<T>& call) : c_(call) {
    const int64_t shared = kPanel * whole(c_.size), block = std::max<int64_t>(kPanel * kBlock, whole(c_.dim));
    b_ = scratch(2 * shared + 3 * block);
    c_line_ = b_ + shared;
    dt_ = c_line_ + shared;
    u_ = dt_ + block;
    y_ = u_ + block;
  }

  void task(int64_t row, int head) {
    c_.rows.panels(row, kPanel, [&](int64_t first, int tokens, int64_t from, int64_t to) {
      for (int t = 0; t < tokens; ++t) {
        widen_line(c_.b + (first + t) * c_.b_stride, b_ + t * c_.size);
        widen_line(c_.c + (first + t) * c_.c_stride, c_line_ + t * c_.size);
      }
      const int64_t step = tokens == 1 ? c_.dim : kBlock;
      for (int64_t at = 0; at < c_.dim; at += step)
        block(first, tokens, head, at, std::min(step, c_.dim - at), from, to);
    });
  }

 private:
  void widen_line(const T* from, float* to) {
    in_steps(c_.size, [&](int64_t i, int n) { put(to + i, take(from + i, n), n); });
  }

  // Channels at .. at + width of a head. from, to: copy of the state, counted over all slots; from -1: zeros.
  void block(int64_t first, int tokens, int head, int64_t at, int64_t width, int64_t from, int64_t to) {
    const int64_t channel = head * c_.dim + at, stride = whole(width), of_head = c_.size * c_.dim;
    const float* before = from < 0 ? nullptr : c_.state + (from * c_.heads + head) * of_head + at;
    float* after = c_.state + (to * c_.heads + head) * of_head + at;
    const float* rate = c_.rate + head * of_head + at;
    take_steps(first, tokens, channel, width, stride);
    lines<kLines>(0, tokens, width, stride, before, after, rate);
    for (int t = 0; t < tokens; ++t) {
      const T* x = c_.x + (first + t) * c_.x_stride + channel;
      const T* z = c_.z + (first + t) * c_.z_stride + channel;
      T* out = c_.out + (first + t) * c_.out_stride + channel;
      in_steps(width, [&](int64_t i, int n) {
        const vf y = fma(take(c_.skip + channel + i, n), take(x + i, n), load(y_ + t * stride + i));
        put(out + i, y * silu(take(z + i, n)), n);
      });
    }
  }

  // All lines of S from n on, N at a time.
  template <int N>
  void lines(int64_t n, int tokens, int64_t width, int64_t stride, const float* before, float* after,
             const float* rate) {
    for (; n + N <= c_.size; n += N)
      in_steps(width, [&](int64_t i, int lanes) {
        advance_lines<N>({tokens, lanes, c_.dim, c_.size, stride, b_, c_line_, dt_ + i, u_ + i, y_ + i}, n,
                         before ? before + i : nullptr, after + i, rate + i);
      });
    if constexpr (N > 1) lines<N / 2>(n, tokens, width, stride, before, after, rate);
  }

  void take_steps(int64_t first, int tokens, int64_t channel, int64_t width, int64_t stride) {
    for (int t = 0; t < tokens; ++t) {
      const T* x = c_.x + (first + t) * c_.x_stride + channel;
      const T* steps = c_.steps + (first + t) * c_.steps_stride + channel;
      in_steps(width, [&](int64_t i, int n) {
        const vf dt = softplus(take(steps + i, n) + take(c_.step_bias + channel + i, n));
        store(dt_ + t * stride + i, dt * splat(-kLog2E));
        store(u_ + t * stride + i, dt * take(x + i, n));
      });
    }
  }

  const ScanCall<T>& c_;
  float *b_, *c_line_;   // [kPanel, state]
  float *dt_, *u_, *y_;  // [tokens, channels of a block in whole vectors]
};

}  // namespace

// x, out: [T, heads * dim].
void mamba1_convolve(const Tensor& x, const Tensor& out, const Tensor& conv, const Tensor& taps,
                     const std::optional<Tensor>& bias, const Tensor& offsets, const Tensor& starts,
                     const Tensor& slots, const Tensor& live, bool each) {
  constexpr const char* kOp = "mamba1_convolve";
  WEFT_CHECK(x.dim() == 2 && conv.dim() == 5 && taps.dim() == 2, kOp, ": shapes");
  const int64_t tokens = x.size(0), heads = conv.size(2), lines = taps.size(0) - 1, dim = conv.size(4);
  const int64_t channels = heads * dim;
  WEFT_CHECK(channels > 0 && is_rows(x, tokens, channels, x.dtype()), kOp, ": x of shape ", x.sizes());
  WEFT_CHECK(is_rows(out, tokens, channels, x.dtype()), kOp, ": out of shape ", out.sizes(), " and ", out.dtype());
  WEFT_CHECK(1 <= lines && lines <= 3, kOp, ": a convolution of ", lines + 1, " taps");
  WEFT_CHECK(is_floats(taps, {lines + 1, channels}) && (!bias || is_floats(*bias, {channels})), kOp,
             ": weights are float32");
  if (!tokens) return;
  by_dtype(x, kOp, [&]<class T>(T) {
    const ConvolutionCall<T> c{x.const_data_ptr<T>(),
                               out.mutable_data_ptr<T>(),
                               state_part<T>(kOp, conv, conv, heads, lines, dim),
                               taps.const_data_ptr<float>(),
                               bias ? bias->const_data_ptr<float>() : nullptr,
                               StateRows::of(kOp, offsets, starts, slots, live, conv, each, tokens),
                               x.stride(0),
                               out.stride(0),
                               heads,
                               dim};
    switch (lines) {
      case 3:
        return run_convolution<T, 4>(c, tokens);
      case 2:
        return run_convolution<T, 3>(c, tokens);
      default:
        return run_convolution<T, 2>(c, tokens);
    }
  });
}

// x, steps, z, out: [T, heads * dim]; b, c: [T, state].
void mamba1_scan(const Tensor& x, const Tensor& steps, const Tensor& b, const Tensor& c, const Tensor& z,
                 const Tensor& out, const Tensor& state, const Tensor& rate, const Tensor& step_bias,
                 const Tensor& skip, const Tensor& offsets, const Tensor& starts, const Tensor& slots,
                 const Tensor& live, bool each) {
  constexpr const char* kOp = "mamba1_scan";
  WEFT_CHECK(x.dim() == 2 && state.dim() == 5, kOp, ": shapes");
  const int64_t tokens = x.size(0), heads = state.size(2), size = state.size(3), dim = state.size(4);
  const int64_t channels = heads * dim;
  WEFT_CHECK(channels > 0 && size > 0, kOp, ": state of shape ", state.sizes());
  for (const Tensor* one : {&x, &steps, &z, &out})
    WEFT_CHECK(is_rows(*one, tokens, channels, x.dtype()), kOp, ": channels of shape ", one->sizes(), " and ",
               one->dtype());
  for (const Tensor* one : {&b, &c})
    WEFT_CHECK(is_rows(*one, tokens, size, x.dtype()), kOp, ": B or C of shape ", one->sizes(), " and ", one->dtype());
  WEFT_CHECK(is_floats(state, state.sizes()) && is_floats(rate, {heads, size, dim}) &&
                 is_floats(step_bias, {channels}) && is_floats(skip, {channels}),
             kOp, ": state and weights are float32");
  if (!tokens) return;
  by_dtype(x, kOp, [&]<class T>(T) {
    ScanCall<T> call;
    call.x = x.const_data_ptr<T>(), call.x_stride = x.stride(0);
    call.steps = steps.const_data_ptr<T>(), call.steps_stride = steps.stride(0);
    call.b = b.const_data_ptr<T>(), call.b_stride = b.stride(0);
    call.c = c.const_data_ptr<T>(), call.c_stride = c.stride(0);
    call.z = z.const_data_ptr<T>(), call.z_stride = z.stride(0);
    call.out = out.mutable_data_ptr<T>(), call.out_stride = out.stride(0);
    call.state = state.mutable_data_ptr<float>();
    call.rate = rate.const_data_ptr<float>();
    call.step_bias = step_bias.const_data_ptr<float>();
    call.skip = skip.const_data_ptr<float>();
    call.rows = StateRows::of(kOp, offsets, starts, slots, live, state, each, tokens);
    call.heads = heads, call.dim = dim, call.size = size;
    const bool alone = tokens * channels * size <= kAlone;
    call.rows.over_tasks(heads, alone, [call] { return ScanWorker<T>(call); });
  });
}

}  // namespace weft
