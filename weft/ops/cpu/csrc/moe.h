// The operators of moe.cpp, and their weights of a routed block.
#pragma once

#include "common.h"

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace weft {

class Moe;

// Makes the weights of a block from matrices of `pack` and `pack_int8`. The router's rows are the experts and, with a
// gated shared expert, its gate. sizes: hidden, experts, top_k, intermediate, shared intermediate, shared gate,
// activation, scoring, renormalize, groups, top groups, top2, local experts. numbers: scale, limit, alpha. codings:
// four numbers (Coding::of) for each of gate_up, down and the two shared matrices; zeros for a matrix without a coding.
std::shared_ptr<const Moe> make_moe(Tensor router, std::optional<Tensor> router_bias, std::optional<Tensor> correction,
                                    std::optional<Tensor> table, Tensor gate_up, std::optional<Tensor> gate_up_scales,
                                    std::optional<Tensor> gate_up_bias, Tensor down, std::optional<Tensor> down_scales,
                                    std::optional<Tensor> down_bias, std::optional<Tensor> shared_gate_up,
                                    std::optional<Tensor> shared_gate_up_scales, std::optional<Tensor> shared_down,
                                    std::optional<Tensor> shared_down_scales, std::vector<int64_t> sizes,
                                    std::vector<double> numbers, std::vector<int64_t> codings);

int64_t nbytes(const Moe& moe);  // of all weights

Tensor moe(const Tensor& given, const std::optional<Tensor>& ids, const Moe& moe);
std::tuple<Tensor, Tensor, Tensor> moe_route(const Tensor& given, const std::optional<Tensor>& ids, const Moe& moe);
Tensor moe_part(const Tensor& given, const Tensor& given_places, const std::optional<Tensor>& given_scales,
                const Moe& moe);
Tensor moe_shared(const Tensor& given, const Moe& moe);
Tensor moe_finish(const Tensor& given, const std::optional<Tensor>& scales, const std::optional<Tensor>& shared,
                  const std::optional<Tensor>& gates, at::ScalarType dtype);

}  // namespace weft
