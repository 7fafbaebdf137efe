// Whether ATen's brgemm takes bf16 on this CPU: with AMX, or AVX-512 where oneDNN's micro-kernels serve it.
#pragma once

namespace weft {

bool brgemm_works();

}  // namespace weft
