"""Helpers for the published weight names of models with state mixers: names differ by family."""

from __future__ import annotations

from weft.config.parts.mixers import Mamba1Spec, MambaSpec
from weft.config.spec import DeltaSpec, ModelSpec
from weft.models.weights import WeightMap, add_experts


def add_decoder(made: WeightMap, spec: ModelSpec, embedding: str, norm: str) -> None:
    """Add embedding, final norm and head to ``made``, with the family's names."""
    made.add(f"{embedding}.weight", "embedding.weight")
    made.add_norm(spec, norm, "norm")
    if spec.tied:
        made.same_as["lm_head.weight"] = f"{embedding}.weight"
    elif spec.head:
        made.add("lm_head.weight", "head.weight")


def add_grouped_attention(
    made: WeightMap,
    spec: ModelSpec,
    theirs: str,
    ours: str,
    names: tuple[str, str, str] = ("o_proj", "q_norm", "k_norm"),
) -> None:
    """Add grouped-query attention without output gate to ``made``.

    names: the family's names of the output projection and of the norms of queries and keys.
    """
    out, q_norm, k_norm = names
    q = spec.heads * spec.head_dim
    kv = spec.kv_heads * spec.head_dim
    for name, first, last in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
        made.add_linear(f"{theirs}.{name}_proj", f"{ours}.qkv", slice(first, last), bias=spec.qkv_bias)
    made.add_linear(f"{theirs}.{out}", f"{ours}.out", bias=spec.o_bias)
    if spec.qk_norm:
        made.add_norm(spec, f"{theirs}.{q_norm}", f"{ours}.q_norm")
        made.add_norm(spec, f"{theirs}.{k_norm}", f"{ours}.k_norm")


def add_routed(
    made: WeightMap, spec: ModelSpec, theirs: str, ours: str, names: tuple[str, str, str], *, correction: str
) -> None:
    """Add routed experts to ``made`` as ``add_experts`` does. correction: the family's name of the addend to
    the scores, beside the router.
    """
    add_experts(made, spec, theirs, ours, names)
    placed = made.placements.pop(f"{theirs}.gate.e_score_correction_bias", None)
    if placed is not None:
        made.add(f"{theirs}.{correction}", placed.parameter)


def add_mamba_or_attention(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the mixer of a layer to ``made``: Mamba or grouped-query attention. theirs, ours: of the layer."""
    if not add_recurrent(made, spec, layer, f"{theirs}.mamba", f"{ours}.attention"):
        add_grouped_attention(made, spec, f"{theirs}.self_attn", f"{ours}.attention")


def add_recurrent(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> bool:
    """Add the Mamba2 or Mamba 1 of a layer to ``made``. Return False if the layer has neither."""
    if spec.mamba is not None and layer in spec.mamba.layers:
        add_mamba(made, spec.mamba, theirs, ours)
    elif spec.mamba1 is not None and layer in spec.mamba1.layers:
        _add_mamba1(made, spec.mamba1, theirs, ours)
    else:
        return False
    return True


def add_convolutions(
    made: WeightMap, delta: DeltaSpec, theirs: str, ours: str
) -> tuple[tuple[str, ...], ...]:
    """Add the convolution of a delta net to ``made``: one for each of q, k and v, or a single one. Return the
    names of both forms, one of which a checkpoint has."""
    key, value = delta.k_heads * delta.k_dim, delta.v_heads * delta.v_dim
    begin = 0
    for name, size in (("q", key), ("k", key), ("v", value)):
        made.add(f"{theirs}.{name}_conv1d.weight", f"{ours}.conv", slice(begin, begin + size))
        begin += size
    made.add(f"{theirs}.conv1d.weight", f"{ours}.conv")
    return tuple(f"{theirs}.{name}_conv1d.weight" for name in "qkv"), (f"{theirs}.conv1d.weight",)


def add_mamba(made: WeightMap, mamba: MambaSpec, theirs: str, ours: str) -> None:
    """Add the tensors of a Mamba2 layer to ``made``. Published rows are z, x, B, C and time steps."""
    made.add_linear(f"{theirs}.in_proj", f"{ours}.zxbcdt", bias=mamba.bias)
    made.add(f"{theirs}.conv1d.weight", f"{ours}.conv")
    if mamba.conv_bias:
        made.add(f"{theirs}.conv1d.bias", f"{ours}.conv_bias")
    made.add(f"{theirs}.A_log", f"{ours}.log_rate")
    made.add(f"{theirs}.dt_bias", f"{ours}.step_bias")
    made.add(f"{theirs}.D", f"{ours}.skip")
    if mamba.norm != "none":
        made.add(f"{theirs}.norm.weight", f"{ours}.norm")
    made.add_linear(f"{theirs}.out_proj", f"{ours}.out", bias=mamba.bias)


def _add_mamba1(made: WeightMap, mamba: Mamba1Spec, theirs: str, ours: str) -> None:
    """Add the tensors of a Mamba 1 layer to ``made``. Published rows are x and z, and time steps, B and C."""
    made.add_linear(f"{theirs}.in_proj", f"{ours}.xz", bias=mamba.bias)
    made.add(f"{theirs}.conv1d.weight", f"{ours}.conv")
    if mamba.conv_bias:
        made.add(f"{theirs}.conv1d.bias", f"{ours}.conv_bias")
    made.add_linear(f"{theirs}.x_proj", f"{ours}.select", bias=False)
    made.add_linear(f"{theirs}.dt_proj", f"{ours}.step", bias=False)
    made.add(f"{theirs}.dt_proj.bias", f"{ours}.step_bias")
    if mamba.norm == "weighted":
        for number, name in enumerate(("dt", "b", "c")):
            made.add(f"{theirs}.{name}_layernorm.weight", f"{ours}.norms.{number}.weight")
    made.add(f"{theirs}.A_log", f"{ours}.log_rate")
    made.add(f"{theirs}.D", f"{ours}.skip")
    made.add_linear(f"{theirs}.out_proj", f"{ours}.out", bias=mamba.bias)
