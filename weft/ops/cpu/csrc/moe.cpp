// A routed feed-forward block in one call: router, choice of experts, experts, shared expert, combination.
//
//   out[t] = round( sum_j weight[t, j] * expert[ids[t, j]](x[t])  +  gate[t] * shared(x[t]) )        in top-k order
//   expert(x) = down( round( activation(gate(x)) * up(x) ) )
//
//   slots      a token and one of its chosen experts; sorted by expert, so an expert's slots are neighbours
//   phases     1  router logits, and the gated half of the shared expert, which needs no router
//              2  ids and weights of each token; slots sorted
//              3  the gated half of the experts           -> act  [slots, n]
//              4  the other half of experts and shared    -> made [slots, hidden], float32
//              5  combination
//
// If ranks divide the experts, a layer calls parts of the block, and rows travel in between (weft/moe/parallel.py):
//
//   moe_route    phases 1 and 2 of tokens: experts, weights, and the shared expert's gate
//   moe_part     phases 3 and 4 of the local experts, for pairs of token and place. A place is the number of a local
//                expert, or -1 for an expert elsewhere. Result: separate experts, or the weighted sum in top-k order.
//   moe_shared   the shared expert
//   moe_finish   phase 5, on the outputs of all ranks' experts
//
// A separate expert output is float32 and not rounded. Added to the zeros of other ranks, the output equals the input
// of phase 5 of the whole block, so moe_finish gives the same bits.
//
//   item       some rows of one matrix times some of its blocks, of about equal cost: threads take the next free item.
//              One token is 4 to 10 experts cut by blocks; 2,048 tokens are experts cut by rows.
//
// INVARIANCE. Logits, choice, both products and the combination of a token are each one sequence of operations on the
// token's values (gemm_block.h, routing.h), for any item and thread. Sums are float32 and are rounded twice: between
// the halves of an expert, and at the end.
#include "crew.h"
#include "gemm_block.h"
#include "moe.h"
#include "routing.h"

#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>

namespace weft {
namespace {

constexpr int64_t kMadeBytes = 32 << 20;  // of `made`: more tokens are computed in several parts
constexpr int64_t kItemsPerThread = 8;
constexpr int64_t kFewTokens = 16;        // too few to divide in phases 2 and 5
constexpr int64_t kColumns = 1024;        // of an item of phase 5
constexpr int64_t kAddedAlone = 1 << 14;  // elements that one thread combines before others arrive

using Optional = std::optional<Tensor>;

// Matrices of one shape, packed one after another: all experts, or a single matrix.
struct Matrix : MoeMatrix {
  Layout layout{0, 0, false};
  int64_t matrices = 0;
  bool int8() const { return scales && !coding; }
  int64_t bytes() const { return packed->numel() / matrices * packed->element_size(); }
};

enum class Kind : uint8_t { router, shared_up, up, down, shared_down };

struct Item {
  Kind kind;
  int32_t expert;
  int64_t row_begin, row_end, block_begin, block_end;  // rows: slots, or tokens for the router and the shared expert
};

// Memory retained between calls; each call overwrites the content.
class Scratch {
 public:
  void begin(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size_t(divide_up(bytes, 64) * 64))));
      WEFT_CHECK(memory_, "no memory for ", bytes, " bytes");
      size_ = bytes;
    }
    at_ = 0;
  }
  bool holds(int64_t bytes) const { return bytes <= size_; }
  template <class T>
  T* take(int64_t count) {
    T* made = reinterpret_cast<T*>(memory_.get() + at_);
    at_ += need<T>(count);
    return made;
  }
  template <class T>
  static int64_t need(int64_t count) {
    return divide_up(count * int64_t(sizeof(T)), 64) * 64;
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  int64_t size_ = 0, at_ = 0;
};

}  // namespace

