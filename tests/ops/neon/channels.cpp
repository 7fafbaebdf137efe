// The recurrence of Mamba 1 against scalar code in double, and against itself token by token and line by line.
#include "mamba1.cpp"

#include "expect.h"

using namespace weft;

namespace {

// Advances `state` [size, dim], 16 channels. Returns y [tokens, 16].
template <int N>
std::vector<float> advance(int tokens, int lanes, int dim, int size, const float* b, const float* c, const float* dt,
                           const float* u, const float* rate, std::vector<float>& state, bool fresh) {
  std::vector<float> y(tokens * kLanes, NAN);
  const Panel panel{tokens, lanes, dim, size, kLanes, b, c, dt, u, y.data()};
  int n = 0;
  for (; n + N <= size; n += N) advance_lines<N>(panel, n, fresh ? nullptr : state.data(), state.data(), rate);
  for (; n < size; ++n) advance_lines<1>(panel, n, fresh ? nullptr : state.data(), state.data(), rate);
  return y;
}

void check(int size, int lanes, int tokens, bool fresh) {
  const int dim = lanes + 3;  // channels behind the real ones must stay
  const auto b = draw_all<float>(tokens * size), c = draw_all<float>(tokens * size);
  const auto before = draw_all<float>(size * dim);
  auto dt = draw_all<float>(tokens * kLanes), u = draw_all<float>(tokens * kLanes), rate = draw_all<float>(size * dim);
  for (float& one : dt) one = -std::fabs(one) * 3;
  for (float& one : rate) one = std::fabs(one) * 8;
  auto together = before, alone = before;
  const auto y =
      advance<kLines>(tokens, lanes, dim, size, b.data(), c.data(), dt.data(), u.data(), rate.data(), together, fresh);
  std::vector<double> s(before.begin(), before.end());
  for (int t = 0; t < tokens; ++t) {
    const int at = t * kLanes;
    const auto one = advance<1>(1, lanes, dim, size, &b[t * size], &c[t * size], &dt[at], &u[at], rate.data(), alone,
                                fresh && t == 0);
    for (int d = 0; d < lanes; ++d) {
      double sum = 0;
      for (int n = 0; n < size; ++n) {
        double& each = s[n * dim + d];
        each = (fresh && t == 0 ? 0 : each) * std::exp2(double(rate[n * dim + d]) * dt[at + d]);
        each += double(u[at + d]) * b[t * size + n];
        sum += each * c[t * size + n];
      }
      expect_close(y[at + d], sum, 2e-6 * size, "y", t, d);
      expect_bits(one[d], y[at + d], "y of one token", t, d);
    }
  }
  for (int i = 0; i < size * dim; ++i) {
    expect_bits(alone[i], together[i], "state of single tokens", i, tokens);
    if (i % dim < lanes)
      expect_close(together[i], s[i], 1e-5, "state", i, tokens);
    else
      expect_bits(together[i], before[i], "other channels", i, tokens);
  }
}

}  // namespace

int main() {
  for (const int size : {1, 2, 7, 16})
    for (const int lanes : {5, 16})
      for (const int tokens : {1, 2, 7, kPanel})
        for (const bool fresh : {false, true}) check(size, lanes, tokens, fresh);
  return report();
}
