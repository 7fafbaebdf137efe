// Random words of sampling against the scalar generator.
#include "sampling.cpp"

#include "expect.h"

using namespace weft;

int main() {
  alignas(64) uint32_t words[kGroup];
  for (int round = 0; round < 50; ++round) {
    const Key key{draw(), draw(), draw(), draw()};
    const uint32_t first = draw() / kGroup * kGroup;
    words_of(key, first, words);
    for (int i = 0; i < kGroup; ++i) {
      uint32_t four[4];
      philox(key, (first + uint32_t(i)) >> 2, four);
      expect(words[i] == four[i % 4], "philox", words[i], four[i % 4], round, i);
    }
    float gaps[kLanes];
    store(gaps, gap_of(words));
    for (int i = 0; i < kLanes; ++i) expect_bits(gaps[i], float(~words[i]) + 0.5f, "gap", round, i);
  }
  return report();
}
