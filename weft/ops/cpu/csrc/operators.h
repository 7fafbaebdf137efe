// Operators of `torch.ops.weft_cpu`, by the file with the definition. The schema of an operator is in library.cpp; its
// documentation is at the definition.
//
// Only library.cpp includes torch's headers. To add an
// operator: define the operator outside of unnamed namespaces, declare it here, and add its schema to library.cpp.
#pragma once

#include "common.h"

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace weft {

struct Coding;  // coded.h

// --- crew.cpp ---

std::vector<int64_t> take_waits();
bool set_crews(bool value, int64_t alone);

// --- attention.cpp ---

void attend_grouped(const Tensor& q, const Tensor& out, const Tensor& cache, const Tensor& offsets,
                    const Tensor& starts, const Tensor& table, int64_t window, double scale, int64_t engine,
                    const std::optional<Tensor>& sinks, const std::optional<Tensor>& scales, double softcap,
                    const std::optional<Tensor>& ends);

// --- sparse.cpp ---

namespace attend {

void sparse_attend(const Tensor& q, const Tensor& out, const Tensor& offsets, const Tensor& starts,
                   const std::optional<Tensor>& entries, const std::optional<Tensor>& entry_table, int64_t window,
                   const std::optional<Tensor>& groups, const std::optional<Tensor>& group_table, int64_t ratio,
                   const std::optional<Tensor>& chosen, const std::optional<Tensor>& sinks, double scale,
                   int64_t engine, const std::optional<Tensor>& entry_scales,
                   const std::optional<Tensor>& entry_exact, const std::optional<Tensor>& group_scales,
                   const std::optional<Tensor>& group_exact);
Tensor sparse_select(const Tensor& q, const Tensor& weights, const Tensor& cache, const Tensor& offsets,
                     const Tensor& starts, const Tensor& table, int64_t ratio, int64_t top, int64_t engine);

}  // namespace attend

// --- compress.cpp ---

void compress_groups(const Tensor& sources, const Tensor& groups, const Tensor& offsets, const Tensor& starts,
                     const Tensor& table, const Tensor& writes, const Tensor& cos, const Tensor& sin,
                     const Tensor& bias, const std::vector<Tensor>& norms, int64_t ratio, int64_t overlap, double eps,
                     const std::optional<Tensor>& scales, const std::optional<Tensor>& exact);

// --- latent.cpp ---

Tensor latent_multiply(const Tensor& x, const Tensor& packed, int64_t outputs);
Tensor latent_rope_cache(const Tensor& joined, const std::optional<Tensor>& q_weight, const Tensor& weight, double eps,
                         const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& cache,
                         const Tensor& writes, const std::optional<Tensor>& scales,
                         const std::optional<Tensor>& rotated);

namespace attend {

void latent_absorbed(const Tensor& q, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out,
                     const Tensor& cache, const Tensor& offsets, const Tensor& starts, const Tensor& table,
                     const Tensor& keys, const Tensor& values, int64_t lora, int64_t window, double scale,
                     int64_t engine, const std::optional<Tensor>& scales, const std::optional<Tensor>& rotated,
                     const std::optional<Tensor>& more, const std::optional<Tensor>& sums);
void latent_expanded(const Tensor& q, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out,
                     const Tensor& cache, const Tensor& offsets, const Tensor& starts, const Tensor& table,
                     const Tensor& keys, const Tensor& values, int64_t lora, int64_t window, double scale,
                     int64_t engine, int64_t budget, const std::optional<Tensor>& scales,
                     const std::optional<Tensor>& rotated);

}  // namespace attend

// --- delta.cpp ---

void delta_net(const Tensor& qkv, const Tensor& z, const Tensor& b, const Tensor& a, const Tensor& out,
               const Tensor& conv_q, const Tensor& conv_k, const Tensor& conv_v, const Tensor& state,
               const Tensor& taps, const Tensor& rate, const Tensor& bias, const Tensor& norm, double eps,
               double reach, double floor, bool squashed, const Tensor& offsets, const Tensor& starts,
               const Tensor& slots, const Tensor& live, bool each);
Tensor sigmoid_gate(const Tensor& x, const Tensor& gate);

// --- mamba.cpp ---

void mamba(const Tensor& zxbcdt, const Tensor& out, const Tensor& conv_x, const Tensor& conv_b, const Tensor& conv_c,
           const Tensor& state, const Tensor& taps, const std::optional<Tensor>& conv_bias, const Tensor& rate,
           const Tensor& step_bias, const Tensor& skip, const std::optional<Tensor>& norm, int64_t groups,
           int64_t norm_groups, double eps, double low, double high, int64_t finish, const Tensor& offsets,
           const Tensor& starts, const Tensor& slots, const Tensor& live, bool each);

// --- mamba1.cpp ---

void mamba1_convolve(const Tensor& x, const Tensor& out, const Tensor& conv, const Tensor& taps,
                     const std::optional<Tensor>& bias, const Tensor& offsets, const Tensor& starts,
                     const Tensor& slots, const Tensor& live, bool each);
void mamba1_scan(const Tensor& x, const Tensor& steps, const Tensor& b, const Tensor& c, const Tensor& z,
                 const Tensor& out, const Tensor& state, const Tensor& rate, const Tensor& step_bias,
                 const Tensor& skip, const Tensor& offsets, const Tensor& starts, const Tensor& slots,
                 const Tensor& live, bool each);

// --- fused.cpp ---

Tensor rms_norm(const Tensor& given, const Tensor& weight, double eps);
Tensor add_rms_norm_(const Tensor& x, const Tensor& given, const Tensor& weight, double eps);
Tensor qkv_rope_cache(const Tensor& qkv, int64_t heads, int64_t kv_heads, const std::optional<Tensor>& q_weight,
                      const std::optional<Tensor>& k_weight, double eps, const Tensor& cos, const Tensor& sin,
                      const Tensor& cache, const Tensor& writes, const std::optional<Tensor>& scales);
Tensor gated(const Tensor& given, int64_t code);

// --- low_rank.cpp ---

void low_rank(const Tensor& y, const Tensor& given, const Tensor& a, const Tensor& b, const Tensor& numbers,
              const Tensor& ranks, Sizes spans);

// --- gemm.cpp ---

Tensor linear(const Tensor& x, const Tensor& packed, int64_t rows, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& scales, int64_t activation);
Tensor linear_coded(const Tensor& x, const Tensor& packed, int64_t rows, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& factors, int64_t activation, const Coding& coding);
Tensor linear_parts(const Tensor& x, const std::vector<Tensor>& packed, Sizes rows, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& factors, const std::vector<Coding>& codings);
Tensor pack(const Tensor& weight, bool gated);
Tensor pack_int8(const Tensor& values, bool gated, bool for_bf16);
Tensor embedding(const Tensor& ids, const Tensor& packed, int64_t rows, int64_t inputs);
bool set_brgemm(bool value);

// --- coded_pack.cpp ---

Tensor pack_bytes(const Tensor& values, bool gated, int64_t group);
Tensor pack_nibbles(const Tensor& values, const Tensor& scales, const Tensor& zeros, int64_t inputs, bool gated);
Tensor pack_coded(const Tensor& values, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t inputs,
                  bool gated, const Coding& coding);
Tensor pack_ggml(const Tensor& blocks, int64_t inputs, bool gated, int64_t given, bool mapped);
Tensor weight_bytes(Sizes sizes);
Tensor embedding_coded(const Tensor& ids, const Tensor& packed, int64_t rows, int64_t inputs,
                       const std::optional<Tensor>& factors, const Coding& coding, Dtype type);

// --- sampling.cpp ---

std::tuple<Tensor, Tensor> greedy(const Tensor& logits, const Tensor& rows, int64_t vocab,
                                  const std::optional<Tensor>& words, const std::optional<Tensor>& places);
std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& rows, int64_t vocab, const Tensor& temperature,
                                  const Tensor& min_p, const Tensor& seed, const Tensor& choice, const Tensor& position,
                                  const std::optional<Tensor>& words, const std::optional<Tensor>& places);
std::tuple<Tensor, Tensor> end_decode(const Tensor& logits, const Tensor& slots, int64_t vocab,
                                      const Tensor& temperature, const Tensor& min_p, const Tensor& seed,
                                      const Tensor& choice, const Tensor& history, const Tensor& num_computed,
                                      const std::optional<Tensor>& live);
std::tuple<Tensor, Tensor> allow_bits(const Tensor& logits, const Tensor& rows, int64_t vocab, const Tensor& words,
                                      const Tensor& places);

// --- collectives.cpp ---

int64_t ring_open(int64_t fd, int64_t rank, std::vector<int64_t> pids, int64_t bytes, double timeout, double spin);
void ring_abort(int64_t number);
void ring_close(int64_t number);
Tensor ring_times(bool keep);
Tensor ring_gather(const Tensor& x, int64_t ring);
Tensor ring_sum(const Tensor& x, int64_t ring);
Tensor ring_exchange(const Tensor& x, Sizes sends, Sizes receives, int64_t ring);

// --- transfer.cpp ---

Tensor digest_spans(const Tensor& memory, const Tensor& spans, const Tensor& seeds);
Tensor copy_spans(const Tensor& source, Tensor& target, const Tensor& spans, const Tensor& seeds);

}  // namespace weft
