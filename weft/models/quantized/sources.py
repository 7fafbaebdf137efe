"""Which published tensors make one weight.

A *source* is one name of a family's weight map, made of one published tensor (its own name) or of several
parts, each by its role. Parts may lie in different files. Families know nothing of this.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

#: End of a published name, the end of the name that the weight map has, and the part's role.
_PARTS = (
    (".weight_scale_inv", ".weight", "scale"),
    (".weight_scale", ".weight", "scale"),
    (".scale", ".weight", "scale"),
    (".weight_scale_2", ".weight", "factor"),
    (".weight_global_scale", ".weight", "divisor"),
    (".weight_packed", ".weight", "packed"),
    (".weight_zero_point", ".weight", "zeros"),
    (".weight_g_idx", ".weight", "groups"),
    (".weight_shape", ".weight", "shape"),
    (".qweight", ".weight", "qweight"),
    (".qzeros", ".weight", "qzeros"),
    (".scales", ".weight", "scales"),
    (".g_idx", ".weight", "groups"),
    ("_scale_inv", "", "scale"),
    ("_blocks", "", "blocks"),
    ("_scales", "", "scales"),
    ("_scale", "", "scale"),
)
#: Scales of activations and of the KV cache: Weft quantizes no activations, and cache entries by themselves.
_WITHOUT_EFFECT = (
    ".input_scale",
    ".input_global_scale",
    ".activation_scale",
    "_activation_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)
PLAIN = ""
"""The role of a tensor that goes by the weight's own name."""


@dataclass(frozen=True, slots=True)
class Part:
    """One published tensor of a quantized weight."""

    name: str
    path: Path


@dataclass(slots=True)
class Source:
    """One weight, by its name in the weight map, and its parts by role."""

    name: str
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file that it is read with: its first part's."""
        return next(iter(self.parts.values())).path


def part_of(name: str, known: Container[str], quantized: bool) -> tuple[str, str] | None:
    """(weight, role) of the published tensor ``name``; None where it makes no weight of ``known``."""
    if name in known:
        return name, PLAIN
    if not quantized:
        return None
    for end, whole, role in _PARTS:
        if name.endswith(end) and (weight := name.removesuffix(end) + whole) in known:
            return weight, role
    return None


def names_of(weight: str, role: str) -> list[str]:
    """What the part ``role`` of ``weight`` can be called."""
    result = [weight] if role == PLAIN else []
    for end, whole, known in _PARTS:
        if known == role and weight.endswith(whole):
            result.append(weight.removesuffix(whole) + end)
    return result


def without_effect(name: str) -> bool:
    """Whether a tensor of a quantized checkpoint says nothing of its weights."""
    return name.endswith(_WITHOUT_EFFECT)
