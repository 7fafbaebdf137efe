// ATen's brgemm for bf16 (oneDNN): C[m, n] = A[m, k] B[k, n], added to C with `add`. Each thread calls `brgemm_release`
// after its last product. Defined in torch.h.
#pragma once

#include "common.h"

namespace weft {

// brgemm has no bf16 below AVX-512, so other builds leave out what calls it.
constexpr bool kBrgemmBuilt = WEFT_AVX512;

void brgemm(int64_t m, int64_t n, int64_t k, int64_t a_stride, int64_t b_stride, int64_t c_stride, bool add,
            const bf16* a, const bf16* b, float* c);
void brgemm_release();

// True if brgemm supports bf16 on this CPU: with AMX, or AVX-512 with oneDNN's micro-kernels.
bool brgemm_works();

}  // namespace weft
