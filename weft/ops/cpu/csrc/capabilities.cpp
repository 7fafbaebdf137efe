// What this build was compiled for: weft_cpu::capabilities() -> str[].
#include "common.h"

namespace weft {
namespace {

std::vector<std::string> capabilities() {
  std::vector<std::string> found;
  if (WEFT_AVX512) found.emplace_back("avx512");
  if (WEFT_AVX512_BF16) found.emplace_back("avx512_bf16");
#if defined(__AMX_BF16__)
  found.emplace_back("amx_bf16");
#endif
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(weft_cpu, m) { m.def("capabilities() -> str[]", &capabilities); }

}  // namespace weft
