// Matrix products with weights packed once: linear, gated_linear, their int8 and coded forms, and rows of a packed
// table.
//
//   out[m, n] = round(scale[n] * sum_k x[m, k] * w[n, k] + bias[n])            linear
//   out[m, n] = round(activation(gate sum of n) * up sum of n)                 gated: w is [2 n, K], gate rows first
//
// BLOCKING. Rows are taken in chunks of similar size, and the x of a chunk fits a part of the L2 cache. Within a chunk,
// all tiles use a block before the next block is touched:
//
//   for chunk of rows:  for block of columns:  for tile of rows in chunk:  all of K
//
// With AMX and a large K (`run_deep`):
//
//   for some blocks:  for chunk of rows:  for part of K:  for block:  for tile of rows in chunk:  the part
//
// In a captured step products are left behind (crew.h).
//
// INVARIANCE. A block's sums do not depend on the set of rows (gemm_block.h), so neither blocking nor division over
// threads changes a bit.
#include "brgemm.h"
#include "gemm_block.h"
#include "operators.h"
#include "weights.h"

#include <memory>
#include <vector>

namespace weft {
namespace {

template <class F>
void run_part(const Product<typename F::X>& product, int64_t row_begin, int64_t row_end, int64_t block_begin,
              int64_t block_end) {
  const Layout& layout = product.layout;
#if WEFT_AMX
  if constexpr (std::is_same_v<typename F::X, bf16>)
    if (use_brgemm && amx_permitted() && !product.coding.rounds_rows() && layout.inputs > kDeep &&
        row_end - row_begin > kBrgemmRows) {
      for (int64_t block = block_begin; block < block_end; block += kDeepBlocks)
        run_deep<F>(product, row_begin, row_end, block, std::min(block_end, block + kDeepBlocks));
      return;
    }
#endif
  const int64_t bytes = block_bytes<F>(product.coding, layout.inputs);
  const int64_t chunk = chunk_of(row_end - row_begin, layout.inputs * int64_t(sizeof(typename F::X)));
  Finish finish;
  for (int64_t row = row_begin; row < row_end; row += chunk) {
    const auto summed = for_rows(product, row, std::min(row + chunk, row_end));
    for (int64_t block = block_begin; block < block_end; ++block) {
      prepare(product, block, finish);
      const uint8_t* const weights = product.weights + block * bytes;
      run_block<F>(summed, weights, finish, row, std::min(row + chunk, row_end), block * layout.width(),
                   block + 1 < block_end ? weights + bytes : nullptr);
    }
  }
}

// Cut of blocks for threads that take parts on arrival: one large part per thread, then small parts of the rest.
struct Shares {
  int64_t blocks, large, each, small;

