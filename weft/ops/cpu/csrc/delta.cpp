// Gated delta net between its projections, one call a segment: convolution, gates, recurrence, gated norm.
//
//   qkv    [T, q heads | k heads | v heads]       z   [T, value heads * v_dim]
//   b      [T, value heads]                       a   [T, value heads], or [T, value heads * k_dim]
//
//   task   one key head of one row, with the value heads that read it; tasks share nothing that is written
//   panel  up to kPanel consecutive tokens of a task
//            q, k   = normalized(silu(convolution))                                        [tokens, k_dim]
//            v      = silu(convolution)                                                    [tokens, v_dim]
//            out    = o / rms(o) * weight * silu(z), or sigmoid(z)
//   strip  16 N columns of the state S [k_dim, v_dim], held in the first-level cache for a panel
//
//              one pass over a strip, row i of S at a time           S is read and written once a token
//                S_i   = decay S_i + k_i change          of the token before
//                a    += k_i S_i,   b += q_i S_i         of this token
//              change  = beta (v - decay a)
//              o       = decay b + (q k) change          = q (decay S + k change)
//
// With a decay for every key channel (Kimi Delta Attention), row i of S has the decay decay_i, and the sums are
// a += k_i decay_i S_i and b += q_i decay_i S_i, so that change = beta (v - a) and o = b + (q k) change.
//
// Every element of S, a, b and o is one chain of operations over tokens and rows of S, in order: whatever the
// panels, strips, chunks, threads and other rows. So the form is invariant. State and sums are float; activations
// are widened exactly and rounded once, at the end.
//
// Source: Yang et al. 2024, arXiv 2412.06464, equation 10; decays by channel: arXiv 2510.26692.

#include "operators.h"
#include "recurrent.h"

#include <cmath>
#include <vector>

namespace weft {
namespace {

constexpr int kPanel = 32;
constexpr int kMaxDim = 256;
constexpr int kStripFloats = 4096;  // of S in a strip: 16 KiB
constexpr float kLengthEps = 1e-6f;

alignas(64) const float kZeros[4 * kLanes] = {};

inline float dot(const float* a, const float* b, int n) {
  vf sum = splat(0.0f);
  for (int i = 0; i < n; i += kLanes) sum = fma(load(a + i), load(b + i), sum);
  return reduce_add(sum);
}

void normalize(float* x, int dim, float scale) {
  const vf by = splat(scale / std::sqrt(dot(x, x, dim) + kLengthEps));
  for (int i = 0; i < dim; i += kLanes) store(x + i, load(x + i) * by);
}

// The tokens of a panel, for one value head.
struct Panel {
  int tokens, k_dim, v_dim;
  const float *q, *k;          // [tokens, k_dim]
  const float* qk;             // [tokens]
  const float* v;              // [tokens, v_dim]
  const float* decay;          // [tokens], or by channel [tokens, k_dim]
  const float* beta;           // [tokens]
  const float *q_sum, *k_sum;  // [tokens, k_dim]: factors of the rows of S in the sums b and a
  float* o;                    // [tokens, v_dim]
};

template <int N>
inline void advance(vf* line, const vf* change, float k, vf decay) {
  const vf by = splat(k);
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) line[n] = fma(by, change[n], line[n] * decay);
}

template <int N>
inline void load_line(const float* from, vf* line) {
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) line[n] = load(from + n * kLanes);
}

template <int N>
inline void store_line(float* to, const vf* line) {
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) store(to + n * kLanes, line[n]);
}

// Rows of a strip: 16 N columns of S, which may lie in a wider matrix.
struct Rows {
  const float* at;
  int64_t stride;
};

// a = k S, b = q S over a strip. With kStep, S first takes the step of the previous token, and is written to `to`
// [k_dim, 16 N]. decay: of the previous token; one number, or one for each row.
template <int N, bool kStep, bool kChannels>
inline void pass(Rows from, float* to, int k_dim, const float* before, const vf* change, const float* decay,
                 const float* k, const float* q, vf* a, vf* b) {
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) a[n] = b[n] = splat(0.0f);
  const vf by = splat(kStep && !kChannels ? *decay : 0.0f);
  for (int i = 0; i < k_dim; ++i) {
    vf line[N];
    load_line<N>(from.at + i * from.stride, line);
    if (kStep) {
      advance<N>(line, change, before[i], kChannels ? splat(decay[i]) : by);
      store_line<N>(to + i * N * kLanes, line);
    }
    const vf ki = splat(k[i]), qi = splat(q[i]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      a[n] = fma(ki, line[n], a[n]);
      b[n] = fma(qi, line[n], b[n]);
    }
  }
}

