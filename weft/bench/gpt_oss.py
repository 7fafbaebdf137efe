"""Random weights of a GPT-OSS checkpoint in the published form: experts in MXFP4, the rest in bfloat16.

Source: arXiv 2508.10925; OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

GROUP = 32
"""Numbers per shared scale."""

# Fields of config.json beyond sizes. Matrices outside of experts are not quantized.
ABOUT: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 10.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_limit": 7.0,
    "use_cache": True,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name to shape of every tensor in the order of layers; for experts, the unquantized shape."""
    hidden, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, experts = config["num_attention_heads"], config["num_local_experts"]
    queries, keys = heads * head, config["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows, columns in (
        ("self_attn.q_proj", queries, hidden),
        ("self_attn.k_proj", keys, hidden),
        ("self_attn.v_proj", keys, hidden),
        ("self_attn.o_proj", hidden, queries),
        ("mlp.router", experts, hidden),
    ):
        layer |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    layer |= {
        "self_attn.sinks": (heads,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.experts.gate_up_proj": (experts, 2 * middle, hidden),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * middle),
        "mlp.experts.down_proj": (experts, hidden, middle),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{part}": shape for part, shape in layer.items()}
    return {**found, "model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def tensors(
    config: dict[str, Any], drawn: Callable[[tuple[int, ...]], Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Yield dicts of stored tensors, one dict per name of ``shapes``: bfloat16, or for experts the MXFP4
    blocks and scales.

    ``drawn`` makes float32 values of a shape, normal with the model's standard deviation.
    """
    import torch

    for name, shape in shapes(config).items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            blocks, scales = mxfp4(drawn(shape))
            yield {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif "norm" in name:
            yield {name: torch.ones(shape, dtype=torch.bfloat16)}
        else:
            yield {name: drawn(shape).to(torch.bfloat16)}


def mxfp4(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [..., K] to MXFP4. Return (uint8 [..., K / 32, 16], E8M0 scales as uint8 [..., K / 32]).

    Each byte has two codes, the first in the low bits. A group's scale is the power of two that puts the
    largest magnitude below 8. Each code is the nearest.
    """
    import torch

    # [..., K / 32, 32]
    groups = numbers.float().view(*numbers.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    exponents = (largest.log2().floor() - 2).clamp(min=-127)
    scaled = groups / exponents.exp2().unsqueeze(-1)
    # Midpoints between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(scaled.abs(), borders) + 8 * (scaled < 0)
    # [..., K / 32, 16] each: even and odd positions of a group.
    first, second = codes.to(torch.uint8).view(*codes.shape[:-1], -1, 2).unbind(-1)
    return first | (second << 4), (exponents + 127).to(torch.uint8)