class Moe {
 public:
  Moe(const MoeSpec& spec, MoeTensors given)
      : correction(std::move(given.correction)),
        table(std::move(given.table)),
        rule{.experts = spec.experts,
             .top_k = spec.top_k,
             .scoring = Scoring(spec.scoring),
             .renormalize = spec.renormalize,
             .groups = spec.groups,
             .top_groups = spec.top_groups,
             .top2 = spec.top2,
             .scale = float(spec.scale),
             .correction = nullptr},
        hidden(spec.hidden),
        intermediate(spec.intermediate),
        shared(spec.shared_intermediate),
        gated_shared(spec.gated_shared),
        activation(Activation(spec.activation)),
        limit(float(spec.limit)),
        alpha(float(spec.alpha)) {
    const int64_t experts = rule.experts, k = rule.top_k, here = spec.local_experts;
    WEFT_CHECK(k >= 1 && k <= std::min(kMostChosen, experts), "moe: top_k must be 1 to ", kMostChosen);
    WEFT_CHECK(rule.groups >= 1 && experts % rule.groups == 0 && rule.top_groups >= 1 &&
                   rule.top_groups <= std::min(rule.groups, kMostChosen) &&
                   experts / rule.groups * rule.top_groups >= k,
               "moe: groups");
    const int64_t rows = experts + (gated_shared ? 1 : 0);
    router = {std::move(given.router), {hidden, rows, false}, 1};
    up = {std::move(given.up), {hidden, 2 * intermediate, true}, here};
    down = {std::move(given.down), {intermediate, hidden, false}, here};
    check(router, "router"), check(up, "gate_up"), check(down, "down");
    if (shared) {
      shared_up = {std::move(given.shared_up), {hidden, 2 * shared, true}, 1};
      shared_down = {std::move(given.shared_down), {shared, hidden, false}, 1};
      check(shared_up, "shared gate_up"), check(shared_down, "shared down");
    }
    WEFT_CHECK(!gated_shared || shared, "moe: a gate of no shared expert");
    if (correction) {
      WEFT_CHECK(correction->dtype() == Dtype::f32 && correction->numel() == experts && correction->is_contiguous(),
                 "moe: correction");
      rule.correction = correction->const_data_ptr<float>();
    }
    if (table) {
      const Tensor& ids = *table;
      WEFT_CHECK(ids.dtype() == Dtype::i64 && ids.dim() == 2 && ids.size(1) == k && ids.is_contiguous(),
                 "moe: the table must be int64 [tokens, top_k]");
      const int64_t* id = ids.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < ids.numel(); ++i)
        WEFT_CHECK(id[i] >= 0 && id[i] < experts, "moe: the table names expert ", id[i], " of ", experts);
    }
  }

  int64_t nbytes() const {
    int64_t sum = 0;
    for (const Matrix* matrix : {&router, &up, &down, &shared_up, &shared_down})
      for (const Optional* part : {&matrix->packed, &matrix->scales, &matrix->bias})
        if (*part) sum += int64_t((*part)->nbytes());
    return sum;
  }

  Matrix router, up, down, shared_up, shared_down;
  Optional correction, table;
  Rule rule;
  int64_t hidden, intermediate, shared;
  bool gated_shared;
  Activation activation;
  float limit, alpha;

 private:
  static void check(const Matrix& matrix, const char* what) {
    WEFT_CHECK(matrix.packed && matrix.packed->is_contiguous(), "moe: ", what);
    const Tensor& packed = *matrix.packed;
    const int64_t dims = packed.dim(), depth = dims >= 4 ? packed.size(-1) : 0;
    const int64_t blocks = matrix.matrices * matrix.layout.blocks();
    WEFT_CHECK(!matrix.coding || (packed.dtype() == Dtype::u8 &&
                                  packed.numel() == blocks * matrix.coding.offset(matrix.layout.inputs)),
               "moe: ", what, " is packed for another shape");
    WEFT_CHECK(matrix.coding || (dims >= 4 && depth > 0 && packed.size(-2) == kBlock &&
                                 packed.numel() == blocks * divide_up(matrix.layout.inputs, depth) * kBlock * depth),
               "moe: ", what, " is packed for another shape");
    const int64_t rows = matrix.matrices * matrix.layout.rows;
    WEFT_CHECK(!matrix.scales || (matrix.scales->dtype() == Dtype::f32 && matrix.scales->numel() == rows &&
                                  matrix.scales->is_contiguous()),
               "moe: scales of ", what);
    WEFT_CHECK(matrix.coding || (packed.dtype() == Dtype::u8) == matrix.scales.has_value(), "moe: scales of ", what);
    WEFT_CHECK(!matrix.bias || (matrix.bias->numel() == rows && matrix.bias->is_contiguous() &&
                                (matrix.scales || matrix.coding || matrix.bias->dtype() == packed.dtype())),
               "moe: bias of ", what);
  }
};

namespace {

// Input and output of a pass over tokens whose places in `up` and `down` are given: [tokens, top_k].
struct Part {
  const int64_t* places;
  const float* scales;  // [tokens, top_k] to return sums, or null
  void* out;            // sums [tokens, hidden] in x's dtype, or float32 [tokens, top_k, hidden]
};

// One call, or a part of its tokens. F: format of the experts' weights.
template <class F>
class Pass {
  using X = typename F::X;

 public:
  Pass(const Moe& moe, const X* x, int64_t x_stride, const int64_t* ids, int64_t tokens, X* out, Scratch& scratch)
      : moe_(moe),
        rule_(moe.rule),
        x_(x),
        x_stride_(x_stride),
        ids_(ids),
        tokens_(tokens),
        out_(out),
        width_(divide_up(moe.router.layout.rows, kLanes) * kLanes),
        slots_(tokens * rule_.top_k) {
    threads_ = team();
    scratch.begin(bytes(moe, tokens));
    logits_ = scratch.take<float>(tokens * width_);
    weights_ = scratch.take<float>(slots_);
    chosen_ = scratch.take<int32_t>(slots_);
    order_ = scratch.take<int32_t>(slots_);
    place_ = scratch.take<int32_t>(slots_);
    act_ = scratch.take<X>(slots_ * moe.intermediate);
    shared_act_ = scratch.take<X>(tokens * moe.shared);
    made_ = scratch.take<float>(slots_ * moe.hidden);
    shared_made_ = scratch.take<float>(moe.shared ? tokens * moe.hidden : 0);
  }

