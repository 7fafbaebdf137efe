// The recurrence of Mamba2 against scalar code in double, and against itself token by token.
#include "mamba.cpp"

#include "expect.h"

using namespace weft;

namespace {

void check(int dim, int state, int tokens) {
  const int width = whole(dim), blocks = (state + kBlock - 1) / kBlock, block = kPanel * kBlock;
  std::vector<float> b(size_t(blocks) * block), c(b);
  const auto x = draw_all<float>(kPanel * width), u = draw_all<float>(kPanel * width);
  const auto before = draw_all<float>(dim * state);
  std::vector<float> decay(kPanel), after(before), y(tokens * dim), alone(before), one(dim);
  const auto at = [&](int t, int i) { return i / kBlock * block + t * kBlock + i % kBlock; };
  for (int t = 0; t < tokens; ++t) {
    decay[t] = 0.75f + draw_float() / 4;
    for (int i = 0; i < state; ++i) b[at(t, i)] = draw_float(), c[at(t, i)] = draw_float();
  }
  recur({tokens, dim, state, width, b.data(), c.data(), x.data(), u.data(), decay.data()}, before.data(), after.data(),
        0.7f, y.data(), dim);
  std::vector<double> s(before.begin(), before.end());
  for (int t = 0; t < tokens; ++t) {
    const float *xt = &x[t * width], *ut = &u[t * width];
    recur({1, dim, state, width, &b[t * kBlock], &c[t * kBlock], xt, ut, &decay[t]}, alone.data(), alone.data(), 0.7f,
          one.data(), dim);
    for (int d = 0; d < dim; ++d) {
      double sum = 0.7 * xt[d];
      for (int i = 0; i < state; ++i) {
        double& each = s[d * state + i];
        each = each * decay[t] + double(ut[d]) * b[at(t, i)];
        sum += each * c[at(t, i)];
      }
      expect_close(y[t * dim + d], sum, 1e-6 * state + 1e-6, "y", t, d);
      expect_bits(one[d], y[t * dim + d], "y of one token", t, d);
    }
  }
  for (int i = 0; i < dim * state; ++i) {
    expect_close(after[i], s[i], 1e-5, "state", i, tokens);
    expect_bits(alone[i], after[i], "state of single tokens", i, tokens);
  }
}

}  // namespace

int main() {
  for (const int state : {10, 16, 100, 128, 272})
    for (const int dim : {5, 16, 40})
      for (const int tokens : {1, 2, 7, kPanel}) check(dim, state, tokens);
  return report();
}
