// Paged attention with grouped queries: one form for prefill and decode rows, for any grouping of heads.
//
// A row of a piece is a (query, query head) pair; a piece has the rows of one KV head. attend_tile.h explains the
// computation of rows and the independence of their bits.

#include "attend_tile.h"
#include "fp8.h"
#include "operators.h"

#include <optional>
#include <vector>

namespace weft {
namespace {

using namespace attend;

constexpr int kMostDim = 512;

template <class Element>
struct Grouped {
  using T = Element;
  Rows rows;
  const T* q;
  T* result;
  int64_t q_stride, out_stride;  // between tokens
  const T* cache;
  const uint8_t* codes;      // 8-bit cache, instead of `cache`, with
  const float* line_scales;  // a scale for each line
  int heads, kv_heads, group, dim, window;
  float scale;
  std::shared_ptr<const float[]> sinks;  // per head, times log2(e), or null
  float cap = 0;                         // factor of scores in tanh_half, if scores are capped; `scale` follows tanh
  const int64_t* ends = nullptr;         // by token, or null
  int key = dim, rest = 0, value = dim, copied = codes ? 2 * dim : 0;

  template <class E>
  void pack_q(const Piece& piece, typename E::elem* to) const {
    const int width = group * dim;
    for (int t = 0; t < piece.queries; ++t)
      E::pack_q(q + (piece.token + t) * q_stride + int64_t(piece.head) * width, width, to + t * width);
  }

  void point(Lines<T>& lines, const Piece& piece, int64_t tile, int64_t low, int64_t high) const {
    if (codes) return point_copies(lines, piece, tile, low, high);
    const int64_t plane = rows.block * dim;
    point_lines(rows, lines, piece.row, tile, low, high, [&](int at, int64_t id, int64_t offset, int count) {
      const T* k = cache + (id * 2 * kv_heads + piece.head) * plane + offset * dim;
      const T* v = k + kv_heads * plane;
      for (int i = 0; i < count; ++i) {
        lines.k[at + i] = k + i * dim;
        lines.v[at + i] = v + i * dim;
      }
    });
  }

  // The same from a cache in 8 bits.
  void point_copies(Lines<T>& lines, const Piece& piece, int64_t tile, int64_t low, int64_t high) const {
    point_lines(rows, lines, piece.row, tile, low, high, [&](int at, int64_t id, int64_t offset, int count) {
      const int64_t k = (id * 2 * kv_heads + piece.head) * rows.block + offset, v = k + kv_heads * rows.block;
      for (int i = 0; i < count; ++i) {
        T* to = lines.copies + (at + i) * copied;
        dequantize_line(codes + (k + i) * dim, line_scales[k + i], dim, to);
        dequantize_line(codes + (v + i) * dim, line_scales[v + i], dim, to + dim);
        lines.k[at + i] = to;
        lines.v[at + i] = to + dim;
      }
    });
  }

  // Additional term of a row's softmax sum.
  float sink(const Piece& piece, int row, float top) const {
    return sinks ? std::exp2(sinks[int64_t(piece.head) * group + row % group] - top) : 0.0f;
  }

  T* out(const Piece& piece, int row) const {
    return result + (piece.token + row / group) * out_stride + (int64_t(piece.head) * group + row % group) * dim;
  }
};

// Checks that the ends of visible keys stay within each row's own tokens and never decrease.
void check_ends(const Rows& rows, const int64_t* ends) {
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t begin = rows.offsets[row], count = rows.offsets[row + 1] - begin, start = rows.starts[row];
    for (int64_t t = 0, before = 0; t < count; ++t) {
      const int64_t end = std::max(start + t + 1, ends[begin + t]);
      WEFT_CHECK(end >= before && end <= start + count, "attend: token ", t, " of row ", row, " sees keys up to ", end);
      before = end;
    }
  }
}

}  // namespace