  // Experts and weights of each token, and the shared expert's gate if there is one.
  static void run_route(const std::shared_ptr<Pass>& pass, int64_t* chosen, float* weights, float* gates) {
    Pass& p = *pass;
    p.add_items(p.first_, Kind::router, p.moe_.router, 0, 0, p.tokens_, 1.0);
    const auto give = [&p, chosen, weights, gates](int64_t) {
      for (int64_t slot = 0; slot < p.slots_; ++slot) chosen[slot] = p.chosen_[slot], weights[slot] = p.weights_[slot];
      if (p.moe_.gated_shared)
        for (int64_t token = 0; token < p.tokens_; ++token) gates[token] = p.shared_gate(token);
    };
    run_phases(pass, {p.items_of(p.first_), p.routes(), {1, one, give}}, p.tokens_ > kFewTokens);
    settle();
  }

  // The local experts, for pairs chosen before.
  static void run_part(const std::shared_ptr<Pass>& pass, const Part& part) {
    Pass& p = *pass;
    for (int64_t slot = 0; slot < p.slots_; ++slot) p.chosen_[slot] = int32_t(part.places[slot]);
    if (part.scales) std::copy(part.scales, part.scales + p.slots_, p.weights_);
    p.sort(false);
    const auto end = [&p, part](int64_t i) {
      for (int64_t token = i * kFewTokens; token < std::min(p.tokens_, (i + 1) * kFewTokens); ++token)
        part.scales ? p.add_up(token, static_cast<X*>(part.out)) : p.lay_out(token, static_cast<float*>(part.out));
    };
    const int64_t pieces = divide_up(p.tokens_, kFewTokens);
    run_phases(pass, {p.items_of(p.second_), p.items_of(p.third_), {pieces, [pieces] { return pieces; }, end}}, true);
    settle();
  }

  // Run the shared expert: float32 [tokens, hidden].
  static void run_shared(const std::shared_ptr<Pass>& pass, float* out) {
    Pass& p = *pass;
    p.shared_made_ = out;
    const double tiles = double(tiles_of(p.tokens_));
    p.add_items(p.first_, Kind::shared_up, p.moe_.shared_up, 0, 0, p.tokens_,
                p.target(tiles * double(p.moe_.shared_up.layout.blocks())));
    p.add_items(p.second_, Kind::shared_down, p.moe_.shared_down, 0, 0, p.tokens_,
                p.target(tiles * double(p.moe_.shared_down.layout.blocks())));
    run_phases(pass, {p.items_of(p.first_), p.items_of(p.second_)}, true);
    settle();
  }

  static int64_t bytes(const Moe& moe, int64_t tokens) {
    const int64_t slots = tokens * moe.rule.top_k, width = divide_up(moe.router.layout.rows, kLanes) * kLanes;
    return Scratch::need<float>(tokens * width) + 4 * Scratch::need<float>(slots) +
           Scratch::need<X>(slots * moe.intermediate) + Scratch::need<X>(tokens * moe.shared) +
           Scratch::need<float>(slots * moe.hidden) + Scratch::need<float>(moe.shared ? tokens * moe.hidden : 0);
  }

  // The whole block. May be left behind as loops.
  static void run(const std::shared_ptr<Pass>& pass) {
    Pass& p = *pass;
    p.add_items(p.first_, Kind::router, p.moe_.router, 0, 0, p.tokens_, 1.0);
    if (p.moe_.shared)
      p.add_items(p.first_, Kind::shared_up, p.moe_.shared_up, 0, 0, p.tokens_,
                  p.target(double(tiles_of(p.tokens_) * p.moe_.shared_up.layout.blocks())));
    const bool few = p.tokens_ <= kFewTokens;
    std::vector<Phase> phases{p.items_of(p.first_)};
    if (!few) phases.push_back(p.routes());
    phases.push_back({1, one, [&p, few](int64_t) {
                        if (few) p.route(0, p.tokens_);
                        p.sort(true);
                      }});
    phases.push_back(p.items_of(p.second_));
    phases.push_back(p.items_of(p.third_));
    const int64_t pieces = divide_up(p.moe_.hidden, p.slots_ * p.moe_.hidden <= kAddedAlone ? p.moe_.hidden : kColumns);
    const int64_t columns = divide_up(p.moe_.hidden, pieces), all = divide_up(p.tokens_, kFewTokens) * pieces;
    phases.push_back({all, [all] { return all; },
                      [&p, pieces, columns](int64_t i) {
                        const int64_t begin = i / pieces * kFewTokens, column = i % pieces * columns;
                        p.combine(begin, std::min(p.tokens_, begin + kFewTokens), column,
                                  std::min(p.moe_.hidden, column + columns));
                      }});
    run_phases(pass, std::move(phases), true);
  }

