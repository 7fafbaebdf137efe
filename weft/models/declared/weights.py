"""Weight map of declared architectures: every published form of every weight, in the names of Llama.

``FoundNames.published_as`` takes the spellings of a checkpoint (``names.py``).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec
import torch

from weft.config.spec import ModelSpec
from weft.models.declared.names import spelled_as
from weft.models.deepseek.weights import latent_weights
from weft.models.vision.weights import add_tower
from weft.models.weights import WeightMap, add_experts, transposed

_TOWERS = re.compile(
    r"^(?:model\.)?(?:vision_(?:tower|model)|multi_modal_projector|audio_tower|embed_(?:vision|audio)|visual)\."
)
"""Names of towers of a model that serves text alone."""
_AUDIO = re.compile(
    r"^(?:model\.)?(?:audio_tower|embed_audio)\.|^(?:model\.)?vision_tower\.(?:vision_model\.)?head\."
)
"""Names of audio towers, and of the head of SigLIP, which no text model reads."""
_MODULES = re.compile(r"^(?:model\.)?mtp[_.]")
"""Names of modules that predict further tokens, in forms that are not served."""
_XIELU = re.compile(r"\.act_fn\.(?:beta|eps)$")
"""Names of the constants of the activation xIELU."""


@dataclass(slots=True)
class FoundNames(WeightMap):
    """A weight map that takes the spellings of a checkpoint."""

    def published_as(self, names: Collection[str]) -> WeightMap:
        """Return the map in the names of a checkpoint with tensors ``names``.

        Raise ConfigError for two spellings of one role.
        """
        # Named class: ``super()`` without arguments fails in a dataclass with slots.
        return spelled_as(WeightMap.published_as(self, names), names)


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the model, in the names of Llama."""
    beside = spec.moe is not None and spec.moe.beside
    dense = msgspec.structs.replace(spec, moe=None) if beside else spec
    made = latent_weights(dense, "model", "lm_head")
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        _add_layer_parts(made, spec, layer, theirs, ours)
        if spec.mla is None:
            _add_fused_attention(made, spec, f"{theirs}.self_attn", f"{ours}.attention")
        if spec.activation == "xielu":
            made.ignored.append(_XIELU)
            for name in ("alpha_p", "alpha_n"):
                made.add(f"{theirs}.mlp.act_fn.{name}", f"{ours}.feed_forward.{name}")
        if beside:
            _add_beside(made, spec, theirs, f"{ours}.beside")
        if dense.moe is not None and layer in dense.moe.layers:
            _add_fused_shared(made, spec, f"{theirs}.mlp.shared_experts", f"{ours}.feed_forward.shared")
            name = f"{theirs}.mlp.gate.e_score_correction_bias"
            if spec.moe is not None and spec.moe.on_input:
                _move_shared(made, spec, theirs, ours)
            if spec.moe is not None and spec.moe.inputs_first:
                _read_transposed(made, f"{theirs}.mlp.experts")
            if name in made.placements:
                made.placements[name] = replace(made.placements[name], read=torch.flatten)
        elif spec.gated:
            _add_fused_mlp(made, spec, f"{theirs}.mlp", f"{ours}.feed_forward")
    if spec.layer.inputs:
        made.add("model.embed_tokens_per_layer.weight", "inputs.table.weight")
        made.add("model.per_layer_model_projection.weight", "inputs.project.weight")
        made.add("model.per_layer_projection_norm.weight", "inputs.norm.weight")
    if spec.head_bias:
        made.add("lm_head.bias", "head_bias")
    made.ignored.append(_MODULES)
    if spec.vision is None:
        made.ignored.append(_TOWERS)
    else:
        made.ignored.append(_AUDIO)
        add_tower(made, spec.vision)
    return FoundNames(made.placements, made.choices, made.same_as, made.ignored)


