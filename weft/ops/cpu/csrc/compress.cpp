// Entries of groups of positions (DeepSeek-V4, section 2.3). The token that completes a group writes the group's entry.
//
//   source   of each position, one part per group to which the position contributes, the latest last: [kv | gate], n
//            elements each
//   group    channel by channel the sum over its sources of softmax(gate + bias) * kv; then vector by vector
//            normalized, its last elements rotated as the group's first position, neighbours as pairs
//
// The host does not need to know which groups are complete: positions determine them here. An entry's bits depend on
// its sources alone, added oldest first.

#include "fp8.h"
#include "operators.h"
#include "rows.h"

#include <vector>

namespace weft {
namespace {

// A complete group: its sources are positions `first` .. of `row`; positions below 0 do not exist.
struct Complete {
  int64_t row, token, first;
};

template <class T>
struct Sources {
  const T* data;
  const int64_t* table;
  int64_t table_width, block, blocks, width;

  const T* at(int64_t row, int64_t position) const {
    return data + (table[row * table_width + position / block] * block + position % block) * width;
  }
  void check(int64_t row, int64_t low, int64_t high) const {
    for (int64_t i = low / block; i <= (high - 1) / block; ++i) {
      WEFT_CHECK(i < table_width, "compress_groups: row ", row, " reaches block ", i, " of a table of ", table_width);
      const int64_t id = table[row * table_width + i];
      WEFT_CHECK(id >= 0 && id < blocks, "compress_groups: row ", row, " names block ", id, " of ", blocks);
    }
  }
};

template <class T>
struct Pool {
  Sources<T> sources;
  const float* bias;  // [overlap * ratio, size]
  int64_t ratio, overlap, size;

  // Writes the group's `size` elements.
  void run(const Complete& group, float* to) const {
    const int64_t count = overlap * ratio, begin = std::max<int64_t>(0, -group.first);
    std::vector<const T*>& lines = scratch();
    lines.resize(size_t(count));
    for (int64_t s = begin; s < count; ++s)
      lines[size_t(s)] = sources.at(group.row, group.first + s) + s / ratio * 2 * size;
    in_steps(size, [&](int64_t i, int lanes) {
      const auto gate = [&](int64_t s) {
        return take(lines[size_t(s)] + size + i, lanes) + take(bias + s * size + i, lanes);
      };
      vf most = gate(begin);
      for (int64_t s = begin + 1; s < count; ++s) most = vmax(most, gate(s));
      vf sum = splat(0.0f), made = splat(0.0f);
      for (int64_t s = begin; s < count; ++s) {
        const vf weight = exp2v((gate(s) - most) * splat(kLog2E));
        sum = sum + weight;
        made = fma(weight, take(lines[size_t(s)] + i, lanes), made);
      }
      put(to + i, made / sum, lanes);
    });
  }