  Shares(int64_t blocks, int64_t threads) : blocks(blocks), each(blocks * 3 / 4 / threads) {
    large = each > 0 ? threads : 0;
    small = std::min(blocks - large * each, 4 * threads);
  }
  int64_t parts() const { return large + small; }
  int64_t begin(int64_t part) const {
    if (part <= large) return part * each;
    return large * each + (blocks - large * each) * (part - large) / small;
  }
};

// A range of a product's parts, by number.
struct Loop {
  int64_t parts;
  Crew::Part part;
};

// A product as a loop for a crew; the crew owns data shared by the parts.
template <class F>
Loop loop_of(Product<typename F::X> product, Crew& crew) {
  const int64_t blocks = product.layout.blocks(),
                bytes = blocks * block_bytes<F>(product.coding, product.layout.inputs);
  std::shared_ptr<float[]> sums;
  if (product.coding.minimums()) {
    sums = std::make_shared<float[]>(size_t(product.rows * product.coding.groups(product.layout.inputs)));
    crew.later(1, [product, sums](int64_t) {
      input_sums(product.coding, product.layout.inputs, product.x, product.x_stride, product.rows, sums.get());
    });
    product.x_sums = sums.get();
  }
  std::shared_ptr<uint8_t[]> rounded;
  if (product.coding.rounds_rows()) {  // rounded once for all parts
    const Rounding rounding = rounding_of(product, 0, product.rows);
    rounded = std::make_shared_for_overwrite<uint8_t[]>(size_t(rounding.memory()));
    crew.later(
        1, [product, rounding, rounded](int64_t) { round_rows(rounding, product.x, product.x_stride, rounded.get()); });
    product.bytes = rounding.in(rounded.get());
  }
  const bool alone = bytes <= alone_bytes;
  const Shares shares(blocks, crew.threads());
  return {alone ? 1 : shares.parts(), [product, sums, rounded, shares, alone](int64_t part) {
            run_part<F>(product, 0, product.rows, shares.begin(part), alone ? shares.blocks : shares.begin(part + 1));
            release_sums();
          }};
}

// Divides rows and blocks over the threads so that the largest part is smallest. Few rows in a crew are added to
// `loops`, or left behind.
template <class F>
void run(const Product<typename F::X>& product, std::vector<Loop>* loops) {
  const int64_t threads = team();
  const int64_t blocks = product.layout.blocks(), row_tiles = divide_up(product.rows, kRows);
  if (Crew* crew = Crew::current(); crew && row_tiles == 1) {
    Loop loop = loop_of<F>(product, *crew);
    return loops ? loops->push_back(std::move(loop)) : crew->later(loop.parts, std::move(loop.part));
  }
  int64_t across = 1, along = 1, best = INT64_MAX;  // number of parts of the rows, and of the blocks
  for (int64_t parts = 1; parts <= std::min(threads, row_tiles); ++parts) {
    const int64_t others = std::min(threads / parts, blocks);
    const int64_t largest = divide_up(row_tiles, parts) * divide_up(blocks, others);
    if (largest < best) across = parts, along = others, best = largest;
  }
  spread_later(across * along, 1, [=](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t r = part / along, b = part % along;
      run_part<F>(product, product.rows * r / across, product.rows * (r + 1) / across, blocks * b / along,
                  blocks * (b + 1) / along);
    }
    release_sums();
  });
}

// Leaves parallel loops behind as one loop.
void leave(std::vector<Loop> loops) {
  Crew* crew = Crew::current();
  if (!crew || loops.empty()) return;
  int64_t parts = 0;
  for (const Loop& loop : loops) parts += loop.parts;
  crew->later(parts, [loops = std::move(loops)](int64_t part) {
    for (const Loop& loop : loops) {
      if (part < loop.parts) return loop.part(part);
      part -= loop.parts;
    }
  });
}

// --- entries --------------------------------------------------------------------------------------------------

int64_t depth_of(Dtype type) { return type == Dtype::bf16 ? Bf16::depth : F32::depth; }

void check_dtype(const Tensor& tensor, const char* what) {
  WEFT_CHECK(tensor.dtype() == Dtype::bf16 || tensor.dtype() == Dtype::f32, what, " must be bfloat16 or float32, not ",
             tensor.dtype());
}

template <class Narrow, class Plain, class X>
void run_as(const Layout& layout, const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
            const std::optional<Tensor>& scales, Activation activation, const Coding& coding, Tensor& out,
            std::vector<Loop>* loops) {
  const Product<X> product{layout,
                           x.const_data_ptr<X>(),
                           x.size(0),
                           x.stride(0),
                           static_cast<const uint8_t*>(packed.const_data_ptr()),
                           bias ? bias->const_data_ptr<X>() : nullptr,
                           scales ? scales->const_data_ptr<float>() : nullptr,
                           activation,
                           out.mutable_data_ptr<X>(),
                           out.stride(0),
                           0.0f,
                           1.0f,
                           coding};
  scales && !coding ? run<Narrow>(product, loops) : run<Plain>(product, loops);
}

void check_rows(const Tensor& x, int64_t rows, const std::optional<Tensor>& bias, const std::optional<Tensor>& scales) {
  WEFT_CHECK(!bias || (bias->dtype() == x.dtype() && bias->numel() == rows && bias->is_contiguous()),
             "the bias must be [", rows, "] in x's dtype");
  WEFT_CHECK(!scales || (scales->dtype() == Dtype::f32 && scales->numel() == rows && scales->is_contiguous()),
             "the scales must be float32 [", rows, "]");
}

Tensor rowwise(const Tensor& x) { return in_order(x, x.size(1) <= 1 || x.stride(1) == 1); }

void run_any(const Layout& layout, const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
             const std::optional<Tensor>& scales, Activation activation, const Coding& coding, Tensor& out,
             std::vector<Loop>* loops = nullptr) {
  if (x.dtype() == Dtype::bf16)
    run_as<Int8Bf16, Bf16, bf16>(layout, x, packed, bias, scales, activation, coding, out, loops);
  else
    run_as<Int8F32, F32, float>(layout, x, packed, bias, scales, activation, coding, out, loops);
}

// Checks sizes of rows and scales (or factors): common code of both entries.
Tensor multiply(const Tensor& x, const Tensor& packed, const Layout& layout, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& scales, int64_t activation, const Coding& coding) {
  check_rows(x, layout.rows, bias, scales);
  Tensor out = empty_tensor({x.size(0), layout.outputs()}, x.dtype());
  if (out.numel() == 0) return out;
  run_any(layout, rowwise(x), packed, bias, scales, Activation(activation), coding, out);
  return out;
}

void check_x(const Tensor& x) {
  check_dtype(x, "x");
  WEFT_CHECK(x.dim() == 2, "x must be [rows, inputs]");
}

}  // namespace

