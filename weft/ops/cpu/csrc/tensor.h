// Tensors as kernels see them: plain pointers to data, sizes and strides.
//
// torch's headers take longer to compile than most kernels, so kernels do not include them. Torch's tensor stays behind
// `impl_`, and library.cpp, the only source with torch's headers, makes handles and defines the functions below
// (torch.h).
//
//   borrowed   handle of an argument. Takes no count of the tensor, and is valid during the call
//   owned      a copy of any handle, and every new tensor. Keeps the tensor alive
//
// A handle reads pointers and sizes when library.cpp makes the handle. So a tensor that is held for longer (moe.cpp)
// must keep its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

namespace weft {

// Elements of a tensor; the numbers are torch's (torch.h checks them).
enum class Dtype : int8_t {
  u8 = 0,
  i8 = 1,
  i32 = 3,
  i64 = 4,
  f16 = 5,
  f32 = 6,
  f64 = 7,
  boolean = 11,
  bf16 = 15,
  f8 = 24
};

int64_t bytes_of(Dtype type);

// bf16 in memory. Kernels widen and narrow numbers in registers (vector.h).
struct bf16 {
  uint16_t x;
  bf16() = default;
  explicit bf16(float value);
  explicit operator float() const;
};

template <class T>
constexpr Dtype dtype_of = T::no_dtype;
template <>
inline constexpr Dtype dtype_of<uint8_t> = Dtype::u8;
template <>
inline constexpr Dtype dtype_of<int8_t> = Dtype::i8;
template <>
inline constexpr Dtype dtype_of<int32_t> = Dtype::i32;
template <>
inline constexpr Dtype dtype_of<int64_t> = Dtype::i64;
template <>
inline constexpr Dtype dtype_of<float> = Dtype::f32;
template <>
inline constexpr Dtype dtype_of<double> = Dtype::f64;
template <>
inline constexpr Dtype dtype_of<bool> = Dtype::boolean;
template <>
inline constexpr Dtype dtype_of<bf16> = Dtype::bf16;

// Refers to sizes that live elsewhere; a list of sizes lives as long as its expression.
class Sizes {
 public:
  Sizes(const int64_t* data, size_t count) : data_(data), count_(count) {}
  Sizes(const std::vector<int64_t>& sizes) : data_(sizes.data()), count_(sizes.size()) {}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winit-list-lifetime"
#endif
  Sizes(const std::initializer_list<int64_t>& sizes) : data_(sizes.begin()), count_(sizes.size()) {}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

  const int64_t* data() const { return data_; }
  size_t size() const { return count_; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + count_; }
  int64_t operator[](size_t dim) const { return data_[dim]; }
  std::vector<int64_t> vec() const { return {begin(), end()}; }
  // The first `count` sizes, or all sizes if there are fewer.
  Sizes leading(size_t count) const { return {data_, count < count_ ? count : count_}; }
  friend bool operator==(Sizes a, Sizes b) {
    if (a.count_ != b.count_) return false;
    for (size_t i = 0; i < a.count_; ++i)
      if (a.data_[i] != b.data_[i]) return false;
    return true;
  }

 private:
  const int64_t* data_;
  size_t count_;
};

// Defined in torch.h. `tensor` is a c10::TensorImpl.
void retain_tensor(void* tensor);
void release_tensor(void* tensor);
[[noreturn]] void fail_dim(int64_t dim, int64_t dims);
[[noreturn]] void fail_dtype(Dtype expected, Dtype found);

class Tensor {
 public:
  Tensor() = default;
  Tensor(const Tensor& other) : Tensor(other.all_, true) {
    if (all_.impl) retain_tensor(all_.impl);
  }
  Tensor(Tensor&& other) noexcept : Tensor(other.all_, other.owned_) { other.all_ = {}, other.owned_ = false; }
  Tensor& operator=(Tensor other) noexcept {
    std::swap(all_, other.all_), std::swap(owned_, other.owned_);
    return *this;
  }
  ~Tensor() {
    if (owned_ && all_.impl) release_tensor(all_.impl);
  }

  bool defined() const { return all_.impl != nullptr; }
  Dtype dtype() const { return all_.type; }
  bool is_contiguous() const { return all_.contiguous; }
  bool is_cpu() const { return all_.cpu; }
  int64_t dim() const { return all_.dims; }
  int64_t numel() const { return all_.numel; }
  int64_t element_size() const { return bytes_of(all_.type); }
  int64_t nbytes() const { return numel() * element_size(); }
  Sizes sizes() const { return {all_.sizes, size_t(all_.dims)}; }
  int64_t size(int64_t dim) const { return all_.sizes[place(dim)]; }
  int64_t stride(int64_t dim) const { return all_.strides[place(dim)]; }

  const void* const_data_ptr() const { return all_.data; }
  void* mutable_data_ptr() const { return all_.data; }
  template <class T>
  const T* const_data_ptr() const {
    return data_of<T>();
  }
  template <class T>
  T* mutable_data_ptr() const {
    return data_of<T>();
  }

  Tensor contiguous() const;
  // Rows `begin` to `begin + count` of dimension `dim`, in the same memory.
  Tensor narrow(int64_t dim, int64_t begin, int64_t count) const;

  // What library.cpp reads of torch's tensor.
  struct Parts {
    void* impl = nullptr;
    void* data = nullptr;
    const int64_t *sizes = nullptr, *strides = nullptr;
    int64_t dims = 0, numel = 0;
    Dtype type = Dtype::u8;
    bool contiguous = true, cpu = true;
  };
  Tensor(const Parts& parts, bool owned) : all_(parts), owned_(owned) {}
  void* impl() const { return all_.impl; }
  // Gives up an owned tensor: the caller has its count.
  void* release() {
    owned_ = false;
    return all_.impl;
  }
  bool owned() const { return owned_; }

 private:
  int64_t place(int64_t dim) const {
    const int64_t at = dim < 0 ? dim + all_.dims : dim;
    if (uint64_t(at) >= uint64_t(all_.dims)) [[unlikely]]
      fail_dim(dim, all_.dims);
    return at;
  }
  template <class T>
  T* data_of() const {
    if (dtype_of<T> != all_.type) [[unlikely]]
      fail_dtype(dtype_of<T>, all_.type);
    return static_cast<T*>(all_.data);
  }

  Parts all_;
  bool owned_ = false;
};

// New memory on the CPU, uninitialized.
Tensor empty_tensor(Sizes sizes, Dtype type);
// A tensor over memory that `drop` releases.
Tensor tensor_over(void* memory, Sizes sizes, Dtype type, std::function<void(void*)> drop);

// --- torch's threads ---

int num_threads();
int thread_number();  // in `parallel_for`
bool in_parallel_region();
void run_parallel(int64_t count, int64_t grain, void* context, void (*part)(void* context, int64_t begin, int64_t end));

// Calls f(begin, end) for parts of 0 .. count - 1 of at least `grain`, in torch's threads.
template <class F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
  run_parallel(count, grain, const_cast<F*>(&f),
               [](void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); });
}

}  // namespace weft