// Columns column .. column + 16 N of a panel: from S (null: zeros) to the S after the last token, possibly in the same
// memory. strip: scratch.
template <int N, bool kChannels>
void recur(const Panel& p, int column, const float* from, float* to, float* strip) {
  Rows rows = from ? Rows{from + column, p.v_dim} : Rows{kZeros, 0};
  const int decays = kChannels ? p.k_dim : 1;
  vf change[N] = {};
  for (int t = 0; t < p.tokens; ++t) {
    const float *k = p.k_sum + t * p.k_dim, *q = p.q_sum + t * p.k_dim;
    vf a[N], b[N];
    if (t) {
      pass<N, true, kChannels>(rows, strip, p.k_dim, p.k + (t - 1) * p.k_dim, change, p.decay + (t - 1) * decays, k, q,
                               a, b);
      rows = {strip, N * kLanes};
    } else {
      pass<N, false, kChannels>(rows, nullptr, p.k_dim, nullptr, change, nullptr, k, q, a, b);
    }
    const vf decay = splat(p.decay[t * decays]), beta = splat(p.beta[t]), qk = splat(p.qk[t]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const int64_t at = int64_t(t) * p.v_dim + column + n * kLanes;
      if constexpr (kChannels) {
        change[n] = beta * (load(p.v + at) - a[n]);
        store(p.o + at, fma(qk, change[n], b[n]));
      } else {
        change[n] = beta * (load(p.v + at) - decay * a[n]);
        store(p.o + at, fma(qk, change[n], decay * b[n]));
      }
    }
  }
  const float* decay = p.decay + (p.tokens - 1) * decays;
  const float* k = p.k + (p.tokens - 1) * p.k_dim;
  for (int i = 0; i < p.k_dim; ++i) {
    vf line[N];
    load_line<N>(rows.at + i * rows.stride, line);
    advance<N>(line, change, k[i], splat(decay[kChannels ? i : 0]));
    store_line<N>(to + i * p.v_dim + column, line);
  }
}

template <bool kChannels>
void recur_all(const Panel& p, const float* from, float* to, float* strip) {
  int most = WEFT_AVX2 || WEFT_NEON ? 2 : 4;  // a, b and change of a strip fit into registers
  while (most > 1 && most * kLanes * p.k_dim > kStripFloats) most /= 2;
  for (int column = 0; column < p.v_dim;) {
    int lines = most;
    while (column + lines * kLanes > p.v_dim) lines /= 2;
    switch (lines) {
      case 4:
        recur<4, kChannels>(p, column, from, to, strip);
        break;
      case 2:
        recur<2, kChannels>(p, column, from, to, strip);
        break;
      default:
        recur<1, kChannels>(p, column, from, to, strip);
    }
    column += lines * kLanes;
  }
}

// Data of one call; pointers into its tensors.
template <class T>
struct Call {
  const T *qkv, *z, *b, *a;
  T *out, *conv_q, *conv_k, *conv_v;
  float* state;
  const float *taps, *rate, *bias, *norm;
  float eps, reach, floor;  // beta = reach sigmoid(b); floor < 0: lower bound of the log decays
  StateRows rows;
  int64_t qkv_stride, z_stride, b_stride, a_stride, out_stride;
  int k_heads, v_heads, k_dim, v_dim;
  bool squashed, by_channel;  // squashed: the output gate is sigmoid(z), not silu(z)

  int group() const { return v_heads / k_heads; }
  int64_t key() const { return int64_t(k_heads) * k_dim; }
  int64_t value() const { return int64_t(v_heads) * v_dim; }
  int64_t channels() const { return 2 * key() + value(); }
};

