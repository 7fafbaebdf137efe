// The operators of moe.cpp, and their weights of a routed block.
#pragma once

#include "coded.h"

#include <memory>
#include <optional>
#include <tuple>

namespace weft {

class Moe;

// Sizes and rules of a routed block. Python gives the fields by name (library.cpp).
struct MoeSpec {
  int64_t hidden = 0;
  int64_t experts = 0;              // of the router
  int64_t local_experts = 0;        // of this rank
  int64_t top_k = 0;                // experts of a token
  int64_t intermediate = 0;         // of an expert
  int64_t shared_intermediate = 0;  // of the shared expert; 0: no shared expert
  bool gated_shared = false;        // the shared expert has a gate, the last row of the router
  int64_t activation = 0;           // `Activation`, gemm_tile.h
  double limit = 0, alpha = 0;      // of the activation, see `Finish`
  int64_t scoring = 0;              // `Scoring`, routing.h; the other fields: see `Rule`
  bool renormalize = false;
  int64_t groups = 0, top_groups = 0;
  bool top2 = false;
  double scale = 0;
};

// A matrix of `pack` or `pack_int8` or of codes, or a stack of such matrices, one per local expert.
struct MoeMatrix {
  // packed: [matrices, blocks, steps, 32, depth], or coded [matrices, blocks, bytes]; float32 [matrices, rows]: scales
  // of int8, or factors of codes; bias in x's dtype [matrices, rows]
  std::optional<Tensor> packed, scales, bias;
  Coding coding = {};  // empty for plain and int8 matrices
};

// Tensors of a routed block. Without a shared expert the shared matrices are empty.
struct MoeTensors {
  MoeMatrix router;  // rows: the experts and, with a gated shared expert, its gate
  MoeMatrix up, down, shared_up, shared_down;
  std::optional<Tensor> correction;  // float32 [experts], see `Rule`
  std::optional<Tensor> table;       // int64 [token ids, top_k]: experts by token id
};

std::shared_ptr<const Moe> make_moe(const MoeSpec& spec, MoeTensors tensors);

int64_t nbytes(const Moe& moe);  // of all weights

Tensor moe(const Tensor& given, const std::optional<Tensor>& ids, const Moe& moe);
std::tuple<Tensor, Tensor, Tensor> moe_route(const Tensor& given, const std::optional<Tensor>& ids, const Moe& moe);
Tensor moe_part(const Tensor& given, const Tensor& given_places, const std::optional<Tensor>& given_scales,
                const Moe& moe);
Tensor moe_shared(const Tensor& given, const Moe& moe);
Tensor moe_finish(const Tensor& given, const std::optional<Tensor>& scales, const std::optional<Tensor>& shared,
                  const std::optional<Tensor>& gates, Dtype dtype);

}  // namespace weft