 private:
  static std::vector<const T*>& scratch() {
    static thread_local std::vector<const T*> lines;
    return lines;
  }
};

// Rotates the last 2 * half elements of x, with neighbours as pairs.
inline void rotate(float* x, int64_t size, const float* cos, const float* sin, int64_t half) {
  float* at = x + size - 2 * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = at[2 * i], b = at[2 * i + 1];
    at[2 * i] = a * cos[i] - b * sin[i];
    at[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// Where entries of `size` elements go. In 8 bits: `coded` codes and a scale, and the elements behind the codes.
template <class T>
struct Target {
  T* data;  // whole entries, or the elements behind the codes
  int64_t size;
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  int64_t coded = 0;

  static Target of(const Tensor& groups, const std::optional<Tensor>& scales, const std::optional<Tensor>& exact,
                   int64_t size) {
    WEFT_CHECK(scales.has_value() == exact.has_value(), "compress_groups: scales without exact elements");
    const Tensor& plain = exact ? *exact : groups;
    const int64_t coded = exact ? groups.size(2) : 0;
    WEFT_CHECK(plain.dim() == 3 && plain.is_contiguous() && plain.size(2) + coded == size &&
                   plain.dtype() == dtype_of<T>,
               "compress_groups: groups");
    if (!exact) return {plain.mutable_data_ptr<T>(), size};
    WEFT_CHECK(groups.is_contiguous() && groups.dtype() == Dtype::f8 && coded % kLanes == 0 &&
                   groups.sizes().leading(2) == plain.sizes().leading(2),
               "compress_groups: codes");
    WEFT_CHECK(scales->dtype() == Dtype::f32 && scales->is_contiguous() &&
                   scales->sizes() == groups.sizes().leading(2),
               "compress_groups: scales");
    return {plain.mutable_data_ptr<T>(), size, static_cast<uint8_t*>(groups.mutable_data_ptr()),
            scales->mutable_data_ptr<float>(), coded};
  }

  // Writes an entry of floats. `memory`: `size` elements. Codes are those of the entry in the model's dtype.
  void write(int64_t place, const float* made, T* memory) const {
    T* entry = codes ? memory : data + place * size;
    in_steps(size, [&](int64_t at, int lanes) { put(entry + at, take(made + at, lanes), lanes); });
    if (!codes) return;
    scales[place] = quantize_line(entry, coded, codes + place * coded);
    std::memcpy(data + place * (size - coded), entry + coded, size_t(size - coded) * sizeof(T));
  }
};

}  // namespace

// sources [blocks, block, overlap * 2 n]; groups [.., n], written; writes int64 [T]: a group's entry goes to the place
// of its last token, divided by ratio. cos, sin float [T, half]: of the first position of the group that a token would
// complete. bias float [overlap * ratio, n]; norms: float weights of each vector, n elements together. In 8 bits groups
// are codes, with float scales [blocks, per block], and exact elements behind the codes.
void compress_groups(const Tensor& sources, const Tensor& groups, const Tensor& offsets, const Tensor& starts,
                     const Tensor& table, const Tensor& writes, const Tensor& cos, const Tensor& sin,
                     const Tensor& bias, const std::vector<Tensor>& norms, int64_t ratio, int64_t overlap, double eps,
                     const std::optional<Tensor>& scales, const std::optional<Tensor>& exact) {
  WEFT_CHECK(ratio > 0 && overlap > 0 && bias.dim() == 2 && bias.size(0) == overlap * ratio && bias.is_contiguous() &&
                 bias.dtype() == Dtype::f32,
             "compress_groups: bias");
  const int64_t size = bias.size(1), tokens = writes.size(0), rows = starts.size(0), half = cos.size(1);
  WEFT_CHECK(sources.dim() == 3 && sources.is_contiguous() && sources.size(2) == overlap * 2 * size &&
                 groups.dim() == 3,
             "compress_groups: caches");
  WEFT_CHECK(offsets.is_contiguous() && starts.is_contiguous() && offsets.size(0) == rows + 1 && table.dim() == 2 &&
                 table.is_contiguous() && table.size(0) == rows && writes.dim() == 1 && writes.is_contiguous(),
             "compress_groups: rows");
  WEFT_CHECK(cos.dim() == 2 && cos.size(0) == tokens && cos.sizes() == sin.sizes() && cos.is_contiguous() &&
                 sin.is_contiguous() && cos.dtype() == Dtype::f32 && sin.dtype() == Dtype::f32,
             "compress_groups: angles");
  int64_t whole = 0;
  for (const Tensor& norm : norms) {
    WEFT_CHECK(norm.dtype() == Dtype::f32 && norm.is_contiguous() && norm.numel() >= 2 * half,
               "compress_groups: norms");
    whole += norm.numel();
  }
  WEFT_CHECK(whole == size, "compress_groups: vectors of ", whole, " elements in entries of ", size);
  const int32_t* bounds = offsets.const_data_ptr<int32_t>();
  const int64_t *first = starts.const_data_ptr<int64_t>(), *place = writes.const_data_ptr<int64_t>();
  const int64_t places = groups.size(0) * groups.size(1);
  by_dtype(sources, "compress_groups", [&]<class T>(T) {
    const Pool<T> pool{{sources.const_data_ptr<T>(), table.const_data_ptr<int64_t>(), table.size(1), sources.size(1),
                        sources.size(0), sources.size(2)},
                       bias.const_data_ptr<float>(),
                       ratio,
                       overlap,
                       size};
    std::vector<Complete> complete;
    for (int64_t row = 0; row < rows; ++row) {
      WEFT_CHECK(0 <= bounds[row] && bounds[row] <= bounds[row + 1] && bounds[row + 1] <= tokens && first[row] >= 0,
                 "compress_groups: row ", row);
      const int64_t most = first[row] + bounds[row + 1] - bounds[row];
      for (int64_t end = (first[row] / ratio + 1) * ratio; end <= most; end += ratio) {
        const int64_t token = bounds[row] + end - 1 - first[row];
        WEFT_CHECK(place[token] >= 0 && place[token] / ratio < places, "compress_groups: token ", token, " goes to ",
                   place[token] / ratio, " of ", places);
        pool.sources.check(row, std::max<int64_t>(0, end - overlap * ratio), end);
        complete.push_back({row, token, end - overlap * ratio});
      }
    }
    const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
    const Target<T> target = Target<T>::of(groups, scales, exact, size);
    over_rows(int64_t(complete.size()), overlap * ratio * 2 * size, [&](int64_t begin, int64_t end) {
      std::vector<float> made(static_cast<size_t>(2 * size));
      std::vector<T> memory(static_cast<size_t>(size));
      for (int64_t i = begin; i < end; ++i) {
        const Complete& group = complete[size_t(i)];
        float *pooled = made.data(), *normed = pooled + size;
        pool.run(group, pooled);
        for (const Tensor& norm : norms) {
          const int64_t n = norm.numel();
          norm_row<float>(pooled, nullptr, norm.const_data_ptr<float>(), float(eps), n, nullptr, normed);
          rotate(normed, n, c + group.token * half, s + group.token * half, half);
          pooled += n;
          normed += n;
        }
        target.write(place[group.token] / ratio, made.data() + size, memory.data());
      }
    });
  });
}

}  // namespace weft