template <class T, int K>
class Worker {
 public:
  explicit Worker(const Call<T>& call) : c_(call) {
    const int64_t of_keys = call.by_channel ? 5 : 2;
    strip_ = scratch(kStripFloats + (of_keys * call.k_dim + 2 * call.v_dim) * kPanel);
    q_ = strip_ + kStripFloats;
    k_ = q_ + call.k_dim * kPanel;
    v_ = k_ + call.k_dim * kPanel;
    o_ = v_ + call.v_dim * kPanel;
    decays_ = o_ + call.v_dim * kPanel;
    q_sum_ = decays_ + call.k_dim * kPanel;
    k_sum_ = q_sum_ + call.k_dim * kPanel;
  }

  void task(int64_t row, int head) {
    c_.rows.panels(row, kPanel, [&](int64_t first, int tokens, int64_t from, int64_t to) {
      panel(first, tokens, head, from, to);
    });
  }

 private:
  // from, to: copy of the state, counted over all slots; from -1: zeros.
  void panel(int64_t first, int tokens, int head, int64_t from, int64_t to) {
    const T* x = c_.qkv + first * c_.qkv_stride;
    convolved(x, head, c_.k_heads, c_.k_dim, 0, c_.conv_q, from, to, tokens, q_);
    convolved(x, head, c_.k_heads, c_.k_dim, c_.key(), c_.conv_k, from, to, tokens, k_);
    const float scale = 1.0f / std::sqrt(float(c_.k_dim));
    for (int t = 0; t < tokens; ++t) {
      normalize(q_ + t * c_.k_dim, c_.k_dim, scale);
      normalize(k_ + t * c_.k_dim, c_.k_dim, 1.0f);
      qk_[t] = dot(q_ + t * c_.k_dim, k_ + t * c_.k_dim, c_.k_dim);
    }
    for (int v_head = head * c_.group(); v_head < (head + 1) * c_.group(); ++v_head) {
      convolved(x, v_head, c_.v_heads, c_.v_dim, 2 * c_.key(), c_.conv_v, from, to, tokens, v_);
      gate(first, tokens, v_head);
      const int64_t size = int64_t(c_.k_dim) * c_.v_dim;
      const float* before = from < 0 ? nullptr : c_.state + (from * c_.v_heads + v_head) * size;
      float* after = c_.state + (to * c_.v_heads + v_head) * size;
      if (c_.by_channel) {
        gate_channels(first, tokens, v_head);
        recur_all<true>({tokens, c_.k_dim, c_.v_dim, q_, k_, qk_, v_, decays_, beta_, q_sum_, k_sum_, o_}, before,
                        after, strip_);
      } else {
        recur_all<false>({tokens, c_.k_dim, c_.v_dim, q_, k_, qk_, v_, decay_, beta_, q_, k_, o_}, before, after,
                         strip_);
      }
      finish(first, tokens, v_head);
    }
  }

  // One head's part of the convolution. Channels begin at `base`; the state is [copies.., heads, K - 1, dim].
  void convolved(const T* x, int head, int heads, int dim, int64_t base, T* state, int64_t from, int64_t to, int tokens,
                 float* made) {
    const int64_t channel = base + int64_t(head) * dim, size = int64_t(K - 1) * dim;
    const T* past = from < 0 ? nullptr : state + (from * heads + head) * size;
    convolve<K, T>({x + channel, c_.qkv_stride, c_.taps + channel, c_.channels(), nullptr, past,
                    state + (to * heads + head) * size, dim},
                   tokens, dim, made, dim);
  }

  // beta, and the decays of one value head unless every key channel has a decay.
  void gate(int64_t first, int tokens, int v_head) {
    for (int t = 0; t < tokens; ++t) {
      beta_[t] = widen(c_.b[(first + t) * c_.b_stride + v_head]);
      if (!c_.by_channel) decay_[t] = widen(c_.a[(first + t) * c_.a_stride + v_head]);
    }
    const vf reach = splat(c_.reach), bias = splat(c_.bias[v_head]);
    for (int t = 0; t < tokens; t += kLanes) {
      store(beta_ + t, reach * sigmoid(load(beta_ + t)));
      store(decay_ + t, decay_of(c_.rate[v_head], load(decay_ + t) + bias));
    }
  }

