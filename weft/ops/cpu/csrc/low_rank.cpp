// Low-rank products for rows of different adapters: y += B (A x), with the A and B of each row's place.
//
//   inner    z[row, part, j] = A[place, part, j] . x[row]        16 partial sums, one per lane, in order of the inputs
//   outer    y[row, o] += sum over j of z[row, part(o), j] * B[place, j, o]        in order of j, rounded once
//
// Consecutive rows of one place are computed together, up to kRows, to read A and B once. Every sum has one order for
// any number of rows, so the bits of a row do not depend on other rows. Rows without an adapter stay as they are.

#include "operators.h"
#include "rows.h"

#include <vector>

namespace weft {
namespace {

using namespace vec;

constexpr int64_t kRows = 4;     // rows computed together
constexpr int64_t kWidth = 512;  // outputs of one piece of work
constexpr int64_t kStep = 4;     // ranks of one piece of work of `inner`

struct RowBlock {
  int64_t begin;  // first row
  int64_t count;  // 1 .. kRows
  int64_t place;
};

struct Outputs {
  int64_t part, begin, end;
};

// Blocks of consecutive rows of one place, without rows that get nothing.
std::vector<RowBlock> row_blocks(const int32_t* numbers, const int32_t* ranks, int64_t places, int64_t rows) {
  std::vector<RowBlock> made;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = numbers[row];
    WEFT_CHECK(place < places, "low_rank: place");
    if (place < 0 || !ranks[place]) continue;
    const bool joins = !made.empty() && made.back().place == place && made.back().count < kRows &&
                       made.back().begin + made.back().count == row;
    if (joins)
      ++made.back().count;
    else
      made.push_back({row, 1, place});
  }
  return made;
}

// Pieces of at most kWidth outputs of one part.
std::vector<Outputs> pieces(Sizes spans, int64_t outputs, int64_t parts) {
  WEFT_CHECK(spans.size() % 3 == 0, "low_rank: spans");
  std::vector<Outputs> made;
  for (size_t i = 0; i < spans.size(); i += 3) {
    const int64_t part = spans[i], end = spans[i + 2];
    WEFT_CHECK(part >= 0 && part < parts && spans[i + 1] >= 0 && end <= outputs, "low_rank: spans");
    for (int64_t begin = spans[i + 1]; begin < end; begin += kWidth)
      made.push_back({part, begin, std::min(begin + kWidth, end)});
  }
  return made;
}

// z[row * stride + j] for N rows from x and M lines j from a.
template <int N, int M, class T>
void inner(const T* x, const T* a, int64_t inputs, float* z, int64_t stride) {
  vf sums[N][M];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) sums[r][j] = splat(0.0f);
  in_steps(inputs, [&](int64_t i, int lanes) {
    vf lines[M];
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) lines[j] = take(a + j * inputs + i, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const vf values = take(x + r * inputs + i, lanes);
#pragma GCC unroll 8
      for (int j = 0; j < M; ++j) sums[r][j] = fma(values, lines[j], sums[r][j]);
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) z[r * stride + j] = reduce_add(sums[r][j]);
}

// Adds the products of z with the lines of b [rank, outputs] to `at .. at + K * kLanes - 1` of N rows of y; K = 1: to
// the first `lanes` of them. Several vectors at once hide the latency of a sum.
template <int N, int K, class T>
inline void outer_at(T* y, const T* b, const float* z, int64_t stride, int64_t rank, int64_t outputs, int64_t at,
                     int lanes) {
  vf sums[N][K];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) sums[r][k] = splat(0.0f);
  for (int64_t j = 0; j < rank; ++j)
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) {
      const vf line = take(b + j * outputs + at + k * kLanes, lanes);
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) sums[r][k] = fma(splat(z[r * stride + j]), line, sums[r][k]);
    }
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) {
      T* to = y + r * outputs + at + k * kLanes;
      put(to, take(to, lanes) + sums[r][k], lanes);
    }
}

