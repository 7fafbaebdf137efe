// Instruction sets of this build, and ATen features of this CPU: weft_cpu::capabilities() -> str[].
#include "amx.h"
#include "brgemm.h"
#include "operators.h"

#include <ATen/native/CPUBlas.h>

#include <exception>

#if WEFT_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {

bool amx_permitted() {
#if WEFT_AMX
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool given = syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  return given;
#else
  return false;
#endif
}

bool brgemm_works() {
  alignas(64) bf16 x[2] = {}, weights[64] = {};
  alignas(64) float sums[32];
  try {
    at::native::cpublas::brgemm(1, 32, 2, 2, 32, 32, false, x, weights, sums);
    at::native::cpublas::brgemm_release();
  } catch (const std::exception&) {  // c10::Error, or an error of oneDNN: there is no kernel for AVX-512 without bf16
    return false;
  }
  return true;
}

std::vector<std::string> capabilities() {
  std::vector<std::string> found;
  if (WEFT_AVX2 || WEFT_AVX512) found.emplace_back("avx2");
  if (WEFT_AVX512) found.emplace_back("avx512");
  if (WEFT_AVX512_BF16) found.emplace_back("avx512_bf16");
  if (WEFT_NEON) found.emplace_back("neon");
  if (WEFT_NEON_BF16) found.emplace_back("neon_bf16");
  if (amx_permitted()) found.emplace_back("amx_bf16");
  if (brgemm_works()) found.emplace_back("brgemm");
  return found;
}

}  // namespace weft
