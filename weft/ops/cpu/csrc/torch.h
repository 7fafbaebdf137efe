// Definitions of what kernels use of torch: tensor.h, check.h, brgemm.h. Included by library.cpp alone.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>

#include "brgemm.h"
#include "common.h"

namespace weft {

// --- handles ---

#define WEFT_SAME(ours, torchs) static_assert(int(Dtype::ours) == int(at::torchs))
WEFT_SAME(u8, kByte);
WEFT_SAME(i8, kChar);
WEFT_SAME(i32, kInt);
WEFT_SAME(i64, kLong);
WEFT_SAME(f16, kHalf);
WEFT_SAME(f32, kFloat);
WEFT_SAME(f64, kDouble);
WEFT_SAME(boolean, kBool);
WEFT_SAME(bf16, kBFloat16);
WEFT_SAME(f8, kFloat8_e4m3fn);
#undef WEFT_SAME
static_assert(sizeof(bf16) == sizeof(at::BFloat16));

inline Tensor::Parts parts_of(const at::Tensor& of) {
  Tensor::Parts parts;
  if (!of.defined()) return parts;
  at::TensorImpl* const impl = of.unsafeGetTensorImpl();
  parts.impl = impl;
  parts.data = const_cast<void*>(of.const_data_ptr());
  parts.sizes = impl->sizes().data(), parts.strides = impl->strides().data();
  parts.dims = impl->dim(), parts.numel = impl->numel();
  parts.type = Dtype(of.scalar_type());
  parts.contiguous = impl->is_contiguous(), parts.cpu = of.is_cpu();
  return parts;
}
inline Tensor borrowed(const at::Tensor& of) { return {parts_of(of), false}; }
inline Tensor owned(at::Tensor of) {
  const Tensor::Parts parts = parts_of(of);
  of.unsafeReleaseTensorImpl();
  return {parts, true};
}

inline c10::intrusive_ptr<at::TensorImpl> shared_impl(const Tensor& of) {
  return c10::intrusive_ptr<at::TensorImpl>::unsafe_reclaim_from_nonowning(static_cast<at::TensorImpl*>(of.impl()));
}
inline at::Tensor torch_tensor(const Tensor& of) { return of.defined() ? at::Tensor(shared_impl(of)) : at::Tensor(); }
inline at::Tensor torch_tensor(Tensor&& of) {
  if (!of.defined() || !of.owned()) return torch_tensor(static_cast<const Tensor&>(of));
  return at::Tensor(c10::intrusive_ptr<at::TensorImpl>::reclaim(static_cast<at::TensorImpl*>(of.release())));
}

int64_t bytes_of(Dtype type) { return int64_t(c10::elementSize(at::ScalarType(type))); }
const char* name_of(Dtype type) { return at::toString(at::ScalarType(type)); }

void retain_tensor(void* tensor) { c10::raw::intrusive_ptr::incref(static_cast<at::TensorImpl*>(tensor)); }
void release_tensor(void* tensor) { c10::raw::intrusive_ptr::decref(static_cast<at::TensorImpl*>(tensor)); }

void fail_dim(int64_t dim, int64_t dims) {
  WEFT_CHECK_INDEX(false, "Dimension out of range: ", dim, " of a tensor with ", dims, " dimensions");
  __builtin_unreachable();
}
void fail_dtype(Dtype expected, Dtype found) {
  WEFT_CHECK(false, "expected scalar type ", expected, " but found ", found);
  __builtin_unreachable();
}

Tensor Tensor::contiguous() const {
  if (is_contiguous()) return *this;
  return weft::owned(torch_tensor(*this).contiguous());
}
Tensor Tensor::narrow(int64_t dim, int64_t begin, int64_t count) const {
  return weft::owned(torch_tensor(*this).narrow(dim, begin, count));
}

namespace {
at::IntArrayRef torch_sizes(Sizes sizes) { return {sizes.data(), sizes.size()}; }
}  // namespace

Tensor empty_tensor(Sizes sizes, Dtype type) {
  return owned(at::empty(torch_sizes(sizes), at::TensorOptions().dtype(at::ScalarType(type))));
}
Tensor tensor_over(void* memory, Sizes sizes, Dtype type, std::function<void(void*)> drop) {
  return owned(
      at::from_blob(memory, torch_sizes(sizes), std::move(drop), at::TensorOptions().dtype(at::ScalarType(type))));
}

#if !defined(__F16C__) && !WEFT_NEON
float half_to_float(uint16_t bits) { return float(at::Half(bits, at::Half::from_bits())); }
uint16_t float_to_half(float value) { return at::Half(value).x; }
#endif

// --- threads ---

int num_threads() { return at::get_num_threads(); }
int thread_number() { return at::get_thread_num(); }
bool in_parallel_region() { return at::in_parallel_region(); }
void run_parallel(int64_t count, int64_t grain, void* context, void (*part)(void*, int64_t, int64_t)) {
  at::parallel_for(0, count, grain, [=](int64_t begin, int64_t end) { part(context, begin, end); });
}

// --- errors ---

// Integers, sizes and real numbers read as a std::ostream writes them.
void MessagePart::append_to(std::string& message) const {
  switch (kind_) {
    case Kind::text:
      message += text_;
      return;
    case Kind::integer:
      message += std::to_string(integer_);
      return;
    case Kind::real: {
      char digits[32];
      std::snprintf(digits, sizeof(digits), "%g", real_);
      message += digits;
      return;
    }
    case Kind::sizes:
      message += '[';
      for (size_t dim = 0; dim < sizes_.size(); ++dim) {
        if (dim > 0) message += ", ";
        message += std::to_string(sizes_[dim]);
      }
      message += ']';
  }
}

void fail(Place place, std::initializer_list<MessagePart> parts) {
  std::string message;
  for (const MessagePart& part : parts) part.append_to(message);
  const c10::SourceLocation where{place.function, place.file, place.line};
  if (place.raised == Raised::index) throw c10::IndexError(where, std::move(message));
  throw c10::Error(where, std::move(message));
}

void fail_group(const char* text) { C10_THROW_ERROR(DistError, text); }

void fail_group() {
  try {
    throw;
  } catch (const c10::Error& error) {
    fail_group(error.what_without_backtrace());
  }
}

// --- brgemm ---

void brgemm(int64_t m, int64_t n, int64_t k, int64_t a_stride, int64_t b_stride, int64_t c_stride, bool add,
            const bf16* a, const bf16* b, float* c) {
  at::native::cpublas::brgemm(m, n, k, a_stride, b_stride, c_stride, add, reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c);
}
void brgemm_release() { at::native::cpublas::brgemm_release(); }

bool brgemm_works() {
  if (!kBrgemmBuilt) return false;
  alignas(64) bf16 x[2] = {}, weights[64] = {};
  alignas(64) float sums[32];
  try {
    brgemm(1, 32, 2, 2, 32, 32, false, x, weights, sums);
    brgemm_release();
  } catch (const std::exception&) {  // c10::Error, or an error of oneDNN: there is no kernel for AVX-512 without bf16
    return false;
  }
  return true;
}

}  // namespace weft
