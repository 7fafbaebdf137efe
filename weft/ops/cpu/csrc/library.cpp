// Schemas of the operators declared in operators.h and moe.h: `torch.ops.weft_cpu`. The only source with torch's
// headers, because the headers take longer to compile than most kernels.
#include "boxed.h"
#include "program.h"

#include <torch/custom_class.h>

#include <utility>
#include <variant>

#include "amx.h"
#include "moe.h"
#include "operators.h"

#if WEFT_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {

bool amx_permitted() {
#if WEFT_AMX && defined(WEFT_EMULATED_AMX)
  return true;
#elif WEFT_AMX
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool given = syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  return given;
#else
  return false;
#endif
}

namespace {

using Optional = std::optional<Tensor>;

// Instruction sets of this build, and ATen features of this CPU.
std::vector<std::string> capabilities() {
  std::vector<std::string> found;
  if (WEFT_AVX2 || WEFT_AVX512) found.emplace_back("avx2");
  if (WEFT_AVX512) found.emplace_back("avx512");
  if (WEFT_AVX512_BF16) found.emplace_back("avx512_bf16");
  if (WEFT_NEON) found.emplace_back("neon");
  if (kWordRows) found.emplace_back("word_rows");
  if (WEFT_NEON_BF16) found.emplace_back("neon_bf16");
  if (amx_permitted()) found.emplace_back("amx_bf16");
  if (brgemm_works()) found.emplace_back("brgemm");
  return found;
}

void describe_attention(torch::Library& m) {
  add<attend_grouped>(
      m,
      "attend(Tensor q, Tensor(a!) out, Tensor cache, Tensor q_offsets, Tensor starts, Tensor table, int window, "
      "float scale, int engine=0, Tensor? sinks=None, Tensor? scales=None, float softcap=0, Tensor? ends=None) -> ()");
  add<attend::sparse_attend>(
      m,
      "sparse_attend(Tensor q, Tensor(a!) out, Tensor q_offsets, Tensor starts, Tensor? entries, Tensor? entry_table, "
      "int window, Tensor? groups, Tensor? group_table, int ratio, Tensor? chosen, Tensor? sinks, float scale, "
      "int engine=0, Tensor? entry_scales=None, Tensor? entry_exact=None, Tensor? group_scales=None, "
      "Tensor? group_exact=None) -> ()");
  add<attend::sparse_select>(
      m,
      "sparse_select(Tensor q, Tensor weights, Tensor cache, Tensor q_offsets, Tensor starts, Tensor table, int ratio, "
      "int top, int engine=0) -> Tensor");
  add<compress_groups>(
      m,
      "compress_groups(Tensor sources, Tensor(a!) groups, Tensor q_offsets, Tensor starts, Tensor table, "
      "Tensor writes, Tensor cos, Tensor sin, Tensor bias, Tensor[] norms, int ratio, int overlap, float eps, "
      "Tensor(b!)? scales=None, Tensor(c!)? exact=None) -> ()");
  add<latent_rope_cache>(
      m,
      "latent_rope_cache(Tensor joined, Tensor? q_weight, Tensor weight, float eps, Tensor cos, Tensor sin, "
      "bool interleaved, Tensor(a!) cache, Tensor writes, Tensor(b!)? scales=None, Tensor(c!)? rotated=None) -> "
      "Tensor");
  add<attend::latent_absorbed>(
      m,
      "latent_absorbed(Tensor q, Tensor cos, Tensor sin, bool interleaved, Tensor(a!) out, Tensor cache, "
      "Tensor q_offsets, Tensor starts, Tensor table, Tensor keys, Tensor values, int lora, int window, float scale, "
      "int engine=0, Tensor? scales=None, Tensor? rotated=None, Tensor? more=None, Tensor(b!)? sums=None) -> ()");
  add<attend::latent_expanded>(
      m,
      "latent_expanded(Tensor q, Tensor cos, Tensor sin, bool interleaved, Tensor(a!) out, Tensor cache, "
      "Tensor q_offsets, Tensor starts, Tensor table, Tensor keys, Tensor values, int lora, int window, float scale, "
      "int engine=0, int budget=0, Tensor? scales=None, Tensor? rotated=None) -> ()");
  add<latent_multiply>(m, "latent_multiply(Tensor x, Tensor packed, int outputs) -> Tensor");
  add<delta_net>(
      m,
      "delta_net(Tensor qkv, Tensor z, Tensor b, Tensor a, Tensor(a!) out, Tensor(b!) conv_q, Tensor(c!) conv_k, "
      "Tensor(d!) conv_v, Tensor(e!) state, Tensor taps, Tensor rate, Tensor bias, Tensor norm, float eps, "
      "float reach, float floor, bool squashed, Tensor q_offsets, Tensor starts, Tensor slots, Tensor live, bool each) "
      "-> ()");
  add<sigmoid_gate>(m, "sigmoid_gate(Tensor x, Tensor gate) -> Tensor");
  add<mamba>(
      m,
      "mamba(Tensor zxbcdt, Tensor(a!) out, Tensor(b!) conv_x, Tensor(c!) conv_b, Tensor(d!) conv_c, Tensor(e!) state, "
      "Tensor taps, Tensor? conv_bias, Tensor rate, Tensor step_bias, Tensor skip, Tensor? norm, int groups, "
      "int norm_groups, float eps, float low, float high, int finish, Tensor q_offsets, Tensor starts, Tensor slots, "
      "Tensor live, bool each) -> ()");
  add<mamba1_convolve>(
      m,
      "mamba1_convolve(Tensor x, Tensor(a!) out, Tensor(b!) conv, Tensor taps, Tensor? bias, Tensor q_offsets, "
      "Tensor starts, Tensor slots, Tensor live, bool each) -> ()");
  add<mamba1_scan>(
      m,
      "mamba1_scan(Tensor x, Tensor steps, Tensor b, Tensor c, Tensor z, Tensor(a!) out, Tensor(b!) state, "
      "Tensor rate, Tensor step_bias, Tensor skip, Tensor q_offsets, Tensor starts, Tensor slots, Tensor live, "
      "bool each) -> ()");
}

// Operators take a coding as four numbers by keyword: an object as argument adds 10 us to a call from Python.
Tensor linear_of(const Tensor& x, const Tensor& packed, int64_t rows, const Optional& bias, const Optional& factors,
                 int64_t activation, int64_t numbers, int64_t scales, int64_t zeros, int64_t group) {
  return linear_coded(x, packed, rows, bias, factors, activation, Coding::of(numbers, scales, zeros, group));
}

// Entry i of each list is for part i.
Tensor linear_parts_of(const Tensor& x, const std::vector<Tensor>& packed, Sizes rows, const Optional& bias,
                       const Optional& factors, Sizes numbers, Sizes scales, Sizes zeros, Sizes group) {
  const size_t parts = packed.size();
  WEFT_CHECK(numbers.size() == parts && scales.size() == parts && zeros.size() == parts && group.size() == parts,
             "a coding for each part");
  std::vector<Coding> codings;
  for (size_t i = 0; i < parts; ++i) codings.push_back(Coding::of(numbers[i], scales[i], zeros[i], group[i]));
  return linear_parts(x, packed, rows, bias, factors, codings);
}

Tensor pack_of(const Tensor& values, const Tensor& factors, const Optional& points, int64_t inputs, bool gated,
               int64_t numbers, int64_t scales, int64_t zeros, int64_t group) {
  return pack_coded(values, factors, points, inputs, gated, Coding::of(numbers, scales, zeros, group));
}

Tensor embedding_of(const Tensor& ids, const Tensor& packed, int64_t rows, int64_t inputs, const Optional& factors,
                    Dtype type, int64_t numbers, int64_t scales, int64_t zeros, int64_t group) {
  return embedding_coded(ids, packed, rows, inputs, factors, Coding::of(numbers, scales, zeros, group), type);
}

void describe_coded(torch::Library& m) {
  add<linear_of>(m,
                 "linear_coded(Tensor x, Tensor packed, int rows, Tensor? bias, Tensor? factors, int activation, *, "
                 "int numbers, int scales, int zeros, int group) -> Tensor");
  add<linear_parts_of>(m,
                       "linear_parts(Tensor x, Tensor[] packed, int[] rows, Tensor? bias, Tensor? factors, *, "
                       "int[] numbers, int[] scales, int[] zeros, int[] group) -> Tensor");
  add<pack_of>(m,
               "pack_coded(Tensor values, Tensor factors, Tensor? points, int inputs, bool gated, *, "
               "int numbers, int scales, int zeros, int group) -> Tensor");
  add<embedding_of>(
      m,
      "embedding_coded(Tensor ids, Tensor packed, int rows, int inputs, Tensor? factors, ScalarType dtype, *, "
      "int numbers, int scales, int zeros, int group) -> Tensor");
}

void describe_products(torch::Library& m) {
  add<rms_norm>(m, "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  add<add_rms_norm_>(m, "add_rms_norm_(Tensor(a!) x, Tensor delta, Tensor weight, float eps) -> Tensor");
  add<qkv_rope_cache>(
      m,
      "qkv_rope_cache(Tensor qkv, int heads, int kv_heads, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, "
      "Tensor sin, Tensor(a!) cache, Tensor writes, Tensor(b!)? scales=None) -> Tensor");
  add<gated>(m, "gated(Tensor gate_up, int activation) -> Tensor");
  add<low_rank>(
      m, "low_rank(Tensor(a!) y, Tensor x, Tensor a, Tensor b, Tensor numbers, Tensor ranks, int[] spans) -> ()");
  add<linear>(m, "linear(Tensor x, Tensor packed, int rows, Tensor? bias, Tensor? scales, int activation) -> Tensor");
  add<pack>(m, "pack(Tensor weight, bool gated) -> Tensor");
  add<pack_int8>(m, "pack_int8(Tensor values, bool gated, bool for_bf16) -> Tensor");
  add<embedding>(m, "embedding(Tensor ids, Tensor packed, int rows, int inputs) -> Tensor");
  add_anywhere<set_brgemm>(m, "set_brgemm(bool value) -> bool");
  add<pack_bytes>(m, "pack_bytes(Tensor values, bool gated, int group) -> Tensor");
  add<pack_nibbles>(m, "pack_nibbles(Tensor values, Tensor scales, Tensor zeros, int inputs, bool gated) -> Tensor");
  add<pack_ggml>(m, "pack_ggml(Tensor blocks, int inputs, bool gated, int kind, bool mapped) -> Tensor");
  add_anywhere<weight_bytes>(m, "weight_bytes(int[] sizes) -> Tensor");
}

// Structs that Python makes by name (weft/ops/cpu/structs.py).

struct HeldCoding : torch::CustomClassHolder {
  HeldCoding(int64_t numbers, int64_t scales, int64_t zeros, int64_t group)
      : coding(Coding::of(numbers, scales, zeros, group)) {}
  const Coding coding;
};

// Fields by name, in one call: a property of the class for each field takes seconds to compile.
struct HeldSpec : torch::CustomClassHolder, MoeSpec {
  using Field = std::variant<int64_t MoeSpec::*, bool MoeSpec::*, double MoeSpec::*>;

  HeldSpec(const std::vector<std::string>& names, const std::vector<double>& values) {
    WEFT_CHECK(names.size() == values.size(), "MoeSpec: a value for each name");
    for (size_t i = 0; i < names.size(); ++i) {
      const Field found = field(names[i]);
      if (const auto* integer = std::get_if<int64_t MoeSpec::*>(&found)) {
        WEFT_CHECK(values[i] == double(int64_t(values[i])), "MoeSpec: ", names[i], " is an 'int', not ", values[i]);
        this->** integer = int64_t(values[i]);
      } else if (const auto* flag = std::get_if<bool MoeSpec::*>(&found)) {
        this->** flag = values[i] != 0;
      } else {
        this->*std::get<double MoeSpec::*>(found) = values[i];
      }
    }
  }
  double get(const std::string& name) const {
    return std::visit([&](auto member) { return double(this->*member); }, field(name));
  }

 private:
  static Field field(const std::string& name) {
    static constexpr std::pair<const char*, Field> fields[] = {
        {"hidden", &MoeSpec::hidden},
        {"experts", &MoeSpec::experts},
        {"local_experts", &MoeSpec::local_experts},
        {"top_k", &MoeSpec::top_k},
        {"intermediate", &MoeSpec::intermediate},
        {"shared_intermediate", &MoeSpec::shared_intermediate},
        {"gated_shared", &MoeSpec::gated_shared},
        {"activation", &MoeSpec::activation},
        {"limit", &MoeSpec::limit},
        {"alpha", &MoeSpec::alpha},
        {"scoring", &MoeSpec::scoring},
        {"renormalize", &MoeSpec::renormalize},
        {"groups", &MoeSpec::groups},
        {"top_groups", &MoeSpec::top_groups},
        {"top2", &MoeSpec::top2},
        {"scale", &MoeSpec::scale},
    };
    for (const auto& [known, member] : fields)
      if (name == known) return member;
    WEFT_CHECK(false, "MoeSpec has no field ", name);
    __builtin_unreachable();
  }
};

std::optional<Tensor> held(const std::optional<at::Tensor>& given) {
  return given ? std::optional<Tensor>(owned(*given)) : std::nullopt;
}

struct HeldMatrix : torch::CustomClassHolder {
  using Given = std::optional<at::Tensor>;
  HeldMatrix(const Given& packed, const Given& scales, const Given& bias,
             const std::optional<c10::intrusive_ptr<HeldCoding>>& coding)
      : matrix{held(packed), held(scales), held(bias), coding ? (*coding)->coding : Coding{}} {}
  MoeMatrix matrix;
};

// Weights of a routed block, as an object for Python.
struct MoeWeights : torch::CustomClassHolder {
  using Given = c10::intrusive_ptr<HeldMatrix>;
  MoeWeights(const c10::intrusive_ptr<HeldSpec>& spec, const Given& router, const Given& up, const Given& down,
             const Given& shared_up, const Given& shared_down, const HeldMatrix::Given& correction,
             const HeldMatrix::Given& table)
      : moe(make_moe(*spec, {.router = router->matrix,
                             .up = up->matrix,
                             .down = down->matrix,
                             .shared_up = shared_up->matrix,
                             .shared_down = shared_down->matrix,
                             .correction = held(correction),
                             .table = held(table)})) {}
  int64_t nbytes() const { return weft::nbytes(*moe); }
  std::shared_ptr<const Moe> moe;
};

template <>
struct Given<Moe> {
  explicit Given(const c10::IValue& value) : weights(value.toCustomClass<MoeWeights>()) {}
  operator const Moe&() { return *weights->moe; }
  c10::intrusive_ptr<MoeWeights> weights;
};

void describe_moe(torch::Library& m) {
  m.class_<HeldCoding>("Coding").def(
      torch::init<int64_t, int64_t, int64_t, int64_t>(), "",
      {torch::arg("numbers"), torch::arg("scales"), torch::arg("zeros"), torch::arg("group")});
  m.class_<HeldSpec>("MoeSpec")
      .def(torch::init<std::vector<std::string>, std::vector<double>>())
      .def("get", &HeldSpec::get);
  m.class_<HeldMatrix>("MoeMatrix")
      .def(torch::init<HeldMatrix::Given, HeldMatrix::Given, HeldMatrix::Given,
                       std::optional<c10::intrusive_ptr<HeldCoding>>>(),
           "", {torch::arg("packed"), torch::arg("scales"), torch::arg("bias"), torch::arg("coding")});
  using Given = MoeWeights::Given;
  m.class_<MoeWeights>("Moe")
      .def("nbytes", &MoeWeights::nbytes)
      .def(torch::init<c10::intrusive_ptr<HeldSpec>, Given, Given, Given, Given, Given, HeldMatrix::Given,
                       HeldMatrix::Given>(),
           "",
           {torch::arg("spec"), torch::arg("router"), torch::arg("up"), torch::arg("down"), torch::arg("shared_up"),
            torch::arg("shared_down"), torch::arg("correction"), torch::arg("table")});
  add<moe>(m, "moe(Tensor x, Tensor? ids, __torch__.torch.classes.weft_cpu.Moe weights) -> Tensor");
  add<moe_route>(
      m, "moe_route(Tensor x, Tensor? ids, __torch__.torch.classes.weft_cpu.Moe weights) -> (Tensor, Tensor, Tensor)");
  add<moe_part>(
      m, "moe_part(Tensor x, Tensor places, Tensor? scales, __torch__.torch.classes.weft_cpu.Moe weights) -> Tensor");
  add<moe_shared>(m, "moe_shared(Tensor x, __torch__.torch.classes.weft_cpu.Moe weights) -> Tensor");
  add<moe_finish>(
      m, "moe_finish(Tensor total, Tensor? scales, Tensor? shared, Tensor? gates, ScalarType dtype) -> Tensor");
}

void describe_sampling(torch::Library& m) {
  add<greedy>(m, "greedy(Tensor logits, Tensor rows, int vocab, Tensor? words, Tensor? places) -> (Tensor, Tensor)");
  add<sample>(
      m,
      "sample(Tensor logits, Tensor rows, int vocab, Tensor temperature, Tensor min_p, Tensor seed, Tensor choice, "
      "Tensor position, Tensor? words, Tensor? places) -> (Tensor, Tensor)");
  add<allow_bits>(m,
                  "allow_bits(Tensor logits, Tensor rows, int vocab, Tensor words, Tensor places) -> (Tensor, Tensor)");
  add<end_decode>(m,
                  "end_decode_(Tensor logits, Tensor slots, int vocab, Tensor temperature, Tensor min_p, Tensor seed, "
                  "Tensor choice, Tensor(a!) history, Tensor(b!) num_computed, Tensor(c!)? live) -> (Tensor, Tensor)");
}

void describe_transfers(torch::Library& m) {
  add_anywhere<ring_open>(m, "ring_open(int fd, int rank, int[] pids, int bytes, float timeout, float spin) -> int");
  add_anywhere<ring_abort>(m, "ring_abort(int ring) -> ()");
  add_anywhere<ring_close>(m, "ring_close(int ring) -> ()");
  add_anywhere<ring_times>(m, "ring_times(bool keep) -> Tensor");
  add<ring_gather>(m, "ring_gather(Tensor x, int ring) -> Tensor");
  add<ring_sum>(m, "ring_sum(Tensor x, int ring) -> Tensor");
  add<ring_exchange>(m, "ring_exchange(Tensor x, int[] sends, int[] receives, int ring) -> Tensor");
  add_anywhere<digest_spans>(m, "digest_spans(Tensor memory, Tensor spans, Tensor seeds) -> Tensor");
  add_anywhere<copy_spans>(m, "copy_spans(Tensor source, Tensor(a!) target, Tensor spans, Tensor seeds) -> Tensor");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(weft_cpu, m) {
  add_anywhere<capabilities>(m, "capabilities() -> str[]");
  add_anywhere<take_waits>(m, "take_waits() -> int[]");
  add_anywhere<set_crews>(m, "set_crews(bool value, int alone=32768) -> bool");
  describe_attention(m);
  describe_coded(m);
  describe_products(m);
  describe_moe(m);
  describe_sampling(m);
  describe_transfers(m);
  describe_program(m);
}

}  // namespace weft
