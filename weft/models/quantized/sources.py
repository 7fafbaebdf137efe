"""Sources: the published tensors of one weight.

A *source* is one name of a family's weight map. A source consists of one published tensor with the same name,
or of several parts with different roles. Parts may be in different files. Families do not know about parts.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

#: Ending of the published name, ending of the name in the weight map, and role of the part.
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
#: Scales of activations and of the KV cache. Weft does not quantize activations, and computes cache scales.
_WITHOUT_EFFECT = (
    *(f".{what}_{end}" for what in ("input", "output", "q", "k", "v") for end in ("scale", "zero_point")),
    ".input_scale_ub",
    ".input_global_scale",
    ".activation_scale",
    "_activation_scale",
    *(f"{what}_quantizer._amax" for what in ("input", "output", "q_bmm", "k_bmm", "v_bmm")),
)
PLAIN = ""
"""Role of a tensor with the weight's own name."""


@dataclass(frozen=True, slots=True)
class Part:
    """One published tensor of a quantized weight."""

    name: str
    path: Path


@dataclass(slots=True)
class TensorSource:
    """One weight, named as in the weight map, with parts by role."""

    name: str
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Path of the file that contains the first part."""
        return next(iter(self.parts.values())).path


def part_of(name: str, known: Container[str], quantized: bool) -> tuple[str, str] | None:
    """Return (weight, role) of the published tensor ``name``; None if ``name`` belongs to no weight of
    ``known``."""
    if name in known:
        return name, PLAIN
    if not quantized:
        return None
    for end, whole, role in _PARTS:
        if name.endswith(end) and (weight := name.removesuffix(end) + whole) in known:
            return weight, role
    return None


def names_of(weight: str, role: str) -> list[str]:
    """Return the possible names of the part ``role`` of ``weight``."""
    result = [weight] if role == PLAIN else []
    for end, whole, known in _PARTS:
        if known == role and weight.endswith(whole):
            result.append(weight.removesuffix(whole) + end)
    return result


def without_effect(name: str) -> bool:
    """Return True if a tensor of a quantized checkpoint has no effect on weights."""
    return name.endswith(_WITHOUT_EFFECT)


def weights_named(name: str) -> list[str]:
    """Return every weight of which a published tensor ``name`` can be a part; the plain weight first."""
    return [name] + [name.removesuffix(end) + whole for end, whole, _ in _PARTS if name.endswith(end)]