// x [M, K]; packed by `pack` or `pack_int8` from [rows, K]; bias [rows] in x's dtype; scales float32 [rows] for int8;
// activation 0 for linear, otherwise the gated form.
Tensor linear(const Tensor& x, const Tensor& packed, int64_t rows, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& scales, int64_t activation) {
  check_x(x);
  const Layout layout{x.size(1), rows, activation != 0};
  const int64_t steps = divide_up(layout.inputs, depth_of(x.dtype()));
  WEFT_CHECK(packed.dim() == 4 && packed.size(0) == layout.blocks() && packed.size(1) == steps, "x has ", layout.inputs,
             " inputs, and the packed weight is for others");
  WEFT_CHECK(packed.dtype() == (scales ? Dtype::u8 : x.dtype()), "x is ", x.dtype(),
             ", and the packed weight is for another dtype");
  return multiply(x, packed, layout, bias, scales, activation, {});
}

namespace {

void check_coded(const Tensor& packed, const Layout& layout, const Coding& coding) {
  WEFT_CHECK(coding && packed.dim() == 2 && packed.dtype() == Dtype::u8 && packed.is_contiguous() &&
                 packed.size(0) == layout.blocks() && packed.size(1) == coding.offset(layout.inputs) &&
                 layout.inputs > 0,
             "x has ", layout.inputs, " inputs, and the packed weight is for others");
}

}  // namespace

// The same for quantized weights (coded.h), packed by `pack_coded` or `pack_ggml`; factors: float32 [rows] or none.
Tensor linear_coded(const Tensor& x, const Tensor& packed, int64_t rows, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& factors, int64_t activation, const Coding& coding) {
  check_x(x);
  const Layout layout{x.size(1), rows, activation != 0};
  check_coded(packed, layout, coding);
  return multiply(x, packed, layout, bias, factors, activation, coding);
}

// The same for rows in several codings, one after another: each entry of `packed` has an entry of `rows` and of
// `codings`.
Tensor linear_parts(const Tensor& x, const std::vector<Tensor>& packed, Sizes rows, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& factors, const std::vector<Coding>& codings) {
  check_x(x);
  WEFT_CHECK(rows.size() == packed.size() && codings.size() == packed.size(), "rows and codings for each part");
  int64_t all = 0;
  for (const int64_t count : rows) {
    WEFT_CHECK(count >= 0, "rows");
    all += count;
  }
  check_rows(x, all, bias, factors);
  Tensor out = empty_tensor({x.size(0), all}, x.dtype());
  const Tensor from = rowwise(x);
  const auto part = [](const std::optional<Tensor>& of, int64_t begin, int64_t count) {
    return of ? std::optional<Tensor>(of->narrow(0, begin, count)) : std::nullopt;
  };
  std::vector<Loop> loops;
  int64_t begin = 0;
  for (size_t i = 0; i < packed.size(); begin += rows[i], ++i) {
    const Layout layout{x.size(1), rows[i], false};
    check_coded(packed[i], layout, codings[i]);
    Tensor to = out.narrow(1, begin, rows[i]);
    if (to.numel() == 0) continue;
    run_any(layout, from, packed[i], part(bias, begin, rows[i]), part(factors, begin, rows[i]), Activation::none,
            codings[i], to, &loops);
  }
  leave(std::move(loops));
  return out;
}

namespace {

template <class X>
void pack_block(const X* weight, const Layout& layout, int64_t block, int64_t depth, X* to) {
  const int64_t steps = divide_up(layout.inputs, depth);
  for (int column = 0; column < kBlock; ++column) {
    const int64_t row = layout.row(block, column);
    for (int64_t at = 0; at < steps * depth; ++at)
      to[(at / depth * kBlock + column) * depth + at % depth] =
          row >= 0 && at < layout.inputs ? weight[row * layout.inputs + at] : X(0.0f);
  }
}

Layout layout_of(const Tensor& weight, bool gated) {
  WEFT_CHECK(weight.dim() == 2 || weight.dim() == 3, "a weight must be [outputs, inputs], or some of them");
  WEFT_CHECK(!gated || weight.size(-2) % 2 == 0, "a gated weight must have an even number of rows");
  return {weight.size(-1), weight.size(-2), gated};
}

// Memory for a packed `weight`: [blocks, steps, 32, k per step], or [matrices, blocks, ..].
Tensor packed_like(const Tensor& weight, const Layout& layout, int64_t depth, Dtype type) {
  std::vector<int64_t> sizes{layout.blocks(), divide_up(layout.inputs, depth), kBlock, depth};
  if (weight.dim() == 3) sizes.insert(sizes.begin(), weight.size(0));
  return empty_weights(sizes, type);
}

int64_t matrices(const Tensor& weight) { return weight.dim() == 3 ? weight.size(0) : 1; }

}  // namespace

