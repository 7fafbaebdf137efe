// Schemas of the operators declared in operators.h and moe.h: `torch.ops.weft_cpu`. In one file, because torch's
// headers for schemas take longer to compile than most kernels. (program.cpp needs the headers anyway and declares
// Program.)
#include "moe.h"
#include "operators.h"

#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace weft {

Tensor empty_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }

namespace {

constexpr auto kCpu = c10::DispatchKey::CPU;

void describe_attention(torch::Library& m) {
  m.def(
      "attend(Tensor q, Tensor(a!) out, Tensor cache, Tensor q_offsets, Tensor starts, Tensor table, int window, "
      "float scale, int engine=0, Tensor? sinks=None, Tensor? scales=None, float softcap=0, Tensor? ends=None) -> ()");
  m.impl("attend", kCpu, TORCH_FN(attend_grouped));
  m.def(
      "sparse_attend(Tensor q, Tensor(a!) out, Tensor q_offsets, Tensor starts, Tensor? entries, Tensor? entry_table, "
      "int window, Tensor? groups, Tensor? group_table, int ratio, Tensor? chosen, Tensor? sinks, float scale, "
      "int engine=0) -> ()");
  m.def(
      "sparse_select(Tensor q, Tensor weights, Tensor cache, Tensor q_offsets, Tensor starts, Tensor table, int ratio, "
      "int top, int engine=0) -> Tensor");
  m.impl("sparse_attend", kCpu, TORCH_FN(attend::sparse_attend));
  m.impl("sparse_select", kCpu, TORCH_FN(attend::sparse_select));
  m.def(
      "compress_groups(Tensor sources, Tensor(a!) groups, Tensor q_offsets, Tensor starts, Tensor table, "
      "Tensor writes, Tensor cos, Tensor sin, Tensor bias, Tensor[] norms, int ratio, int overlap, float eps) -> ()");
  m.impl("compress_groups", kCpu, TORCH_FN(compress_groups));
  m.def(
      "latent_rope_cache(Tensor joined, Tensor? q_weight, Tensor weight, float eps, Tensor cos, Tensor sin, "
      "bool interleaved, Tensor(a!) cache, Tensor writes, Tensor(b!)? scales=None, Tensor(c!)? rotated=None) -> "
      "Tensor");
  m.def(
      "latent_absorbed(Tensor q, Tensor cos, Tensor sin, bool interleaved, Tensor(a!) out, Tensor cache, "
      "Tensor q_offsets, Tensor starts, Tensor table, Tensor keys, Tensor values, int lora, int window, float scale, "
      "int engine=0, Tensor? scales=None, Tensor? rotated=None, Tensor? more=None, Tensor(b!)? sums=None) -> ()");
  m.def(
      "latent_expanded(Tensor q, Tensor cos, Tensor sin, bool interleaved, Tensor(a!) out, Tensor cache, "
      "Tensor q_offsets, Tensor starts, Tensor table, Tensor keys, Tensor values, int lora, int window, float scale, "
      "int engine=0, int budget=0, Tensor? scales=None, Tensor? rotated=None) -> ()");
  m.def("latent_multiply(Tensor x, Tensor packed, int outputs) -> Tensor");
  m.impl("latent_multiply", kCpu, TORCH_FN(latent_multiply));
  m.impl("latent_rope_cache", kCpu, TORCH_FN(latent_rope_cache));
  m.impl("latent_absorbed", kCpu, TORCH_FN(attend::latent_absorbed));
  m.impl("latent_expanded", kCpu, TORCH_FN(attend::latent_expanded));
  m.def(
      "delta_net(Tensor qkvz, Tensor gates, Tensor(a!) out, Tensor(b!) conv_q, Tensor(c!) conv_k, Tensor(d!) conv_v, "
      "Tensor(e!) state, Tensor taps, Tensor rate, Tensor bias, Tensor norm, float eps, Tensor q_offsets, "
      "Tensor starts, Tensor slots, Tensor live, bool each) -> ()");
  m.def("sigmoid_gate(Tensor x, Tensor gate) -> Tensor");
  m.impl("delta_net", kCpu, TORCH_FN(delta_net));
  m.impl("sigmoid_gate", kCpu, TORCH_FN(sigmoid_gate));
}

using Optional = std::optional<Tensor>;

// Operators take a coding as four numbers by keyword: an object as argument adds 10 us to a call from Python.
void describe_coded(torch::Library& m) {
  m.def(
      "linear_coded(Tensor x, Tensor packed, int rows, Tensor? bias, Tensor? factors, int activation, *, "
      "int numbers, int scales, int zeros, int group) -> Tensor");
  m.impl("linear_coded", kCpu,
         [](const Tensor& x, const Tensor& packed, int64_t rows, const Optional& bias, const Optional& factors,
            int64_t activation, int64_t numbers, int64_t scales, int64_t zeros, int64_t group) {
           return linear_coded(x, packed, rows, bias, factors, activation, Coding::of(numbers, scales, zeros, group));
         });
  // Entry i of each list is for part i.
  m.def(
      "linear_parts(Tensor x, Tensor[] packed, int[] rows, Tensor? bias, Tensor? factors, *, "
      "int[] numbers, int[] scales, int[] zeros, int[] group) -> Tensor");
  m.impl("linear_parts", kCpu,
         [](const Tensor& x, at::TensorList packed, at::IntArrayRef rows, const Optional& bias, const Optional& factors,
            at::IntArrayRef numbers, at::IntArrayRef scales, at::IntArrayRef zeros, at::IntArrayRef group) {
           const size_t parts = packed.size();
           TORCH_CHECK(
               numbers.size() == parts && scales.size() == parts && zeros.size() == parts && group.size() == parts,
               "a coding for each part");
           std::vector<Coding> codings;
           for (size_t i = 0; i < parts; ++i) codings.push_back(Coding::of(numbers[i], scales[i], zeros[i], group[i]));
           return linear_parts(x, packed, rows, bias, factors, codings);
         });
  m.def(
      "pack_coded(Tensor values, Tensor factors, Tensor? points, int inputs, bool gated, *, "
      "int numbers, int scales, int zeros, int group) -> Tensor");
  m.impl("pack_coded", kCpu,
         [](const Tensor& values, const Tensor& factors, const Optional& points, int64_t inputs, bool gated,
            int64_t numbers, int64_t scales, int64_t zeros, int64_t group) {
           return pack_coded(values, factors, points, inputs, gated, Coding::of(numbers, scales, zeros, group));
         });
  m.def(
      "embedding_coded(Tensor ids, Tensor packed, int rows, int inputs, Tensor? factors, ScalarType dtype, *, "
      "int numbers, int scales, int zeros, int group) -> Tensor");
  m.impl("embedding_coded", kCpu,
         [](const Tensor& ids, const Tensor& packed, int64_t rows, int64_t inputs, const Optional& factors,
            at::ScalarType type, int64_t numbers, int64_t scales, int64_t zeros, int64_t group) {
           return embedding_coded(ids, packed, rows, inputs, factors, Coding::of(numbers, scales, zeros, group), type);
         });
}

void describe_products(torch::Library& m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm_(Tensor(a!) x, Tensor delta, Tensor weight, float eps) -> Tensor");
  m.def(
      "qkv_rope_cache(Tensor qkv, int heads, int kv_heads, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, "
      "Tensor sin, Tensor(a!) cache, Tensor writes, Tensor(b!)? scales=None) -> Tensor");
  m.def("gated(Tensor gate_up, int activation) -> Tensor");
  m.def(
      "low_rank(Tensor(a!) y, Tensor x, Tensor a, Tensor b, Tensor numbers, Tensor ranks, int[] spans) -> ()");
  m.impl("rms_norm", kCpu, TORCH_FN(rms_norm));
  m.impl("add_rms_norm_", kCpu, TORCH_FN(add_rms_norm_));
  m.impl("qkv_rope_cache", kCpu, TORCH_FN(qkv_rope_cache));
  m.impl("gated", kCpu, TORCH_FN(gated));
  m.impl("low_rank", kCpu, TORCH_FN(low_rank));
  m.def("linear(Tensor x, Tensor packed, int rows, Tensor? bias, Tensor? scales, int activation) -> Tensor");
  m.def("pack(Tensor weight, bool gated) -> Tensor");
  m.def("pack_int8(Tensor values, bool gated, bool for_bf16) -> Tensor");
  m.def("embedding(Tensor ids, Tensor packed, int rows, int inputs) -> Tensor");
  m.def("set_brgemm(bool value) -> bool", &set_brgemm);
  m.impl("linear", kCpu, TORCH_FN(linear));
  m.impl("pack", kCpu, TORCH_FN(pack));
  m.impl("pack_int8", kCpu, TORCH_FN(pack_int8));
  m.impl("embedding", kCpu, TORCH_FN(embedding));
  m.def("pack_bytes(Tensor values, bool gated) -> Tensor");
  m.impl("pack_bytes", kCpu, TORCH_FN(pack_bytes));
  m.def("pack_nibbles(Tensor values, Tensor scales, Tensor zeros, int inputs, bool gated) -> Tensor");
  m.impl("pack_nibbles", kCpu, TORCH_FN(pack_nibbles));
  m.def("pack_ggml(Tensor blocks, int inputs, bool gated, int kind, bool mapped) -> Tensor");
  m.def("weight_bytes(int[] sizes) -> Tensor", TORCH_FN(weight_bytes));
  m.impl("pack_ggml", kCpu, TORCH_FN(pack_ggml));
}

// Structs that Python makes by name (weft/ops/cpu/structs.py).

struct HeldCoding : torch::CustomClassHolder {
  HeldCoding(int64_t numbers, int64_t scales, int64_t zeros, int64_t group)
      : coding(Coding::of(numbers, scales, zeros, group)) {}
  const Coding coding;
};

struct HeldSpec : torch::CustomClassHolder, MoeSpec {};

struct HeldMatrix : torch::CustomClassHolder {
  HeldMatrix(Optional packed, Optional scales, Optional bias, std::optional<c10::intrusive_ptr<HeldCoding>> coding)
      : matrix{std::move(packed), std::move(scales), std::move(bias), coding ? (*coding)->coding : Coding{}} {}
  MoeMatrix matrix;
};

// Weights of a routed block, as an object for Python.
struct MoeWeights : torch::CustomClassHolder {
  using Given = c10::intrusive_ptr<HeldMatrix>;
  MoeWeights(const c10::intrusive_ptr<HeldSpec>& spec, const Given& router, const Given& up, const Given& down,
             const Given& shared_up, const Given& shared_down, Optional correction, Optional table)
      : moe(make_moe(*spec, {.router = router->matrix,
                             .up = up->matrix,
                             .down = down->matrix,
                             .shared_up = shared_up->matrix,
                             .shared_down = shared_down->matrix,
                             .correction = std::move(correction),
                             .table = std::move(table)})) {}
  int64_t nbytes() const { return weft::nbytes(*moe); }
  std::shared_ptr<const Moe> moe;
};

using Held = c10::intrusive_ptr<MoeWeights>;

void describe_moe(torch::Library& m) {
  m.class_<HeldCoding>("Coding").def(
      torch::init<int64_t, int64_t, int64_t, int64_t>(), "",
      {torch::arg("numbers"), torch::arg("scales"), torch::arg("zeros"), torch::arg("group")});
  m.class_<HeldSpec>("MoeSpec")
      .def(torch::init<>())
      .def_readwrite<int64_t>("hidden", &MoeSpec::hidden)
      .def_readwrite<int64_t>("experts", &MoeSpec::experts)
      .def_readwrite<int64_t>("local_experts", &MoeSpec::local_experts)
      .def_readwrite<int64_t>("top_k", &MoeSpec::top_k)
      .def_readwrite<int64_t>("intermediate", &MoeSpec::intermediate)
      .def_readwrite<int64_t>("shared_intermediate", &MoeSpec::shared_intermediate)
      .def_readwrite<bool>("gated_shared", &MoeSpec::gated_shared)
      .def_readwrite<int64_t>("activation", &MoeSpec::activation)
      .def_readwrite<double>("limit", &MoeSpec::limit)
      .def_readwrite<double>("alpha", &MoeSpec::alpha)
      .def_readwrite<int64_t>("scoring", &MoeSpec::scoring)
      .def_readwrite<bool>("renormalize", &MoeSpec::renormalize)
      .def_readwrite<int64_t>("groups", &MoeSpec::groups)
      .def_readwrite<int64_t>("top_groups", &MoeSpec::top_groups)
      .def_readwrite<bool>("top2", &MoeSpec::top2)
      .def_readwrite<double>("scale", &MoeSpec::scale);
  m.class_<HeldMatrix>("MoeMatrix")
      .def(torch::init<Optional, Optional, Optional, std::optional<c10::intrusive_ptr<HeldCoding>>>(), "",
           {torch::arg("packed"), torch::arg("scales"), torch::arg("bias"), torch::arg("coding")});
  using Given = MoeWeights::Given;
  m.class_<MoeWeights>("Moe")
      .def("nbytes", &MoeWeights::nbytes)
      .def(torch::init<c10::intrusive_ptr<HeldSpec>, Given, Given, Given, Given, Given, Optional, Optional>(), "",
           {torch::arg("spec"), torch::arg("router"), torch::arg("up"), torch::arg("down"), torch::arg("shared_up"),
            torch::arg("shared_down"), torch::arg("correction"), torch::arg("table")});
  m.def("moe(Tensor x, Tensor? ids, __torch__.torch.classes.weft_cpu.Moe weights) -> Tensor");
  m.def("moe_route(Tensor x, Tensor? ids, __torch__.torch.classes.weft_cpu.Moe weights) -> (Tensor, Tensor, Tensor)");
  m.def("moe_part(Tensor x, Tensor places, Tensor? scales, __torch__.torch.classes.weft_cpu.Moe weights) -> Tensor");
  m.def("moe_shared(Tensor x, __torch__.torch.classes.weft_cpu.Moe weights) -> Tensor");
  m.def("moe_finish(Tensor total, Tensor? scales, Tensor? shared, Tensor? gates, ScalarType dtype) -> Tensor");
  m.impl("moe", kCpu, [](const Tensor& x, const Optional& ids, const Held& held) { return moe(x, ids, *held->moe); });
  m.impl("moe_route", kCpu,
         [](const Tensor& x, const Optional& ids, const Held& held) { return moe_route(x, ids, *held->moe); });
  m.impl("moe_part", kCpu, [](const Tensor& x, const Tensor& places, const Optional& scales, const Held& held) {
    return moe_part(x, places, scales, *held->moe);
  });
  m.impl("moe_shared", kCpu, [](const Tensor& x, const Held& held) { return moe_shared(x, *held->moe); });
  m.impl("moe_finish", kCpu, TORCH_FN(moe_finish));
}

void describe_sampling(torch::Library& m) {
  m.def("greedy(Tensor logits, Tensor rows, int vocab, Tensor? words, Tensor? places) -> (Tensor, Tensor)");
  m.def(
      "sample(Tensor logits, Tensor rows, int vocab, Tensor temperature, Tensor min_p, Tensor seed, Tensor choice, "
      "Tensor position, Tensor? words, Tensor? places) -> (Tensor, Tensor)");
  m.def("allow_bits(Tensor logits, Tensor rows, int vocab, Tensor words, Tensor places) -> (Tensor, Tensor)");
  m.def(
      "end_decode_(Tensor logits, Tensor slots, int vocab, Tensor temperature, Tensor min_p, Tensor seed, "
      "Tensor choice, Tensor(a!) history, Tensor(b!) num_computed, Tensor(c!)? live) -> (Tensor, Tensor)");
  m.impl("end_decode_", kCpu, TORCH_FN(end_decode));
  m.impl("allow_bits", kCpu, TORCH_FN(allow_bits));
  m.impl("greedy", kCpu, TORCH_FN(greedy));
  m.impl("sample", kCpu, TORCH_FN(sample));
}

void describe_transfers(torch::Library& m) {
  m.def("ring_open(int fd, int rank, int[] pids, int bytes, float timeout, float spin) -> int", &ring_open);
  m.def("ring_abort(int ring) -> ()", &ring_abort);
  m.def("ring_close(int ring) -> ()", &ring_close);
  m.def("ring_times(bool keep) -> Tensor", &ring_times);
  m.def("ring_gather(Tensor x, int ring) -> Tensor");
  m.def("ring_sum(Tensor x, int ring) -> Tensor");
  m.def("ring_exchange(Tensor x, int[] sends, int[] receives, int ring) -> Tensor");
  m.impl("ring_gather", kCpu, &ring_gather);
  m.impl("ring_sum", kCpu, &ring_sum);
  m.impl("ring_exchange", kCpu, &ring_exchange);
  m.def("digest_spans(Tensor memory, Tensor spans, Tensor seeds) -> Tensor", &digest_spans);
  m.def("copy_spans(Tensor source, Tensor(a!) target, Tensor spans, Tensor seeds) -> Tensor", &copy_spans);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(weft_cpu, m) {
  m.def("capabilities() -> str[]", &capabilities);
  m.def("take_waits() -> int[]", &take_waits);
  m.def("set_crews(bool value, int alone=32768) -> bool", &set_crews);
  describe_attention(m);
  describe_coded(m);
  describe_products(m);
  describe_moe(m);
  describe_sampling(m);
  describe_transfers(m);
}

}  // namespace weft
