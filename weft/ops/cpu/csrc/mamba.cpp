// Mamba2 between its projections, one call a segment: convolution, time steps, recurrence, gate and norm.
//
//   zxbcdt   [T, z heads | x heads | B groups | C groups | time steps]
//   state    x inputs [.., heads, K - 1, dim]; B and C inputs [.., places, K - 1, state]; S [.., heads, dim, state]
//
//   task   one place of one row: neighbouring heads of a group, with B and C. All places of a group have the same B and
//          C, and each place stores the inputs of B and C. So tasks share nothing that a task writes
//   panel  up to kPanel consecutive tokens of a task
//            x, B, C = silu(convolution)                                           [tokens, dim or state]
//            dt      = softplus(step + bias), within bounds
//   block  16 N columns of row d of S [dim, state], held in registers for a panel
//            S_d     = e^(-rate dt) S_d + (dt x_d) B         for each token
//            sum    += S_d C                                 one sum for each lane
//   y_d    = sum over the lanes + skip x_d
//
// Gate and norm follow behind all tasks, because a norm may read the heads of several places. Until then y is float.
//
// Every element of S and y is one chain of operations over tokens and columns, in order, and the lanes are added by one
// tree: whatever the panels, chunks, threads and other rows. So the form is invariant. State and sums are float;
// activations are widened exactly and rounded once, at the end.
//
// Source: Dao and Gu 2024, arXiv 2405.21060.

#include "operators.h"
#include "recurrent.h"

#include <optional>

namespace weft {
namespace {

constexpr int kPanel = kLanes;  // the sums of a row of S over a panel are one vector
constexpr int kBlockLines = WEFT_AVX512 ? 8 : 4;
constexpr int kBlock = kBlockLines * kLanes;
constexpr int64_t kMaxSize = 1024;

enum class Finish : int64_t { later, none, gated, normed };  // numbers of mamba_cpu.py

// The tokens of a panel, for one head.
struct Panel {
  int tokens, dim, state, width;
  const float* b;      // [blocks, kPanel, kBlock]
  const float* c;      // the same
  const float* x;      // [tokens, width]; width: dim in whole vectors
  const float* u;      // the same: dt x
  const float* decay;  // [tokens]
};

// Columns column .. column + 16 N of one row of S: from (null: zeros) to the row after the last token, possibly in the
// same memory. Adds to the sums of each token. last: columns of the last vector; u: a number every `width`.
template <int N>
void advance_block(const Panel& p, int column, int last, const float* from, float* to, const float* u,
                   float (*sums)[kLanes]) {
  const int64_t at = int64_t(column / kBlock) * kPanel * kBlock + column % kBlock;
  const float *b = p.b + at, *c = p.c + at;
  vf s[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
    s[n] = from ? take(from + column + n * kLanes, n + 1 < N ? kLanes : last) : splat(0.0f);
  for (int t = 0; t < p.tokens; ++t, b += kBlock, c += kBlock, u += p.width) {
    const vf by = splat(*u), decay = splat(p.decay[t]);
    vf sum = column ? load(sums[t]) : splat(0.0f);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      s[n] = fma(by, load(b + n * kLanes), s[n] * decay);
      sum = fma(s[n], load(c + n * kLanes), sum);
    }
    store(sums[t], sum);
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) put(to + column + n * kLanes, s[n], n + 1 < N ? kLanes : last);
}

// The same for all columns of row d. sums [tokens, 16] is written.
void advance_row(const Panel& p, int d, const float* from, float* to, float (*sums)[kLanes]) {
  const int64_t at = int64_t(d) * p.state;
  from = from ? from + at : nullptr, to += at;
  for (int column = 0; column < p.state;) {
    const int left = (p.state - column + kLanes - 1) / kLanes;
    int lines = kBlockLines;
    while (lines > left) lines /= 2;
    const int last = std::min(kLanes, p.state - column - (lines - 1) * kLanes);
    switch (lines) {
      case 8:
        advance_block<kBlockLines>(p, column, last, from, to, p.u + d, sums);
        break;
      case 4:
        advance_block<4>(p, column, last, from, to, p.u + d, sums);
        break;
      case 2:
        advance_block<2>(p, column, last, from, to, p.u + d, sums);
        break;
      default:
        advance_block<1>(p, column, last, from, to, p.u + d, sums);
    }
    column += lines * kLanes;
  }
}

// All rows of S, and y [tokens, dim], a token every `stride`.
void recur(const Panel& p, const float* from, float* to, float skip, float* y, int64_t stride) {
  alignas(64) float sums[kLanes][kLanes] = {}, line[kLanes];
  if (p.tokens == 1) {  // the sums of 16 rows of S at a time
    for (int d = 0; d < p.dim; d += kLanes) {
      const int rows = std::min(kLanes, p.dim - d);
      for (int i = 0; i < rows; ++i) advance_row(p, d + i, from, to, sums + i);
      put(y + d, sum_of_rows(sums, rows) + splat(skip) * load(p.x + d), rows);
    }
    return;
  }
  for (int d = 0; d < p.dim; ++d) {
    advance_row(p, d, from, to, sums);
    store(line, sum_of_rows(sums, p.tokens));
    for (int t = 0; t < p.tokens; ++t) y[t * stride + d] = line[t] + skip * p.x[t * p.width + d];
  }
}

// Data of one call; pointers into its tensors.
template <class T>
struct Call {
  const T *z, *x, *b, *c, *steps;  // columns of zxbcdt
  T *conv_x, *conv_b, *conv_c, *out;
  float *state, *y;  // y may be `out`
  const float *taps, *conv_bias, *rate, *step_bias, *skip, *norm;
  float eps, low, high;
  StateRows rows;
  int64_t stride, out_stride, y_stride, norm_groups;
  int heads, dim, groups, places, size;  // size: of B and C
  Finish finish;