// [rows, K] -> [blocks, steps, 32, k per step]; the same for each of [matrices, rows, K]
Tensor pack(const Tensor& weight, bool gated) {
  check_dtype(weight, "a weight to pack");
  const Layout layout = layout_of(weight, gated);
  const int64_t depth = depth_of(weight.dtype()), steps = divide_up(layout.inputs, depth);
  const Tensor plain = weight.contiguous();
  Tensor packed = packed_like(weight, layout, depth, weight.dtype());
  const auto fill = [&]<class X>(const X* from, X* to) {
    parallel_for(matrices(weight) * layout.blocks(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at)
        pack_block(from + at / layout.blocks() * layout.rows * layout.inputs, layout, at % layout.blocks(), depth,
                   to + at * steps * kBlock * depth);
    });
  };
  if (depth == Bf16::depth)
    fill(plain.const_data_ptr<bf16>(), packed.mutable_data_ptr<bf16>());
  else
    fill(plain.const_data_ptr<float>(), packed.mutable_data_ptr<float>());
  return packed;
}

// values: int8 [rows, K], -127 to 127 -> bytes [blocks, steps, 32, k per step] for activations of bf16 or float32; the
// same for each of [matrices, rows, K]
Tensor pack_int8(const Tensor& values, bool gated, bool for_bf16) {
  WEFT_CHECK(values.dtype() == Dtype::i8, "values to pack must be int8");
  const Layout layout = layout_of(values, gated);
  const int64_t depth = for_bf16 ? Bf16::depth : F32::depth, steps = divide_up(layout.inputs, depth);
  const Tensor plain = values.contiguous();
  Tensor packed = packed_like(values, layout, depth, Dtype::u8);
  const int8_t* from = plain.const_data_ptr<int8_t>();
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  parallel_for(matrices(values) * layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int column = 0; column < kBlock; ++column) {
        const int64_t inside = layout.row(block % layout.blocks(), column);
        const int64_t row = inside < 0 ? -1 : block / layout.blocks() * layout.rows + inside;
        for (int64_t at = 0; at < steps * depth; ++at) {
          const int value = row >= 0 && at < layout.inputs ? from[row * layout.inputs + at] : 0;
          const int slot = for_bf16 ? int8_slot(column, int(at % depth)) : column;
          to[(block * steps + at / depth) * kBlock * depth + slot] = for_bf16 ? int8_code(value) : uint8_t(value);
        }
      }
  });
  return packed;
}

// Return rows of a packed plain matrix of `rows` rows: ids int64 [T] -> [T, inputs].
Tensor embedding(const Tensor& ids, const Tensor& packed, int64_t rows, int64_t inputs) {
  check_dtype(packed, "the table");
  WEFT_CHECK(ids.dtype() == Dtype::i64 && ids.dim() == 1, "ids must be int64 [T]");
  const int64_t depth = packed.size(3), steps = packed.size(1);
  WEFT_CHECK(depth == depth_of(packed.dtype()) && steps == divide_up(inputs, depth) &&
                 packed.size(0) == divide_up(rows, kBlock),
             "the packed table is of another shape");
  const Tensor list = ids.contiguous();
  const int64_t* wanted = list.const_data_ptr<int64_t>();
  for (int64_t token = 0; token < ids.size(0); ++token)
    WEFT_CHECK_INDEX(wanted[token] >= 0 && wanted[token] < rows, "id ", wanted[token], " is not in a table of ", rows);
  Tensor out = empty_tensor({ids.size(0), inputs}, packed.dtype());
  const auto fill = [&]<class X>(const X* from, X* to) {
    spread(ids.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t id = wanted[token];
        const X* line = from + (id / kBlock * steps * kBlock + id % kBlock) * depth;
        X* row = to + token * inputs;
        for (int64_t at = 0; at < inputs; ++at) row[at] = line[at / depth * kBlock * depth + at % depth];
      }
    });
  };
  if (depth == Bf16::depth)
    fill(packed.const_data_ptr<bf16>(), out.mutable_data_ptr<bf16>());
  else
    fill(packed.const_data_ptr<float>(), out.mutable_data_ptr<float>());
  return out;
}

// Sets whether bf16 sums come from AMX (amx.h, or ATen's brgemm); returns the previous value. For tests and
// measurements.
bool set_brgemm(bool value) {
  WEFT_CHECK(!value || brgemm_works(), "set_brgemm: ATen's brgemm does not take bfloat16 on this CPU");
  return std::exchange(use_brgemm, value);
}

}  // namespace weft
