// True if ATen's brgemm supports bf16 on this CPU: with AMX, or AVX-512 with oneDNN's micro-kernels.
#pragma once

namespace weft {

bool brgemm_works();

}  // namespace weft
