// True if ATen's brgemm takes bf16 on this CPU: with AMX, or with AVX-512 where oneDNN has micro-kernels.
#pragma once

namespace weft {

bool brgemm_works();

}  // namespace weft