  int64_t inner() const { return int64_t(heads) * dim; }
  int64_t shared() const { return int64_t(groups) * size; }
  int64_t channels() const { return inner() + 2 * shared(); }
};

int whole(int size) { return (size + kLanes - 1) / kLanes * kLanes; }

template <class T, int K>
class Worker {
 public:
  explicit Worker(const Call<T>& call) : c_(call), width_(whole(call.dim)) {
    const int64_t shared = int64_t(call.size + kBlock - 1) / kBlock * kBlock * kPanel, x = int64_t(width_) * kPanel;
    b_ = scratch(2 * (shared + x));
    c_line_ = b_ + shared;
    x_ = c_line_ + shared;
    u_ = x_ + x;
  }

  void task(int64_t row, int place) {
    c_.rows.panels(row, kPanel, [&](int64_t first, int tokens, int64_t from, int64_t to) {
      panel(first, tokens, place, from, to);
    });
  }

 private:
  // from, to: copy of the state, counted over all slots; from -1: zeros.
  void panel(int64_t first, int tokens, int place, int64_t from, int64_t to) {
    const int group = place * c_.groups / c_.places, heads = c_.heads / c_.places;
    const int64_t column = int64_t(group) * c_.size, channel = c_.inner() + column;
    convolved_shared(c_.b + column, first, channel, place, c_.conv_b, from, to, tokens, b_);
    convolved_shared(c_.c + column, first, channel + c_.shared(), place, c_.conv_c, from, to, tokens, c_line_);
    for (int head = place * heads; head < (place + 1) * heads; ++head) {
      const int64_t x = int64_t(head) * c_.dim, lines = int64_t(K - 1) * c_.dim;
      convolved(c_.x + x, first, x, c_.conv_x, from < 0 ? -1 : (from * c_.heads + head) * lines,
                (to * c_.heads + head) * lines, c_.dim, tokens, c_.dim, x_, width_);
      take_steps(first, tokens, head);
      const int64_t size = int64_t(c_.dim) * c_.size;
      const float* before = from < 0 ? nullptr : c_.state + (from * c_.heads + head) * size;
      recur({tokens, c_.dim, c_.size, width_, b_, c_line_, x_, u_, decay_}, before,
            c_.state + (to * c_.heads + head) * size, c_.skip[head], c_.y + first * c_.y_stride + x, c_.y_stride);
    }
  }

