// What this build was compiled for, and what of ATen's this CPU can run: weft_cpu::capabilities() -> str[].
#include "brgemm.h"
#include "operators.h"

#include <ATen/native/CPUBlas.h>

#include <exception>

namespace weft {

bool brgemm_works() {
  alignas(64) bf16 x[2] = {}, weights[64] = {};
  alignas(64) float sums[32];
  try {
    at::native::cpublas::brgemm(1, 32, 2, 2, 32, 32, false, x, weights, sums);
    at::native::cpublas::brgemm_release();
  } catch (const std::exception&) {  // c10::Error, or oneDNN's: it has no kernel for AVX-512 without bf16
    return false;
  }
  return true;
}

std::vector<std::string> capabilities() {
  std::vector<std::string> found;
  if (WEFT_AVX2 || WEFT_AVX512) found.emplace_back("avx2");
  if (WEFT_AVX512) found.emplace_back("avx512");
  if (WEFT_AVX512_BF16) found.emplace_back("avx512_bf16");
#if defined(__AMX_BF16__)
  found.emplace_back("amx_bf16");
#endif
  if (brgemm_works()) found.emplace_back("brgemm");
  return found;
}

}  // namespace weft
