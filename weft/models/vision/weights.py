"""Published weight names of towers."""

from __future__ import annotations

import re
from functools import partial

import torch

from weft.common.log import get_logger
from weft.config.spec import ModelSpec, VisionSpec
from weft.models.vision.published import add_published
from weft.models.vision.whole_images import add_images
from weft.models.weights import WeightMap

_log = get_logger(__name__)


def tower_weights(vision: VisionSpec) -> WeightMap:
    """Return the weight map of a tower alone. All other tensors of the checkpoint are ignored."""
    others = "|".join(re.escape(prefix) for prefix in vision.published)
    made = WeightMap(ignored=[re.compile(f"^(?!{others})")])
    _ADD[vision.kind](made, vision)
    return made


def add_tower(made: WeightMap, vision: VisionSpec) -> None:
    """Add the tensors of a tower to ``made``."""
    _ADD[vision.kind](made, vision)


def add_qwen_tower(made: WeightMap, spec: ModelSpec) -> None:
    """Map the tower of Qwen3-VL and Qwen3.5. If the tower is not loaded, ignore its tensors and log once."""
    if spec.vision is None:
        _ignore(made, "model.visual.")
    else:
        _add_qwen(made, spec.vision)


def _add_qwen(made: WeightMap, vision: VisionSpec) -> None:
    """Add the tensors of Qwen's tower, its merger and its deepstack mergers to ``made``."""
    theirs = "model.visual"
    _add_both(made, f"{theirs}.patch_embed.proj", "vision.patch", flat=True)
    made.add(f"{theirs}.pos_embed.weight", "vision.positions")
    for layer in range(vision.layers):
        names = f"{theirs}.blocks.{layer}"
        ours = f"vision.blocks.{layer}"
        _add_both(made, f"{names}.norm1", f"{ours}.attention_norm")
        _add_both(made, f"{names}.attn.qkv", f"{ours}.attention.qkv")
        _add_both(made, f"{names}.attn.proj", f"{ours}.attention.out")
        _add_both(made, f"{names}.norm2", f"{ours}.mlp_norm")
        _add_both(made, f"{names}.mlp.linear_fc1", f"{ours}.mlp.up")
        _add_both(made, f"{names}.mlp.linear_fc2", f"{ours}.mlp.down")
    mergers = {f"{theirs}.merger": "vision.merger"}
    mergers |= {
        f"{theirs}.deepstack_merger_list.{n}": f"vision.levels.{n}" for n in range(len(vision.levels))
    }
    for names, ours in mergers.items():
        _add_both(made, f"{names}.norm", f"{ours}.norm")
        _add_both(made, f"{names}.linear_fc1", f"{ours}.mlp.up")
        _add_both(made, f"{names}.linear_fc2", f"{ours}.mlp.down")


def add_moon_tower(made: WeightMap, spec: ModelSpec) -> None:
    """Map MoonViT and its projector. If the tower is not loaded, ignore its tensors and log once.

    In published queries and keys, the two rows of a rotated pair are neighbours within a head. The parameter
    stores the pairs in two halves of a head.
    """
    if spec.vision is None:
        _ignore(made, "vision_tower.")
        _ignore(made, "mm_projector.")
    else:
        _add_moon(made, spec.vision)


def _add_moon(made: WeightMap, vision: VisionSpec) -> None:
    """Add the tensors of MoonViT and its projector to ``made``."""
    theirs = "vision_tower"
    _add_both(made, f"{theirs}.patch_embed.proj", "vision.patch", flat=True)
    made.add(
        f"{theirs}.patch_embed.pos_emb.weight",
        "vision.positions",
        read=partial(torch.flatten, start_dim=0, end_dim=1),
    )
    made.ignored.append(re.compile(r"\.pos_emb\.time_weight$"))  # sines and cosines are computed instead
    for layer in range(vision.layers):
        names = f"{theirs}.encoder.blocks.{layer}"
        ours = f"vision.blocks.{layer}"
        _add_both(made, f"{names}.norm0", f"{ours}.attention_norm")
        for kind in ("weight", "bias"):
            made.add(f"{names}.wqkv.{kind}", f"{ours}.attention.qkv.{kind}", read=_Halves(vision))
        _add_both(made, f"{names}.wo", f"{ours}.attention.out")
        _add_both(made, f"{names}.norm1", f"{ours}.mlp_norm")
        _add_both(made, f"{names}.mlp.fc0", f"{ours}.mlp.up")
        _add_both(made, f"{names}.mlp.fc1", f"{ours}.mlp.down")
    _add_both(made, f"{theirs}.encoder.final_layernorm", "vision.norm")
    _add_both(made, "mm_projector.pre_norm", "vision.merger_norm")
    _add_both(made, "mm_projector.proj.0", "vision.merger.up")
    _add_both(made, "mm_projector.proj.2", "vision.merger.down")


class _Halves:
    """Reorder rows of published queries and keys from pairs to halves of a head. Rows of values stay."""

    def __init__(self, vision: VisionSpec) -> None:
        self._heads = vision.heads

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        pairs = values.shape[0] // 3 // self._heads // 2
        rows = values.unflatten(0, (3, self._heads, pairs, 2))
        halves = rows[:2].transpose(2, 3).flatten(0, 3)
        return torch.cat([halves, rows[2].flatten(0, 2)])


def _add_both(made: WeightMap, theirs: str, ours: str, *, flat: bool = False) -> None:
    """Map weight and bias. flat: flatten the weight of a convolution with stride equal to kernel size."""
    made.add(f"{theirs}.weight", f"{ours}.weight", read=partial(torch.flatten, start_dim=1) if flat else None)
    made.add(f"{theirs}.bias", f"{ours}.bias")


_ADD = {
    "qwen3_vl": _add_qwen,
    "moonvit": _add_moon,
    "qwen2_vl": add_published,
    "qwen2_5_vl": add_published,
    "gemma3": add_images,
    "gemma4": add_images,
    "mistral3": add_images,
    "internvl": add_images,
    "llama4": add_images,
}


def _ignore(made: WeightMap, prefix: str) -> None:
    _log.info("only text is served: %s of this checkpoint is not loaded", prefix.rstrip("."))
    root = re.escape(prefix.removeprefix("model."))
    made.ignored.append(re.compile(rf"^(model\.)?{root}"))