 private:
  // A loop; the next loop begins at its end. Crews get the number of `parts`, which are reused for more work.
  struct Phase {
    int64_t parts;
    std::function<int64_t()> count;  // amount of work; known at the end of the previous phase
    std::function<void(int64_t)> run;
  };
  static int64_t one() { return 1; }

  Phase items_of(const std::vector<Item>& items) {
    return {items.empty() ? threads_ * kItemsPerThread : int64_t(items.size()),
            [&items] { return int64_t(items.size()); }, [this, &items](int64_t i) { run_item(items[size_t(i)]); }};
  }
  Phase routes() {
    const int64_t pieces = divide_up(tokens_, kFewTokens);
    return {pieces, [pieces] { return pieces; },
            [this](int64_t i) { route(i * kFewTokens, std::min(tokens_, (i + 1) * kFewTokens)); }};
  }

  static void settle() {
    if (Crew* crew = Crew::current()) crew->drain();
  }

  // `many`: true if other threads are worth waking.
  static void run_phases(const std::shared_ptr<Pass>& pass, std::vector<Phase> phases, bool many) {
    if (Crew* crew = Crew::current()) {
      for (Phase& phase : phases) {
        const int64_t parts = phase.parts;
        crew->later(parts, [pass, parts, phase = std::move(phase)](int64_t part) {
          const int64_t count = phase.count();
          for (int64_t i = part; i < count; i += parts) phase.run(i);
          release_sums();
        });
      }
      return;
    }
    const int threads = many ? pass->threads_ : 1;
    std::vector<std::atomic<int64_t>> next(phases.size());
    std::atomic<int64_t> waited{0};
    const int64_t began = now_ns();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      int64_t ended = began, mine = omp_get_thread_num() > 0 ? now_ns() - began : 0;
      for (size_t number = 0; number < phases.size(); ++number) {
        const Phase& phase = phases[number];
        const int64_t count = phase.count();
        for (int64_t i; (i = next[number].fetch_add(1, std::memory_order_relaxed)) < count;) phase.run(i);
        ended = now_ns();
#pragma omp barrier
        mine += now_ns() - ended;
      }
      release_sums();
      waited.fetch_add(mine, std::memory_order_relaxed);
    }
    if (threads > 1) waits.add(int64_t(phases.size()) + 1, waited.load());
  }

  // --- items ---

  static int64_t tiles_of(int64_t rows) { return divide_up(rows, kRows); }

  // Tiles times blocks per item, so that there are several items for each thread.
  double target(double cost) const { return std::max(1.0, cost / double(threads_ * kItemsPerThread)); }

  void add_items(std::vector<Item>& items, Kind kind, const Matrix& matrix, int64_t expert, int64_t begin, int64_t end,
                 double target) {
    const int64_t chunk = chunk_of(end - begin, matrix.layout.inputs * int64_t(sizeof(X)));
    const int64_t blocks = matrix.layout.blocks();
    for (int64_t row = begin; row < end; row += chunk) {
      const int64_t last = std::min(end, row + chunk);
      const double cost = double(tiles_of(last - row) * blocks);
      const int64_t parts = std::clamp<int64_t>(int64_t(cost / target + 0.5), 1, std::max<int64_t>(1, blocks));
      for (int64_t part = 0; part < parts; ++part)
        items.push_back({kind, int32_t(expert), row, last, blocks * part / parts, blocks * (part + 1) / parts});
    }
  }

  void run_item(const Item& item) {
    switch (item.kind) {
      case Kind::router:
        return route_logits(item);
      case Kind::shared_up:
        return multiply<F>(moe_.shared_up, item, x_ + item.row_begin * x_stride_, x_stride_, moe_.activation,
                           shared_act_ + item.row_begin * moe_.shared, moe_.shared);
      case Kind::up: {
        const auto [rows, stride] = gather(item);
        return multiply<F>(moe_.up, item, rows, stride, moe_.activation, act_ + item.row_begin * moe_.intermediate,
                           moe_.intermediate);
      }
      case Kind::down:
        return multiply<F>(moe_.down, item, act_ + item.row_begin * moe_.intermediate, moe_.intermediate,
                           Activation::none, made_ + item.row_begin * moe_.hidden, moe_.hidden);
      case Kind::shared_down:
        return multiply<F>(moe_.shared_down, item, shared_act_ + item.row_begin * moe_.shared, moe_.shared,
                           Activation::none, shared_made_ + item.row_begin * moe_.hidden, moe_.hidden);
    }
  }