  // e^(-rate softplus(x)), or e^(floor sigmoid(rate x)) with a lower bound.
  vf decay_of(float rate, vf x) const {
    if (c_.floor < 0) return exponential(splat(c_.floor) * sigmoid(splat(rate) * x));
    return exponential(splat(-rate) * softplus(x));
  }

  // The decays of the key channels, and the factors of the sums.
  void gate_channels(int64_t first, int tokens, int v_head) {
    const int dim = c_.k_dim;
    const float rate = c_.rate[v_head];
    const float* bias = c_.bias + v_head * dim;
    for (int t = 0; t < tokens; ++t) {
      const T* a = c_.a + (first + t) * c_.a_stride + int64_t(v_head) * dim;
      for (int i = t * dim, j = 0; j < dim; i += kLanes, j += kLanes) {
        const vf decay = decay_of(rate, load(a + j) + load(bias + j));
        store(decays_ + i, decay);
        store(q_sum_ + i, load(q_ + i) * decay);
        store(k_sum_ + i, load(k_ + i) * decay);
      }
    }
  }

  void finish(int64_t first, int tokens, int v_head) {
    const int dim = c_.v_dim;
    const int64_t column = int64_t(v_head) * dim;
    for (int t = 0; t < tokens; ++t) {
      const float* o = o_ + t * dim;
      const T* z = c_.z + (first + t) * c_.z_stride + column;
      T* to = c_.out + (first + t) * c_.out_stride + column;
      const vf by = splat(1.0f / std::sqrt(dot(o, o, dim) / float(dim) + c_.eps));
      for (int i = 0; i < dim; i += kLanes) {
        const vf x = load(z + i);
        store(to + i, load(o + i) * by * load(c_.norm + i) * (c_.squashed ? sigmoid(x) : silu(x)));
      }
    }
  }

  const Call<T>& c_;
  float *strip_, *q_, *k_, *v_, *o_;
  float *decays_, *q_sum_, *k_sum_;  // [kPanel, k_dim], only with a decay for every key channel
  alignas(64) float qk_[kPanel], decay_[kPanel] = {}, beta_[kPanel] = {};
};

template <class T, int K>
void run(const Call<T>& c, int64_t tokens) {
  const bool alone = tokens * c.value() * c.k_dim <= kAlone;
  c.rows.over_tasks(c.k_heads, alone, [c] { return Worker<T, K>(c); });
}

}  // namespace

