"""Granite 4: published weight names. Gate and up matrices are one tensor, gate first."""

from __future__ import annotations

import re

from weft.config.spec import ModelSpec
from weft.models.mixer_weights import add_decoder, add_mamba_or_attention
from weft.models.weights import WeightMap


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model."""
    result = WeightMap(ignored=[re.compile(r"\.inv_freq$")])
    add_decoder(result, spec, "model.embed_tokens", "model.norm")
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        result.add_norm(spec, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
        result.add_norm(spec, f"{theirs}.post_attention_layernorm", f"{ours}.feed_forward_norm")
        add_mamba_or_attention(result, spec, layer, theirs, ours)
        if spec.moe is None:
            _add_shared(result, spec, theirs, f"{ours}.feed_forward", ".weight")
        else:
            _add_shared(result, spec, theirs, f"{ours}.feed_forward.shared", "")
            _add_experts(result, spec, theirs, f"{ours}.feed_forward")
    return result


def _add_shared(made: WeightMap, spec: ModelSpec, theirs: str, ours: str, end: str) -> None:
    """Add the dense feed-forward to ``made``. GGUF files have gate and up apart.

    ``end``: ending of the parameters.
    """
    n = spec.intermediate
    shared = f"{theirs}.shared_mlp"
    made.add(f"{shared}.input_linear.weight", f"{ours}.gate_up{end}")
    made.add(f"{shared}.gate_proj.weight", f"{ours}.gate_up{end}", slice(0, n))
    made.add(f"{shared}.up_proj.weight", f"{ours}.gate_up{end}", slice(n, 2 * n))
    made.add(f"{shared}.output_linear.weight", f"{ours}.down{end}")
    apart = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
    made.choices.append(((f"{shared}.input_linear.weight",), apart))


def _add_experts(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add routed experts to ``made``, under the published names, those of transformers 5, or those of GGUF
    files: experts one by one.
    """
    assert spec.moe is not None
    n = spec.moe.intermediate
    routed = f"{theirs}.block_sparse_moe"
    forms = (
        ("router.layer.weight", "input_linear.weight", "output_linear.weight"),
        ("router.weight", "experts.gate_up_proj", "experts.down_proj"),
    )
    for form in forms:
        for name, parameter in zip(form, ("router.weight", "experts.gate_up", "experts.down"), strict=True):
            made.add(f"{routed}.{name}", f"{ours}.{parameter}")
    made.add(f"{routed}.gate.weight", f"{ours}.router.weight")
    single = [f"{routed}.gate.weight"]
    for expert in range(spec.moe.experts):
        each = f"{routed}.experts.{expert}"
        made.add(f"{each}.gate_proj.weight", f"{ours}.experts.gate_up", expert, slice(0, n))
        made.add(f"{each}.up_proj.weight", f"{ours}.experts.gate_up", expert, slice(n, 2 * n))
        made.add(f"{each}.down_proj.weight", f"{ours}.experts.down", expert)
        single += [f"{each}.{name}_proj.weight" for name in ("gate", "up", "down")]
    made.choices.append((*(tuple(f"{routed}.{name}" for name in form) for form in forms), tuple(single)))