  // B or C of a place, in blocks [kPanel, kBlock].
  void convolved_shared(const T* x, int64_t first, int64_t channel, int place, T* state, int64_t from, int64_t to,
                        int tokens, float* made) {
    const int64_t lines = int64_t(K - 1) * c_.size;
    for (int i = 0; i < c_.size; i += kBlock)
      convolved(x + i, first, channel + i, state, from < 0 ? -1 : (from * c_.places + place) * lines + i,
                (to * c_.places + place) * lines + i, c_.size, tokens, std::min(kBlock, c_.size - i), made + i * kPanel,
                kBlock);
  }

  // `dim` channels from `channel` on. past, next: places in `state`, whose lines have `line` elements.
  void convolved(const T* x, int64_t first, int64_t channel, T* state, int64_t past, int64_t next, int64_t line,
                 int tokens, int dim, float* made, int64_t made_stride) {
    convolve<K, T>({x + first * c_.stride, c_.stride, c_.taps + channel, c_.channels(),
                    c_.conv_bias ? c_.conv_bias + channel : nullptr, past < 0 ? nullptr : state + past, state + next,
                    line},
                   tokens, dim, made, made_stride);
  }

  // Decays of a head, and u = dt x.
  void take_steps(int64_t first, int tokens, int head) {
    alignas(64) float dt[kPanel] = {};
    for (int t = 0; t < tokens; ++t) dt[t] = widen(c_.steps[(first + t) * c_.stride + head]);
    // The bounds are the first operands, so NaN stays NaN.
    const vf step = vmin(splat(c_.high), vmax(splat(c_.low), softplus(load(dt) + splat(c_.step_bias[head]))));
    store(decay_, exponential(splat(-c_.rate[head]) * step));
    store(dt, step);
    for (int t = 0; t < tokens; ++t)
      for (int i = t * width_; i < (t + 1) * width_; i += kLanes) store(u_ + i, splat(dt[t]) * load(x_ + i));
  }

  const Call<T>& c_;
  const int width_;
  float *b_, *c_line_;  // [blocks, kPanel, kBlock]
  float *x_, *u_;       // [kPanel, width_]
  alignas(64) float decay_[kPanel];
};

// Gate and norm of a token.
template <class T>
void finish_row(const Call<T>& c, int64_t token) {
  float* y = c.y + token * c.y_stride;
  const T* z = c.z + token * c.stride;
  T* to = c.out + token * c.out_stride;
  if (c.finish == Finish::none)
    return in_steps(c.inner(), [&](int64_t i, int n) { put(to + i, take(y + i, n) * silu(take(z + i, n)), n); });
  const bool gated = c.finish == Finish::gated;
  const int64_t size = c.inner() / c.norm_groups;
  for (int64_t at = 0; at < c.inner(); at += size) {
    vf squares = splat(0.0f);
    in_steps(size, [&](int64_t i, int n) {
      vf v = take(y + at + i, n);
      if (gated) put(y + at + i, v = v * silu(take(z + at + i, n)), n);
      squares = fma(v, v, squares);
    });
    const vf by = splat(inverse_rms(reduce_add(squares), size, c.eps));
    in_steps(size, [&](int64_t i, int n) {
      const vf v = take(y + at + i, n) * by * take(c.norm + at + i, n);
      put(to + at + i, gated ? v : v * silu(take(z + at + i, n)), n);
    });
  }
}

template <class T, int K>
void run(const Call<T>& c, int64_t tokens) {
  const bool alone = tokens * c.inner() * c.size <= kAlone;
  c.rows.over_tasks(c.places, alone, [c] { return Worker<T, K>(c); });
  if (c.finish == Finish::later) return;
  over_rows_later(tokens, c.inner(), [c](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) finish_row(c, t);
  });
}

}  // namespace