void attend_grouped(const Tensor& q, const Tensor& out, const Tensor& cache, const Tensor& offsets,
                    const Tensor& starts, const Tensor& table, int64_t window, double scale, int64_t engine,
                    const std::optional<Tensor>& sinks, const std::optional<Tensor>& scales, double softcap,
                    const std::optional<Tensor>& ends) {
  WEFT_CHECK(q.dim() == 3 && out.sizes() == q.sizes() && cache.dim() == 5 && cache.size(1) == 2, "attend: shapes");
  WEFT_CHECK(q.dtype() == out.dtype(), "attend: dtypes");
  WEFT_CHECK(cache.dtype() == (scales ? Dtype::f8 : q.dtype()), "attend: the cache's dtype");
  WEFT_CHECK(!scales || (scales->dtype() == Dtype::f32 && scales->is_contiguous() &&
                         scales->sizes() == cache.sizes().leading(4)),
             "attend: scales");
  WEFT_CHECK(cache.is_contiguous(), "attend: cache");
  const int heads = int(q.size(1)), dim = int(q.size(2)), kv_heads = int(cache.size(2));
  const Rows rows = Rows::of(offsets, starts, table, cache.size(3));
  WEFT_CHECK(dim == cache.size(4) && dim % 16 == 0 && dim <= kMostDim, "attend: head_dim ", dim);
  WEFT_CHECK(heads % kv_heads == 0 && heads / kv_heads <= kRows, "attend: ", heads, " heads");
  WEFT_CHECK(scale > 0 && softcap >= 0, "attend: scale ", scale, ", softcap ", softcap);
  if (q.size(0) == 0) return;
  WEFT_CHECK(q.stride(2) == 1 && q.stride(1) == dim && out.stride(2) == 1 && out.stride(1) == dim, "attend: strides");
  rows.check(q.size(0), cache.size(0), int(window));
  const int64_t* seen = nullptr;
  if (ends) {
    WEFT_CHECK(ends->dtype() == Dtype::i64 && ends->is_contiguous() && ends->numel() == q.size(0),
               "attend: the ends must be int64 [tokens]");
    seen = ends->const_data_ptr<int64_t>();
    check_ends(rows, seen);
  }
  std::shared_ptr<float[]> drawn;
  if (sinks) {
    WEFT_CHECK(sinks->dtype() == q.dtype() && sinks->numel() == heads && sinks->is_contiguous(),
               "attend: the sinks must be [", heads, "] in q's dtype");
    drawn = std::make_shared<float[]>(size_t(heads));
    for (int64_t i = 0; i < heads; ++i) {
      const float sink =
          q.dtype() == Dtype::f32 ? sinks->const_data_ptr<float>()[i] : widen(sinks->const_data_ptr<bf16>()[i]);
      drawn[i] = sink * kLog2E;
    }
  }
  with_engine(q.dtype(), engine, [&]<class T, class E>(T, E) {
    Grouped<T> scene{rows,
                     q.const_data_ptr<T>(),
                     out.mutable_data_ptr<T>(),
                     q.stride(0),
                     out.stride(0),
                     scales ? nullptr : cache.const_data_ptr<T>(),
                     scales ? static_cast<const uint8_t*>(cache.const_data_ptr()) : nullptr,
                     scales ? scales->const_data_ptr<float>() : nullptr,
                     heads,
                     kv_heads,
                     heads / kv_heads,
                     dim,
                     int(window),
                     float((softcap > 0 ? softcap : scale) * kLog2E),
                     drawn,
                     float(softcap > 0 ? 2 * kLog2E * scale / softcap : 0)};
    scene.ends = seen;
    std::vector<Piece> pieces = rows.cut(std::max(1, kRows / scene.group), kv_heads, scene.window);
    if (seen)
      for (Piece& piece : pieces) piece.high = std::max(piece.high, seen[piece.token + piece.queries - 1]);
    run_later<E>(scene, std::move(pieces));
  });
}

}  // namespace weft