  // Rows x of an item times its blocks; x and out begin at the item's first row.
  template <class Format, class Out>
  void multiply(const Matrix& matrix, const Item& item, const typename Format::X* x, int64_t x_stride,
                Activation activation, Out* out, int64_t out_stride) const {
    using Given = typename Format::X;
    const int64_t first = item.expert * matrix.layout.rows, rows = item.row_end - item.row_begin;
    const uint8_t* weights =
        static_cast<const uint8_t*>(matrix.packed->const_data_ptr()) + item.expert * matrix.bytes();
    const Product<Given, Out> product{matrix.layout,
                                      x,
                                      rows,
                                      x_stride,
                                      weights,
                                      matrix.bias ? matrix.bias->template const_data_ptr<Given>() + first : nullptr,
                                      matrix.scales ? matrix.scales->template const_data_ptr<float>() + first : nullptr,
                                      activation,
                                      out,
                                      out_stride,
                                      moe_.limit,
                                      moe_.alpha,
                                      matrix.coding};
    const int64_t bytes = block_bytes<Format>(matrix.coding, matrix.layout.inputs);
    const auto summed = for_rows(product, 0, rows);
    Finish finish;
    for (int64_t block = item.block_begin; block < item.block_end; ++block) {
      prepare(product, block, finish);
      run_block<Format>(summed, weights + block * bytes, finish, 0, rows, block * matrix.layout.width(),
                        block + 1 < item.block_end ? weights + (block + 1) * bytes : nullptr);
    }
  }

  // x of an expert's slots as neighbours: {first row, stride}.
  std::pair<const X*, int64_t> gather(const Item& item) const {
    const int64_t rows = item.row_end - item.row_begin, hidden = moe_.hidden, k = rule_.top_k;
    if (rows == 1) return {x_ + order_[item.row_begin] / k * x_stride_, x_stride_};
    static thread_local std::vector<X> memory;
    if (int64_t(memory.size()) < rows * hidden) memory.resize(size_t(rows * hidden));
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(memory.data() + r * hidden, x_ + order_[item.row_begin + r] / k * x_stride_,
                  size_t(hidden) * sizeof(X));
    return {memory.data(), hidden};
  }

  // --- the choice ---

