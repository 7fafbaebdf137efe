// Expectations of the programs in this folder, and random numbers that are equal on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

inline int failures = 0, checks = 0;

// At most ten failures are printed.
inline void expect(bool holds, const char* what, double got, double wanted, long a = 0, long b = 0) {
  ++checks;
  if (holds || ++failures > 10) return;
  std::printf("%s (%ld, %ld): got %.9g, expected %.9g\n", what, a, b, got, wanted);
}
inline bool same(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(a) && std::isnan(b)); }
inline void expect_bits(float got, float wanted, const char* what, long a = 0, long b = 0) {
  expect(same(got, wanted), what, got, wanted, a, b);
}
inline void expect_close(float got, double wanted, double most, const char* what, long a = 0, long b = 0) {
  expect(std::fabs(got - wanted) <= most, what, got, wanted, a, b);
}
inline int report() {
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures != 0;
}

inline uint32_t draw() {
  static uint64_t state = 0x9e3779b97f4a7c15ull;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return uint32_t(state >> 32);
}
inline float draw_float() { return float(int32_t(draw())) * 0x1p-31f; }  // -1 to 1

template <class T>
std::vector<T> draw_all(size_t count) {
  std::vector<T> made(count);
  for (T& each : made) each = T(draw_float());
  return made;
}