def _add_layer_parts(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the parts of ``LayerSpec``, and the sizes that differ between layers."""
    if spec.layer.scalar:
        made.add(f"{theirs}.layer_scalar", f"{ours}.scalar")
    if spec.layer.inputs:
        made.add(f"{theirs}.per_layer_input_gate.weight", f"{ours}.inputs.gate.weight")
        made.add(f"{theirs}.per_layer_projection.weight", f"{ours}.inputs.out.weight")
        made.add(f"{theirs}.post_per_layer_input_norm.weight", f"{ours}.inputs.norm.weight")
    if spec.attention.source(layer) != layer:
        unread = "|".join(("k_proj", "v_proj", "k_norm", "v_norm"))
        made.ignored.append(re.compile(rf"\blayers\.{layer}\.self_attn\.(?:{unread})\."))
    if layer in spec.layer.double:
        inner = 2 * spec.intermediate
        for name, rows in (("gate", slice(0, inner)), ("up", slice(inner, 2 * inner))):
            key = f"{theirs}.mlp.{name}_proj.weight"
            made.placements[key] = replace(made.placements[key], index=(rows,))


def _add_beside(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add routed experts beside the dense feed-forward, with their router and norms."""
    made.add(f"{theirs}.pre_feedforward_layernorm_2.weight", f"{ours}.norm.weight")
    made.add(f"{theirs}.post_feedforward_layernorm_1.weight", f"{ours}.dense_out_norm.weight")
    made.add(f"{theirs}.post_feedforward_layernorm_2.weight", f"{ours}.experts_out_norm.weight")
    made.add(f"{theirs}.router.scale", f"{ours}.experts.router_scale")
    made.add(f"{theirs}.router.per_expert_scale", f"{ours}.experts.factors")
    routed = WeightMap()
    add_experts(routed, spec, theirs, f"{ours}.experts")
    for name, placed in routed.placements.items():
        made.placements[name.replace(f"{theirs}.gate.", f"{theirs}.router.proj.")] = placed
    made.choices += routed.choices


def _move_shared(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Place the shared expert in the dense block beside the experts."""
    for name in [one for one in made.placements if one.startswith(f"{theirs}.mlp.shared_experts.")]:
        placed = made.placements[name]
        part = placed.parameter.removeprefix(f"{ours}.feed_forward.shared.")
        made.placements[name] = replace(placed, parameter=f"{ours}.feed_forward.beside.{part}.weight")


def _read_transposed(made: WeightMap, experts: str) -> None:
    """Read both stacks of experts with inputs before outputs."""
    for name in ("gate_up_proj", "down_proj"):
        key = f"{experts}.{name}"
        made.placements[key] = replace(made.placements[key], read=transposed)


def _add_fused_attention(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add the alternative of one matrix for queries, keys and values, in this order."""
    if f"{theirs}.v_proj.weight" not in made.placements or spec.output_gate:
        return
    kinds = ("weight", "bias") if spec.qkv_bias else ("weight",)
    made.add_linear(f"{theirs}.qkv_proj", f"{ours}.qkv", bias=spec.qkv_bias)
    apart = tuple(f"{theirs}.{name}_proj.{kind}" for name in "qkv" for kind in kinds)
    made.choices.append((apart, tuple(f"{theirs}.qkv_proj.{kind}" for kind in kinds)))


def _add_fused_mlp(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add the alternative of one matrix for gate and up, gate first."""
    kinds = ("weight", "bias") if spec.mlp_bias else ("weight",)
    made.add_linear(f"{theirs}.gate_up_proj", f"{ours}.gate_up", bias=spec.mlp_bias)
    apart = tuple(f"{theirs}.{name}_proj.{kind}" for name in ("gate", "up") for kind in kinds)
    made.choices.append((apart, tuple(f"{theirs}.gate_up_proj.{kind}" for kind in kinds)))


def _add_fused_shared(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add the alternative of one matrix for gate and up of the shared experts, gate first."""
    assert spec.moe is not None
    if not spec.moe.shared:
        return
    fused = f"{theirs}.gate_up_proj.weight"
    made.add(fused, f"{ours}.gate_up")
    made.choices.append((tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up")), (fused,)))