  // In bf16 if the router's weights are packed in bf16 (exactly), otherwise on widened x.
  void route_logits(const Item& item) {
    float* out = logits_ + item.row_begin * width_;
    const X* x = x_ + item.row_begin * x_stride_;
    if constexpr (std::is_same_v<X, float>) {
      multiply<F32>(moe_.router, item, x, x_stride_, Activation::none, out, width_);
    } else {
      if (moe_.router.packed->dtype() == Dtype::bf16)
        return multiply<Bf16>(moe_.router, item, x, x_stride_, Activation::none, out, width_);
      const int64_t rows = item.row_end - item.row_begin, hidden = moe_.hidden;
      static thread_local std::vector<float> memory;
      if (int64_t(memory.size()) < rows * hidden) memory.resize(size_t(rows * hidden));
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < hidden; ++i) memory[size_t(r * hidden + i)] = widen(x[r * x_stride_ + i]);
      multiply<F32>(moe_.router, item, memory.data(), hidden, Activation::none, out, width_);
    }
  }

  void route(int64_t begin, int64_t end) {
    static thread_local std::vector<float> scratch;
    scratch.resize(size_t(2 * rule_.experts + divide_up(rule_.groups, 4)));
    const int64_t k = rule_.top_k;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t* fixed = ids_ ? moe_.table->const_data_ptr<int64_t>() + ids_[token] * k : nullptr;
      route_token(rule_, logits_ + token * width_, fixed, chosen_ + token * k, weights_ + token * k, scratch.data());
    }
  }

  // Sorts slots by expert, then by token, without slots of experts elsewhere; makes the items of all experts.
  void sort(bool with_shared) {
    const int64_t experts = moe_.up.matrices;
    std::vector<int64_t> begin(size_t(experts) + 1, 0);
    for (int64_t slot = 0; slot < slots_; ++slot)
      if (chosen_[slot] >= 0) ++begin[size_t(chosen_[slot]) + 1];
    int64_t tiles = 0;
    for (int64_t expert = 0; expert < experts; ++expert) {
      tiles += tiles_of(begin[size_t(expert) + 1]);
      begin[size_t(expert) + 1] += begin[size_t(expert)];
    }
    const double up = target(double(tiles * moe_.up.layout.blocks()));
    const double down = target(double(tiles * moe_.down.layout.blocks()));
    for (int64_t expert = 0; expert < experts; ++expert) {
      const int64_t first = begin[size_t(expert)], last = begin[size_t(expert) + 1];
      if (first == last) continue;
      add_items(second_, Kind::up, moe_.up, expert, first, last, up);
      add_items(third_, Kind::down, moe_.down, expert, first, last, down);
    }
    if (with_shared && moe_.shared) add_items(third_, Kind::shared_down, moe_.shared_down, 0, 0, tokens_, down);
    for (int64_t slot = 0; slot < slots_; ++slot) {
      place_[slot] = -1;
      if (chosen_[slot] < 0) continue;
      const int64_t at = begin[size_t(chosen_[slot])]++;
      order_[at] = int32_t(slot);
      place_[slot] = int32_t(at);
    }
  }

  // --- the end ---

  float shared_gate(int64_t token) const { return 1.0f / (1.0f + std::exp(-logits_[token * width_ + rule_.experts])); }

  // Writes the weighted sum of one token's local experts, in top-k order; 0 without any.
  void add_up(int64_t token, X* out) const {
    const int64_t k = rule_.top_k, hidden = moe_.hidden;
    const int32_t* place = place_ + token * k;
    const float* weight = weights_ + token * k;
    int64_t first = 0;
    while (first < k && place[first] < 0) ++first;
    over_lanes(hidden, [&](int64_t at, int lanes) {
      vf sum = splat(0.0f);
      if (first < k) sum = load_n(made_ + place[first] * hidden + at, lanes) * splat(weight[first]);
      for (int64_t j = first + 1; j < k; ++j)
        if (place[j] >= 0) sum = fma(load_n(made_ + place[j] * hidden + at, lanes), splat(weight[j]), sum);
      store_n(out + token * hidden + at, sum, lanes);
    });
  }

  // Writes the output of each of one token's experts; 0 for experts elsewhere.
  void lay_out(int64_t token, float* out) const {
    const int64_t k = rule_.top_k, hidden = moe_.hidden;
    for (int64_t slot = token * k; slot < (token + 1) * k; ++slot) {
      float* to = out + slot * hidden;
      if (place_[slot] < 0)
        std::fill(to, to + hidden, 0.0f);
      else
        std::memcpy(to, made_ + place_[slot] * hidden, size_t(hidden) * sizeof(float));
    }
  }

  void combine(int64_t begin, int64_t end, int64_t column_begin, int64_t column_end) const {
    const int64_t k = rule_.top_k, hidden = moe_.hidden;
    for (int64_t token = begin; token < end; ++token) {
      const int32_t* place = place_ + token * k;
      const float* weight = weights_ + token * k;
      const float gate = moe_.gated_shared ? shared_gate(token) : 1.0f;
      over_lanes(column_end - column_begin, [&](int64_t i, int lanes) {
        const int64_t at = column_begin + i;
        vf sum = load_n(made_ + place[0] * hidden + at, lanes) * splat(weight[0]);
        for (int64_t j = 1; j < k; ++j) sum = fma(load_n(made_ + place[j] * hidden + at, lanes), splat(weight[j]), sum);
        if (moe_.shared) sum = fma(load_n(shared_made_ + token * hidden + at, lanes), splat(gate), sum);
        store_n(out_ + token * hidden + at, sum, lanes);
      });
    }
  }

  const Moe& moe_;
  const Rule& rule_;
  const X* x_;
  int64_t x_stride_;
  const int64_t* ids_;
  int64_t tokens_;
  X* out_;
  int64_t width_;  // width of a row of logits
  int64_t slots_;
  int threads_;
  float *logits_, *weights_, *made_, *shared_made_;
  int32_t *chosen_, *order_, *place_;  // order: slot at a place; place: place of a slot
  X *act_, *shared_act_;
  std::vector<Item> first_, second_, third_;
};

// Calls `run(pass, first token)` for parts of x's tokens, so that memory stays bounded.
template <class F, class Run>
void in_parts(const Moe& moe, const Tensor& x, const int64_t* ids, typename F::X* out, Run run) {
  using X = typename F::X;
  if (x.size(0) == 0) return;
  static thread_local Scratch scratch;
  const int64_t row = (moe.rule.top_k + (moe.shared ? 1 : 0)) * moe.hidden * int64_t(sizeof(float));
  const int64_t most = std::max<int64_t>(kFewTokens, kMadeBytes / row);
  const int64_t parts = divide_up(x.size(0), most), part = divide_up(x.size(0), parts);
  for (int64_t begin = 0; begin < x.size(0); begin += part) {
    const int64_t tokens = std::min(part, x.size(0) - begin);
    if (Crew* crew = Crew::current(); crew && !scratch.holds(Pass<F>::bytes(moe, tokens))) crew->drain();
    const auto pass = std::make_shared<Pass<F>>(moe, x.const_data_ptr<X>() + begin * x.stride(0), x.stride(0),
                                                ids ? ids + begin : nullptr, tokens,
                                                out ? out + begin * moe.hidden : nullptr, scratch);
    run(pass, begin);
  }
}

// The same with the format of the experts' weights.
template <class Run>
void by_format(const Moe& moe, const Tensor& x, const int64_t* ids, Tensor* out, Run run) {
  const bool int8 = moe.up.int8() || moe.down.int8();  // coded matrices have no format
  const auto as = [&]<class F>(F) {
    in_parts<F>(moe, x, ids, out ? out->mutable_data_ptr<typename F::X>() : nullptr, run);
  };
  if (x.dtype() == Dtype::bf16)
    int8 ? as(Int8Bf16()) : as(Bf16());
  else
    int8 ? as(Int8F32()) : as(F32());
}