// The same for the outputs begin .. end - 1.
template <int N, class T>
void outer(T* y, const T* b, const float* z, int64_t stride, int64_t rank, int64_t outputs, int64_t begin,
           int64_t end) {
  constexpr int K = 8 / N;
  int64_t at = begin;
  for (; at + K * kLanes <= end; at += K * kLanes) outer_at<N, K>(y, b, z, stride, rank, outputs, at, kLanes);
  in_steps(end - at, [&](int64_t i, int lanes) { outer_at<N, 1>(y, b, z, stride, rank, outputs, at + i, lanes); });
}

// Calls f with the number of rows as a constant.
template <class F>
void by_count(int64_t count, F f) {
  if (count == 4) return f(std::integral_constant<int, 4>());
  if (count == 3) return f(std::integral_constant<int, 3>());
  if (count == 2) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 1>());
}

}  // namespace

// y [T, outputs], written; x [T, inputs]; a [places, parts, most, inputs]; b [places, most, outputs], all in one dtype;
// numbers int32 [T], -1 for no adapter; ranks int32 [places], used ranks of the `most`; spans: (part, begin, end) of
// outputs, one after another.
void low_rank(const Tensor& y, const Tensor& given, const Tensor& a, const Tensor& b, const Tensor& numbers,
              const Tensor& ranks, Sizes spans) {
  const Tensor x = in_order(given);
  const int64_t rows = x.size(0), inputs = x.size(1), outputs = y.size(1);
  WEFT_CHECK(y.is_contiguous() && a.is_contiguous() && b.is_contiguous(), "low_rank: order");
  WEFT_CHECK(a.dim() == 4 && b.dim() == 3 && a.size(3) == inputs && b.size(2) == outputs && a.size(2) == b.size(1) &&
                 a.size(0) == b.size(0) && ranks.size(0) == a.size(0) && numbers.size(0) == rows && y.size(0) == rows,
             "low_rank: shape");
  WEFT_CHECK(numbers.dtype() == Dtype::i32 && ranks.dtype() == Dtype::i32 && numbers.is_contiguous() &&
                 ranks.is_contiguous() && y.dtype() == x.dtype() && a.dtype() == x.dtype() && b.dtype() == x.dtype(),
             "low_rank: types");
  const int64_t parts = a.size(1), most = a.size(2), width = parts * most;
  const int32_t* rank_of = ranks.const_data_ptr<int32_t>();
  const auto blocks = row_blocks(numbers.const_data_ptr<int32_t>(), rank_of, a.size(0), rows);
  if (blocks.empty()) return;
  const auto of_outputs = pieces(spans, outputs, parts);
  std::vector<float> made(size_t(blocks.size()) * kRows * width);
  float* z = made.data();
  by_dtype(x, "low_rank", [&]<class T>(T) {
    const T* xs = x.const_data_ptr<T>();
    const T* as = a.const_data_ptr<T>();
    const T* bs = b.const_data_ptr<T>();
    T* ys = y.mutable_data_ptr<T>();
    const int64_t steps = parts * ((most + kStep - 1) / kStep), each = steps / parts;
    over_rows(int64_t(blocks.size()) * steps, kStep * kRows * inputs, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const RowBlock& block = blocks[i / steps];
        const int64_t part = i % steps / each, first = i % each * kStep, rank = rank_of[block.place];
        if (first >= rank) continue;
        const T* lines = as + ((block.place * parts + part) * most + first) * inputs;
        float* to = z + (i / steps) * kRows * width + part * most + first;
        by_count(block.count, [&]<class N>(N) {
          by_count(std::min(kStep, rank - first),
                   [&]<class M>(M) { inner<N::value, M::value>(xs + block.begin * inputs, lines, inputs, to, width); });
        });
      }
    });
    const int64_t count = int64_t(of_outputs.size());
    over_rows(int64_t(blocks.size()) * count, most * kWidth, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const RowBlock& block = blocks[i / count];
        const Outputs& piece = of_outputs[i % count];
        const float* from = z + (i / count) * kRows * width + piece.part * most;
        by_count(block.count, [&]<class N>(N) {
          outer<N::value>(ys + block.begin * outputs, bs + block.place * most * outputs, from, width,
                          rank_of[block.place], outputs, piece.begin, piece.end);
        });
      }
    });
  });
}

}  // namespace weft