void delta_net(const Tensor& qkv, const Tensor& z, const Tensor& b, const Tensor& a, const Tensor& out,
               const Tensor& conv_q, const Tensor& conv_k, const Tensor& conv_v, const Tensor& state,
               const Tensor& taps, const Tensor& rate, const Tensor& bias, const Tensor& norm, double eps,
               double reach, double floor, bool squashed, const Tensor& offsets, const Tensor& starts,
               const Tensor& slots, const Tensor& live, bool each) {
  WEFT_CHECK(state.dim() == 5 && conv_q.dim() == 5 && taps.dim() == 2, "delta_net: shapes");
  const int64_t tokens = qkv.size(0), lines = taps.size(0) - 1;
  const int64_t k_heads = conv_q.size(2), v_heads = state.size(2), k_dim = state.size(3), v_dim = state.size(4);
  const int64_t key = k_heads * k_dim, value = v_heads * v_dim;
  const bool by_channel = bias.dim() == 2;
  WEFT_CHECK(k_heads > 0 && v_heads % k_heads == 0, "delta_net: ", v_heads, " value heads, ", k_heads, " key heads");
  for (const int64_t dim : {k_dim, v_dim})
    WEFT_CHECK(dim > 0 && dim % kLanes == 0 && dim <= kMaxDim, "delta_net: heads of ", dim);
  WEFT_CHECK(1 <= lines && lines <= 3, "delta_net: a convolution of ", lines + 1, " taps");
  const auto has_rows = [&](const Tensor& x, int64_t columns) {
    return is_rows(x, tokens, columns, qkv.dtype());
  };
  WEFT_CHECK(has_rows(qkv, 2 * key + value), "delta_net: qkv of shape ", qkv.sizes());
  WEFT_CHECK(has_rows(z, value), "delta_net: z of shape ", z.sizes());
  WEFT_CHECK(has_rows(b, v_heads), "delta_net: b of shape ", b.sizes());
  WEFT_CHECK(has_rows(a, by_channel ? v_heads * k_dim : v_heads), "delta_net: a of shape ", a.sizes());
  WEFT_CHECK(has_rows(out, value), "delta_net: out of shape ", out.sizes());
  WEFT_CHECK(is_floats(state, state.sizes()) && is_floats(taps, {lines + 1, 2 * key + value}) &&
                 is_floats(rate, {v_heads}) && is_floats(norm, {v_dim}) &&
                 (by_channel ? is_floats(bias, {v_heads, k_dim}) : is_floats(bias, {v_heads})),
             "delta_net: state and weights are float32");
  if (!tokens) return;
  const auto go = [&]<class T>(T) {
    Call<T> c;
    c.qkv = qkv.const_data_ptr<T>();
    c.z = z.const_data_ptr<T>();
    c.b = b.const_data_ptr<T>();
    c.a = a.const_data_ptr<T>();
    c.out = out.mutable_data_ptr<T>();
    c.conv_q = state_part<T>("delta_net", conv_q, state, k_heads, lines, k_dim);
    c.conv_k = state_part<T>("delta_net", conv_k, state, k_heads, lines, k_dim);
    c.conv_v = state_part<T>("delta_net", conv_v, state, v_heads, lines, v_dim);
    c.state = state.mutable_data_ptr<float>();
    c.taps = taps.const_data_ptr<float>();
    c.rate = rate.const_data_ptr<float>();
    c.bias = bias.const_data_ptr<float>();
    c.norm = norm.const_data_ptr<float>();
    c.eps = float(eps);
    c.reach = float(reach);
    c.floor = float(floor);
    c.qkv_stride = qkv.stride(0);
    c.z_stride = z.stride(0);
    c.b_stride = b.stride(0);
    c.a_stride = a.stride(0);
    c.out_stride = out.stride(0);
    c.k_heads = int(k_heads);
    c.v_heads = int(v_heads);
    c.k_dim = int(k_dim);
    c.v_dim = int(v_dim);
    c.squashed = squashed;
    c.by_channel = by_channel;
    c.rows = StateRows::of("delta_net", offsets, starts, slots, live, state, each, tokens);
    switch (lines) {
      case 3:
        return run<T, 4>(c, tokens);
      case 2:
        return run<T, 3>(c, tokens);
      default:
        return run<T, 2>(c, tokens);
    }
  };
  if (qkv.dtype() == Dtype::f32) return go(float());
  WEFT_CHECK(qkv.dtype() == Dtype::bf16, "delta_net: bfloat16 or float32, not ", qkv.dtype());
  go(bf16());
}

// x * sigmoid(gate), in x's dtype. Rows may have strides, elements of a row may not.
Tensor sigmoid_gate(const Tensor& x, const Tensor& gate) {
  WEFT_CHECK(x.dim() == 2 && gate.dim() == 2 && x.size(0) == gate.size(0) && x.dtype() == gate.dtype(),
             "sigmoid_gate: shapes");
  WEFT_CHECK(gate.size(1) == x.size(1) && x.stride(1) == 1 && gate.stride(1) == 1, "sigmoid_gate: shapes");
  Tensor made = empty_tensor(x.sizes(), x.dtype());
  const int64_t n = x.size(1);
  const auto go = [&]<class T>(T) {
    const T *from = x.const_data_ptr<T>(), *by = gate.const_data_ptr<T>();
    T* to = made.mutable_data_ptr<T>();
    const int64_t stride = x.stride(0), by_stride = gate.stride(0);
    over_rows_later(x.size(0), n, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        for (int64_t i = 0; i < n; i += kLanes) {
          const int lanes = int(std::min<int64_t>(kLanes, n - i));
          const vf y = load_n(from + r * stride + i, lanes);
          store_n(to + r * n + i, y * sigmoid(load_n(by + r * by_stride + i, lanes)), lanes);
        }
    });
  };
  if (x.dtype() == Dtype::f32)
    go(float());
  else if (x.dtype() == Dtype::bf16)
    go(bf16());
  else
    WEFT_CHECK(false, "sigmoid_gate: bfloat16 or float32, not ", x.dtype());
  return made;
}

}  // namespace weft