// x [T, hidden] in bf16 or float32, matching the weights; returns contiguous rows.
Tensor checked(const Tensor& given, const Moe& moe) {
  WEFT_CHECK(given.dim() == 2 && given.size(1) == moe.hidden, "moe: x must be [tokens, ", moe.hidden, "]");
  const bool narrow = given.dtype() == Dtype::bf16;
  WEFT_CHECK(narrow || given.dtype() == Dtype::f32, "moe: x must be bfloat16 or float32");
  for (const Matrix* matrix : {&moe.up, &moe.down, &moe.shared_up, &moe.shared_down})
    WEFT_CHECK(!matrix->packed || matrix->packed->dtype() == Dtype::u8 || matrix->packed->dtype() == given.dtype(),
               "moe: x is ", given.dtype(), ", and the packed weights are for another dtype");
  WEFT_CHECK(narrow || moe.router.packed->dtype() == Dtype::f32, "moe: the router is packed for bfloat16");
  for (const Matrix* matrix : {&moe.up, &moe.down})
    WEFT_CHECK(!matrix->bias || matrix->bias->dtype() == given.dtype(), "moe: biases of another dtype");
  return in_order(given, given.stride(1) == 1 || moe.hidden <= 1);
}

// The ids of `tokens` tokens if experts come from a table; otherwise nothing.
Tensor checked_ids(const Optional& ids, const Moe& moe, int64_t tokens) {
  if (!moe.table) return {};
  WEFT_CHECK(ids && ids->dtype() == Dtype::i64 && ids->dim() == 1 && ids->size(0) == tokens,
             "moe: the token ids must be int64 [tokens]");
  const Tensor list = in_order(*ids);
  const int64_t* id = list.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < list.numel(); ++i)
    WEFT_CHECK_INDEX(id[i] >= 0 && id[i] < moe.table->size(0), "token id ", id[i], " is not in the table");
  return list;
}

const int64_t* data_of(const Tensor& ids) { return ids.defined() ? ids.const_data_ptr<int64_t>() : nullptr; }

}  // namespace

std::shared_ptr<const Moe> make_moe(const MoeSpec& spec, MoeTensors tensors) {
  return std::make_shared<const Moe>(spec, std::move(tensors));
}

int64_t nbytes(const Moe& moe) { return moe.nbytes(); }

// x [T, hidden] in bf16 or float32, matching the weights; ids int64 [T], read if experts come from a table.
Tensor moe(const Tensor& given, const Optional& ids, const Moe& moe) {
  WEFT_CHECK(moe.up.matrices == moe.rule.experts, "moe: ", moe.up.matrices, " of ", moe.rule.experts,
             " experts are here");
  const Tensor x = checked(given, moe);
  Tensor out = empty_tensor({x.size(0), moe.hidden}, x.dtype());
  if (x.size(0) == 0) return out;
  const Tensor list = checked_ids(ids, moe, x.size(0));
  by_format(moe, x, data_of(list), &out, []<class P>(const std::shared_ptr<P>& pass, int64_t) { P::run(pass); });
  return out;
}

// Returns experts int64 [T, k] (global numbers), weights float32 [T, k], and the shared expert's factor float32 [T, 1],
// or [T, 0] without a gate.
std::tuple<Tensor, Tensor, Tensor> moe_route(const Tensor& given, const Optional& ids, const Moe& moe) {
  const Tensor x = checked(given, moe);
  const int64_t k = moe.rule.top_k;
  Tensor chosen = empty_tensor({x.size(0), k}, Dtype::i64);
  Tensor weights = empty_tensor({x.size(0), k}, Dtype::f32);
  Tensor gates = empty_tensor({x.size(0), moe.gated_shared ? 1 : 0}, weights.dtype());
  if (x.size(0) > 0) {
    const Tensor list = checked_ids(ids, moe, x.size(0));
    int64_t* to = chosen.mutable_data_ptr<int64_t>();
    float *weight = weights.mutable_data_ptr<float>(), *gate = gates.mutable_data_ptr<float>();
    by_format(moe, x, data_of(list), nullptr, [&]<class P>(const std::shared_ptr<P>& pass, int64_t begin) {
      P::run_route(pass, to + begin * k, weight + begin * k, gate + begin);
    });
  }
  return {chosen, weights, gates};
}

