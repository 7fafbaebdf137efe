"""Routed feed-forward blocks: equal to the published modules in float64, with their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models import deepseek_v2, deepseek_v3, deepseek_v4, gpt_oss, mixtral, qwen3_next

from weft.config.spec import MoESpec
from weft.layers.build import Build
from weft.moe.block import RoutedMLP
from weft.ops.cpu import linear as cpu_linear

Tensor = torch.Tensor

HIDDEN, INNER, EXPERTS, TOP_K, VOCAB = 24, 20, 8, 3, 40


def _config(made: type[Any], **settings: Any) -> Any:
    config = made(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_experts_per_tok=TOP_K,
        vocab_size=VOCAB,
        **settings,
    )
    config._experts_implementation = "eager"
    return config


def _spec(**settings: Any) -> MoESpec:
    common = {"experts": EXPERTS, "top_k": TOP_K, "intermediate": INNER, "renormalize": True, "layers": (0,)}
    return MoESpec(**{**common, **settings})


_V2: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": INNER,
    "n_shared_experts": 2,
    "n_group": 4,
}
_V2 = {**_V2, "topk_group": 2, "routed_scaling_factor": 2.5}
_V2_SPEC: dict[str, Any] = {"groups": 4, "top_groups": 2, "scale": 2.5, "shared": 2 * INNER}
_V4: dict[str, Any] = {
    "num_local_experts": EXPERTS,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
}
_V4 = {**_V4, "n_shared_experts": 1, "swiglu_limit": 0.7, "routed_scaling_factor": 1.5}
_V4_SPEC: dict[str, Any] = {"scoring": "sqrtsoftplus", "scale": 1.5, "shared": INNER, "limit": 0.7}
#: Name -> (reference module, our facts, error allowed: some routers always compute in float32).
BLOCKS: dict[str, tuple[Any, MoESpec, float]] = {
    "deepseek_v2": (
        lambda: deepseek_v2.modeling_deepseek_v2.DeepseekV2Moe(
            _config(deepseek_v2.DeepseekV2Config, topk_method="group_limited_greedy", **_V2)
        ),
        _spec(renormalize=False, **_V2_SPEC),
        1e-6,
    ),
    "deepseek_v3": (
        lambda: deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(
            _config(deepseek_v3.DeepseekV3Config, norm_topk_prob=True, **_V2)
        ),
        _spec(scoring="sigmoid", correction=True, group_rule="top2", **_V2_SPEC),
        1e-6,
    ),
    "deepseek_v4": (
        lambda: deepseek_v4.modeling_deepseek_v4.DeepseekV4SparseMoeBlock(
            _config(deepseek_v4.DeepseekV4Config, mlp_layer_types=["moe"], num_hidden_layers=1, **_V4), 0
        ),
        _spec(correction=True, **_V4_SPEC),
        1e-12,
    ),
    "deepseek_v4_hash": (
        lambda: deepseek_v4.modeling_deepseek_v4.DeepseekV4SparseMoeBlock(
            _config(deepseek_v4.DeepseekV4Config, mlp_layer_types=["hash_moe"], num_hidden_layers=1, **_V4), 0
        ),
        _spec(correction=True, hash_layers=(0,), **_V4_SPEC),
        1e-12,
    ),
    "gpt_oss": (
        lambda: gpt_oss.modeling_gpt_oss.GptOssMLP(
            _config(
                gpt_oss.GptOssConfig,
                num_local_experts=EXPERTS,
                intermediate_size=INNER,
                swiglu_limit=0.8,
                swiglu_alpha=1.5,
            )
        ),
        _spec(bias=True, limit=0.8, alpha=1.5),
        1e-12,
    ),
    "qwen3_next": (
        lambda: qwen3_next.modeling_qwen3_next.Qwen3NextSparseMoeBlock(
            _config(
                qwen3_next.Qwen3NextConfig,
                num_experts=EXPERTS,
                moe_intermediate_size=INNER,
                shared_expert_intermediate_size=28,
                norm_topk_prob=True,
            )
        ),
        _spec(shared=28, shared_gate=True),
        1e-6,
    ),
    "mixtral": (
        lambda: mixtral.modeling_mixtral.MixtralSparseMoeBlock(
            _config(mixtral.MixtralConfig, num_local_experts=EXPERTS, intermediate_size=INNER)
        ),
        _spec(),
        1e-6,
    ),
}


def _theirs(name: str) -> nn.Module:
    torch.manual_seed(4)
    made: nn.Module = BLOCKS[name][0]().double()
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.4)
        else:
            tensor.copy_(torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(len(tensor))]))
    return made


def _ours(name: str, theirs: nn.Module) -> RoutedMLP:
    spec = BLOCKS[name][1]
    build = Build(dtype=torch.float64, device=torch.device("cpu"))
    made = RoutedMLP(HIDDEN, spec, "silu", build, hashed=VOCAB if spec.hash_layers else 0)
    given = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    router = next(name for name in given if name in ("gate.weight", "router.weight")).removesuffix("weight")
    wanted = {
        "router.weight": given[f"{router}weight"],
        "router.bias": given.get(f"{router}bias"),
        "router.correction": given.get(f"{router}e_score_correction_bias"),
        "router.table": given.get(f"{router}tid2eid"),
        "shared.gate": given.get("shared_expert_gate.weight"),
    }
    gate_up, down = given["experts.gate_up_proj"], given["experts.down_proj"]
    if spec.bias:  # transposed, gate and up rows in turn
        gate_up, down = gate_up.mT, down.mT
        bias = given["experts.gate_up_proj_bias"]
        wanted["experts.gate_up_bias"] = torch.cat((bias[:, ::2], bias[:, 1::2]), 1)
        wanted["experts.down_bias"] = given["experts.down_proj_bias"]
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
    wanted |= {"experts.gate_up": gate_up, "experts.down": down}
    if spec.shared:
        prefix = "shared_expert." if spec.shared_gate else "shared_experts."
        wanted["shared.gate_up"] = torch.cat([given[f"{prefix}{n}_proj.weight"] for n in ("gate", "up")])
        wanted["shared.down"] = given[f"{prefix}down_proj.weight"]
    parameters = dict(made.named_parameters())
    for name, parameter in parameters.items():
        value = wanted[name]
        assert value is not None
        assert parameter.shape == value.shape
        parameter.data.copy_(value)
    made.pack()
    return made


@pytest.mark.requirement("B14")
@pytest.mark.parametrize("count", [1, 2, 37])
@pytest.mark.parametrize("name", BLOCKS)
def test_float64_equals_the_published_module(name: str, count: int) -> None:
    theirs = _theirs(name)
    ours = _ours(name, theirs)
    assert ours.reads_ids == (name == "deepseek_v4_hash")
    x, ids = torch.randn(1, count, HIDDEN, dtype=torch.float64), torch.randint(0, VOCAB, (1, count))
    if ours.reads_ids:
        expected = theirs(x, input_ids=ids)
    else:
        expected = theirs(x)
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    made = ours(x[0], ids[0])
    assert made.dtype == torch.float64
    assert (made - expected).abs().max() <= BLOCKS[name][2] * expected.abs().max()


def test_packing_drops_what_nothing_reads(extension: None) -> None:
    """The experts are in memory once; the router's parameters stay."""
    if not cpu_linear.available():
        pytest.skip("the C++ products are for CPUs with AVX2 or AVX-512; torch's read the plain weights")
    spec = _spec(shared=28, shared_gate=True)
    build = Build(dtype=torch.bfloat16, device=torch.device("cpu"))
    block = RoutedMLP(HIDDEN, spec, "silu", build)
    for parameter in block.parameters():
        parameter.data.normal_()
    block.pack()
    assert {name for name, _ in block.named_parameters()} <= {"router.weight", "shared.gate"}
    assert block(torch.randn(3, HIDDEN).bfloat16()).shape == (3, HIDDEN)
