"""Kinds of vision towers, and the names of their tensors."""

from __future__ import annotations

from typing import Literal, TypeAlias

TowerKind: TypeAlias = Literal[
    "qwen3_vl", "moonvit", "qwen2_vl", "qwen2_5_vl", "gemma3", "gemma4", "mistral3", "internvl", "llama4"
]
"""
qwen3_vl    Qwen3-VL, arXiv 2511.21631, and Qwen3.5; frames of one item do not attend to each other
moonvit     Kimi K2.5, arXiv 2602.02276; frames attend to each other, and are averaged into one
qwen2_vl    Qwen2-VL, arXiv 2409.12191; modules of transformers
qwen2_5_vl  Qwen2.5-VL, arXiv 2502.13923; modules of transformers
gemma3      Gemma 3 (SigLIP), arXiv 2503.19786; modules of transformers
gemma4      Gemma 4; modules of transformers
mistral3    Mistral Small 3.1 and later (Pixtral, arXiv 2410.07073); modules of transformers
internvl    InternVL3 and 3.5, arXiv 2504.10479; one tile per item; modules of transformers
llama4      Llama 4; one tile per item; modules of transformers
"""


def _both(*prefixes: str) -> tuple[str, ...]:
    """Return ``prefixes`` alone and below ``model.``."""
    return (*prefixes, *(f"model.{prefix}" for prefix in prefixes))


PUBLISHED: dict[TowerKind, tuple[str, ...]] = {
    "qwen3_vl": ("model.visual.",),
    "moonvit": ("vision_tower.", "mm_projector."),
    "qwen2_vl": _both("visual."),
    "qwen2_5_vl": _both("visual."),
    "gemma3": _both("vision_tower.", "multi_modal_projector."),
    "gemma4": _both("vision_tower.", "embed_vision."),
    "mistral3": _both("vision_tower.", "multi_modal_projector."),
    "internvl": _both("vision_tower.", "multi_modal_projector."),
    "llama4": _both("vision_model.", "multi_modal_projector."),
}
"""Kind -> name prefixes of the tower's tensors in a checkpoint. No other tensor has these prefixes."""