// x [T, hidden]; places int64 [T, k] of local experts, -1: elsewhere. With scales float32 [T, k]: sums [T, 1, hidden]
// in x's dtype. Without scales: float32 [T, k, hidden].
Tensor moe_part(const Tensor& given, const Tensor& given_places, const Optional& given_scales, const Moe& moe) {
  const Tensor x = checked(given, moe);
  const int64_t k = moe.rule.top_k;
  WEFT_CHECK(given_places.dtype() == Dtype::i64 && given_places.dim() == 2 && given_places.size(0) == x.size(0) &&
                 given_places.size(1) == k,
             "moe: places must be int64 [tokens, ", k, "]");
  WEFT_CHECK(!given_scales || (given_scales->dtype() == Dtype::f32 && given_scales->sizes() == given_places.sizes()),
             "moe: scales must be float32 [tokens, ", k, "]");
  const Tensor places = given_places.contiguous(), scales = given_scales ? given_scales->contiguous() : Tensor();
  const int64_t* place = places.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < places.numel(); ++i)
    WEFT_CHECK_INDEX(place[i] >= -1 && place[i] < moe.up.matrices, "moe: place ", place[i], " of ", moe.up.matrices);
  const float* scale = scales.defined() ? scales.const_data_ptr<float>() : nullptr;
  const bool sums = scales.defined();
  Tensor out =
      sums ? empty_tensor({x.size(0), 1, moe.hidden}, x.dtype()) : empty_tensor({x.size(0), k, moe.hidden}, Dtype::f32);
  const int64_t row = (sums ? 1 : k) * moe.hidden * int64_t(out.element_size());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  by_format(moe, x, nullptr, nullptr, [&]<class P>(const std::shared_ptr<P>& pass, int64_t begin) {
    P::run_part(pass, {place + begin * k, scale ? scale + begin * k : nullptr, to + begin * row});
  });
  return out;
}

// Return the shared expert of x [T, hidden]: float32 [T, hidden], without its gate.
Tensor moe_shared(const Tensor& given, const Moe& moe) {
  WEFT_CHECK(moe.shared, "moe: there is no shared expert");
  const Tensor x = checked(given, moe);
  Tensor out = empty_tensor({x.size(0), moe.hidden}, Dtype::f32);
  float* to = out.mutable_data_ptr<float>();
  by_format(moe, x, nullptr, nullptr, [&]<class P>(const std::shared_ptr<P>& pass, int64_t begin) {
    P::run_shared(pass, to + begin * moe.hidden);
  });
  return out;
}

namespace {

template <class T, class X>
void finish(const Tensor& total, const float* scales, const float* shared, const float* gates, X* out) {
  const int64_t k = total.size(1), hidden = total.size(2);
  const T* made = total.const_data_ptr<T>();
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, k * hidden));
  spread(total.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* from = made + token * k * hidden;
      const float gate = gates ? gates[token] : 1.0f;
      over_lanes(hidden, [&](int64_t at, int lanes) {
        vf sum = load_n(from + at, lanes);
        if (scales) {
          sum = sum * splat(scales[token * k]);
          for (int64_t j = 1; j < k; ++j)
            sum = fma(load_n(from + j * hidden + at, lanes), splat(scales[token * k + j]), sum);
        }
        if (shared) sum = fma(load_n(shared + token * hidden + at, lanes), splat(gate), sum);
        store_n(out + token * hidden + at, sum, lanes);
      });
    }
  });
}

}  // namespace

// Returns the block's output [T, hidden] in `dtype`. total [T, A, hidden]: sums (A = 1, in `dtype`) or, with scales
// float32 [T, A], separate experts (float32); shared float32 [T, hidden], gates float32 [T, 1 or 0].
Tensor moe_finish(const Tensor& given, const Optional& scales, const Optional& shared, const Optional& gates,
                  Dtype dtype) {
  WEFT_CHECK(given.dim() == 3 && given.size(1) > 0 && (scales || given.size(1) == 1),
             "moe: total must be [T, A, hidden]");
  WEFT_CHECK(dtype == Dtype::f32 || dtype == Dtype::bf16, "moe: bfloat16 or float32");
  WEFT_CHECK(given.dtype() == (scales ? Dtype::f32 : dtype), "moe: total is of another dtype");
  const Tensor total = given.contiguous();
  Tensor out = empty_tensor({total.size(0), total.size(2)}, dtype);
  const auto floats = [&](const Optional& of, int64_t count, const char* what) -> Tensor {
    if (!of || of->numel() == 0) return {};
    WEFT_CHECK(of->dtype() == Dtype::f32 && of->numel() == count, "moe: ", what, " of another shape or dtype");
    return of->contiguous();
  };
  const Tensor by = floats(scales, total.size(0) * total.size(1), "scales"),
               more = floats(shared, out.numel(), "shared"), gate = floats(gates, total.size(0), "gates");
  if (out.numel() == 0) return out;
  const auto data = [](const Tensor& of) { return of.defined() ? of.const_data_ptr<float>() : nullptr; };
  if (dtype == Dtype::f32)
    finish<float>(total, data(by), data(more), data(gate), out.mutable_data_ptr<float>());
  else if (scales)
    finish<float>(total, data(by), data(more), data(gate), out.mutable_data_ptr<bf16>());
  else
    finish<bf16>(total, data(by), data(more), data(gate), out.mutable_data_ptr<bf16>());
  return out;
}

}  // namespace weft
