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
      "float scale, int engine=0, Tensor? sinks=None, Tensor? scales=None) -> ()");
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
      "int engine=0, Tensor? scales=None, Tensor? rotated=None) -> ()");
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

void describe_products(torch::Library& m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm_(Tensor(a!) x, Tensor delta, Tensor weight, float eps) -> Tensor");
  m.def(
      "qkv_rope_cache(Tensor qkv, int heads, int kv_heads, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, "
      "Tensor sin, Tensor(a!) cache, Tensor writes, Tensor(b!)? scales=None) -> Tensor");
  m.def("gated(Tensor gate_up, int activation) -> Tensor");
  m.impl("rms_norm", kCpu, TORCH_FN(rms_norm));
  m.impl("add_rms_norm_", kCpu, TORCH_FN(add_rms_norm_));
  m.impl("qkv_rope_cache", kCpu, TORCH_FN(qkv_rope_cache));
  m.impl("gated", kCpu, TORCH_FN(gated));
  m.def("linear(Tensor x, Tensor packed, int rows, Tensor? bias, Tensor? scales, int activation) -> Tensor");
  m.def(
      "linear_coded(Tensor x, Tensor packed, int rows, Tensor? bias, Tensor? factors, int activation, int[] coding)"
      " -> Tensor");
  m.def("linear_parts(Tensor x, Tensor[] packed, int[] rows, Tensor? bias, Tensor? factors, int[] codings) -> Tensor");
  m.def("pack(Tensor weight, bool gated) -> Tensor");
  m.def("pack_int8(Tensor values, bool gated, bool for_bf16) -> Tensor");
  m.def("embedding(Tensor ids, Tensor packed, int rows, int inputs) -> Tensor");
  m.def("set_brgemm(bool value) -> bool", &set_brgemm);
  m.impl("linear", kCpu, TORCH_FN(linear));
  m.impl("linear_coded", kCpu, TORCH_FN(linear_coded));
  m.impl("linear_parts", kCpu, TORCH_FN(linear_parts));
  m.impl("pack", kCpu, TORCH_FN(pack));
  m.impl("pack_int8", kCpu, TORCH_FN(pack_int8));
  m.impl("embedding", kCpu, TORCH_FN(embedding));
  m.def("pack_bytes(Tensor values, bool gated) -> Tensor");
  m.impl("pack_bytes", kCpu, TORCH_FN(pack_bytes));
  m.def("pack_nibbles(Tensor values, Tensor scales, Tensor zeros, int inputs, bool gated) -> Tensor");
  m.impl("pack_nibbles", kCpu, TORCH_FN(pack_nibbles));
  m.def("pack_coded(Tensor values, Tensor scales, Tensor? zeros, int inputs, bool gated, int[] coding) -> Tensor");
  m.def("pack_ggml(Tensor blocks, int inputs, bool gated, int kind, bool mapped) -> Tensor");
  m.def(
      "embedding_coded(Tensor ids, Tensor packed, int rows, int inputs, Tensor? factors, int[] coding,"
      " ScalarType dtype) -> Tensor");
  m.impl("pack_coded", kCpu, TORCH_FN(pack_coded));
  m.def("weight_bytes(int[] sizes) -> Tensor", TORCH_FN(weight_bytes));
  m.impl("pack_ggml", kCpu, TORCH_FN(pack_ggml));
  m.impl("embedding_coded", kCpu, TORCH_FN(embedding_coded));
}

using Optional = std::optional<Tensor>;

// Weights of a routed block, as an object for Python.
struct MoeWeights : torch::CustomClassHolder {
  template <class... Given>
  explicit MoeWeights(Given... given) : moe(make_moe(std::move(given)...)) {}
  int64_t nbytes() const { return weft::nbytes(*moe); }
  std::shared_ptr<const Moe> moe;
};

using Held = c10::intrusive_ptr<MoeWeights>;

void describe_moe(torch::Library& m) {
  m.class_<MoeWeights>("Moe")
      .def("nbytes", &MoeWeights::nbytes)
      .def(torch::init<Tensor, Optional, Optional, Optional, Tensor, Optional, Optional, Tensor, Optional, Optional,
                       Optional, Optional, Optional, Optional, std::vector<int64_t>, std::vector<double>,
                       std::vector<int64_t>>());
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
  describe_products(m);
  describe_moe(m);
  describe_sampling(m);
  describe_transfers(m);
}

}  // namespace weft