// out: [T, heads * dim]; float32 with Finish::later, else as zxbcdt. norm: [heads * dim], if the finish has a norm.
void mamba(const Tensor& zxbcdt, const Tensor& out, const Tensor& conv_x, const Tensor& conv_b, const Tensor& conv_c,
           const Tensor& state, const Tensor& taps, const std::optional<Tensor>& conv_bias, const Tensor& rate,
           const Tensor& step_bias, const Tensor& skip, const std::optional<Tensor>& norm, int64_t groups,
           int64_t norm_groups, double eps, double low, double high, int64_t finish, const Tensor& offsets,
           const Tensor& starts, const Tensor& slots, const Tensor& live, bool each) {
  WEFT_CHECK(zxbcdt.dim() == 2 && state.dim() == 5 && conv_b.dim() == 5 && taps.dim() == 2, "mamba: shapes");
  const int64_t tokens = zxbcdt.size(0), lines = taps.size(0) - 1, places = conv_b.size(2);
  const int64_t heads = state.size(2), dim = state.size(3), size = state.size(4);
  const int64_t inner = heads * dim, shared = groups * size, channels = inner + 2 * shared;
  WEFT_CHECK(groups > 0 && places > 0 && heads % places == 0 && places % groups == 0, "mamba: ", heads, " heads, ",
             places, " places, ", groups, " groups");
  for (const int64_t one : {dim, size}) WEFT_CHECK(one > 0 && one <= kMaxSize, "mamba: heads of ", dim, " x ", size);
  WEFT_CHECK(1 <= lines && lines <= 3, "mamba: a convolution of ", lines + 1, " taps");
  WEFT_CHECK(finish >= 0 && finish <= int64_t(Finish::normed), "mamba: finish ", finish);
  const Finish last = Finish(finish);
  const bool normed = last == Finish::gated || last == Finish::normed;
  WEFT_CHECK(is_rows(zxbcdt, tokens, inner + channels + heads, zxbcdt.dtype()), "mamba: inputs of shape ",
             zxbcdt.sizes());
  WEFT_CHECK(is_rows(out, tokens, inner, last == Finish::later ? Dtype::f32 : zxbcdt.dtype()), "mamba: out of shape ",
             out.sizes(), " and ", out.dtype());
  WEFT_CHECK(is_floats(state, state.sizes()) && is_floats(taps, {lines + 1, channels}) &&
                 (!conv_bias || is_floats(*conv_bias, {channels})) && is_floats(rate, {heads}) &&
                 is_floats(step_bias, {heads}) && is_floats(skip, {heads}),
             "mamba: state and weights are float32");
  WEFT_CHECK(!normed || (norm && is_floats(*norm, {inner}) && norm_groups > 0 && inner % norm_groups == 0),
             "mamba: norm of ", norm_groups, " groups");
  if (!tokens) return;
  by_dtype(zxbcdt, "mamba", [&]<class T>(T) {
    Tensor scratch = out;  // y, where `out` is narrower
    if (out.dtype() != Dtype::f32) scratch = empty_tensor({tokens, inner}, Dtype::f32);
    if (Crew* crew = Crew::current()) crew->keep(scratch);
    Call<T> c;
    c.z = zxbcdt.const_data_ptr<T>();
    c.x = c.z + inner;
    c.b = c.x + inner;
    c.c = c.b + shared;
    c.steps = c.c + shared;
    c.conv_x = state_part<T>("mamba", conv_x, state, heads, lines, dim);
    c.conv_b = state_part<T>("mamba", conv_b, state, places, lines, size);
    c.conv_c = state_part<T>("mamba", conv_c, state, places, lines, size);
    c.out = last == Finish::later ? nullptr : out.mutable_data_ptr<T>();
    c.state = state.mutable_data_ptr<float>();
    c.y = scratch.mutable_data_ptr<float>();
    c.taps = taps.const_data_ptr<float>();
    c.conv_bias = conv_bias ? conv_bias->const_data_ptr<float>() : nullptr;
    c.rate = rate.const_data_ptr<float>();
    c.step_bias = step_bias.const_data_ptr<float>();
    c.skip = skip.const_data_ptr<float>();
    c.norm = normed ? norm->const_data_ptr<float>() : nullptr;
    c.eps = float(eps), c.low = float(low), c.high = float(high);
    c.rows = StateRows::of("mamba", offsets, starts, slots, live, state, each, tokens);
    c.stride = zxbcdt.stride(0), c.out_stride = out.stride(0), c.y_stride = scratch.stride(0);
    c.norm_groups = norm_groups;
    c.heads = int(heads), c.dim = int(dim), c.groups = int(groups), c.places = int(places), c.size = int(size);
    c.finish = last;
    switch (lines) {
      case 3:
        return run<T, 4>(c, tokens);
      case 2:
        return run<T, 3>(c, tokens);
      default:
        return run<T, 2>(c, tokens);
    }
  });
}

}  // namespace weft
