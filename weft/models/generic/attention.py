"""Attention modules of transformers with Weft's op for rotation, norms of heads and the KV cache.

A module is recognized by what the module computes: with random weights, rotations and attention results, the
calls of attention and the output equal those of Weft's ops. Every other module keeps its own code.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.models.generic import recognition
from weft.models.generic.interface import AttentionCall, answered_by
from weft.models.generic.modules import FlatNorm, Joined, JoinedPart
from weft.models.generic.recognition import equal, random
from weft.ops import torch_ops

Tensor = torch.Tensor
_INPUTS, _TOKENS = 8, 3
_PARTS = ("q_proj", "k_proj", "v_proj")
_POSITIONS = 100_000
"""First position of the comparison: a factor by position shows at large positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Facts of a recognized attention module."""

    dim: int
    """Dims of a head."""
    scale: float
    eps: float
    """Epsilon of the norms of heads; 0 without norms."""
    widths: frozenset[int]
    """Numbers of rotated dims for which the comparison succeeded."""
    place: int
    """Number of ``position_embeddings`` among the arguments of the module."""


class _Recorded:
    """Receiver that records one call of attention and returns random values."""

    attends = True

    def __init__(self) -> None:
        self.call: AttentionCall | None = None
        self.given: Tensor = torch.empty(0)

    def attend(self, call: AttentionCall) -> Tensor:
        self.call = call
        self.given = random(1, _TOKENS, call.q.shape[1], call.v.shape[3])
        return self.given

    def route(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("attention has no experts")


def _layer(inputs: int, outputs: int, number: int, *, bias: bool) -> nn.Linear:
    """Return a random linear layer. Layers with another ``number`` have other weights."""
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    layer.weight.data = random(outputs, inputs) * (1 + number)
    if bias:
        layer.bias.data = random(outputs) * (1 + number)
    return layer


@torch.no_grad()
def rotation_of(module: Any, dim: int) -> Rotation | None:
    """Return the facts of the attention ``module`` (a skeleton) with heads of ``dim``; None if unknown."""
    children = dict(module.named_children())
    if any(type(children.get(name)) is not nn.Linear for name in (*_PARTS, "o_proj")):
        return None
    norms = {name: children[name] for name in ("q_norm", "k_norm") if name in children}
    others = [part for name, part in children.items() if name not in {*_PARTS, "o_proj", *norms}]
    if list(module.parameters(recurse=False)) or any(list(part.parameters()) for part in others):
        return None
    arguments = list(inspect.signature(module.forward).parameters)
    if "hidden_states" not in arguments[:1] or "position_embeddings" not in arguments:
        return None
    found = [recognition.norm_of(part) for part in norms.values()]
    if len(norms) == 1 or len(set(found)) > 1 or None in found:
        return None
    eps, centred = (found[0] if found else None) or (0.0, False)
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for number, name in enumerate(_PARTS):
        part = children[name]
        twin._modules[name] = _layer(_INPUTS, part.out_features, number, bias=part.bias is not None)
    twin._modules["o_proj"] = _layer(children["o_proj"].in_features, _INPUTS, 0, bias=False)
    weights = dict[str, Tensor]()
    for number, (name, part) in enumerate(norms.items()):
        if tuple(part.weight.shape) != (dim,):
            return None
        other = copy.deepcopy(part).to_empty(device="cpu").double()
        other.weight.copy_(random(dim) + number)
        twin._modules[name] = other
        weights[name] = other.weight + float(centred)
    # Large inputs show a module that cuts off its values (``clip_qkv``).
    scales = {
        width: {_compared(twin, dim, width, weights, eps, size) for size in recognition.SIZES}
        for width in _widths(module, dim)
    }
    widths = frozenset(width for width, found in scales.items() if None not in found and len(found) == 1)
    if not widths:
        return None
    (scale,) = scales[min(widths)]
    assert scale is not None
    return Rotation(
        dim=dim, scale=scale, eps=eps, widths=widths, place=arguments.index("position_embeddings")
    )


def _widths(module: Any, dim: int) -> list[int]:
    """Return numbers of rotated dims to compare: all dims, a half, a quarter, the configured part."""
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    part = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    part = part or getattr(config, "partial_rotary_factor", None) or 1.0
    configured = int(dim * part) if isinstance(part, float) else dim
    return [
        width for width in dict.fromkeys((dim, configured, dim // 2, dim // 4)) if width and not width % 2
    ]


def _compared(
    twin: Any, dim: int, width: int, weights: dict[str, Tensor], eps: float, size: float
) -> float | None:
    """Return the scale of attention if ``twin`` computes what Weft's op computes; None otherwise.

    width: rotated dims. weights: weights of the norms of queries and keys. size: factor of the inputs.
    """
    x = size * random(1, _TOKENS, _INPUTS)
    cos, sin = random(1, _TOKENS, width // 2), random(1, _TOKENS, width // 2 + 1)[..., 1:]
    both = tuple(torch.cat((part, part), dim=-1) for part in (cos, sin))
    positions = torch.arange(_POSITIONS, _POSITIONS + _TOKENS)
    recorded = _Recorded()
    given = {"hidden_states": x, "position_embeddings": both, "attention_mask": None}
    try:
        with answered_by(recorded):
            result = twin(**given, position_ids=positions[None], cache_position=positions)
    except Exception:  # another form of rotation, or other arguments
        return None
    call = recorded.call
    if call is None or call.other or call.softcap or call.sinks is not None or call.distances is not None:
        return None
    if not isinstance(result, tuple) or len(result) != 2 or result[1] is not None:
        return None
    qkv = torch.cat([twin._modules[name](x[0]) for name in _PARTS], dim=-1)
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    if call.v.shape[1:] != call.k.shape[1:] or qkv.shape[1] != (heads + 2 * kv_heads) * dim:
        return None
    q_weight, k_weight = weights.get("q_norm"), weights.get("k_norm")
    due = torch_ops.rotated_qkv(qkv, heads, kv_heads, dim, q_weight, k_weight, eps, cos[0], sin[0])
    made = (part[0].transpose(0, 1) for part in (call.q, call.k, call.v))
    out = twin._modules["o_proj"](recorded.given.reshape(1, _TOKENS, -1))
    same = all(equal(one, other) for one, other in zip(made, due, strict=True)) and equal(result[0], out)
    return call.scale if same else None


class FusedAttention:
    """Forward pass of a recognized attention module, with Weft's op between its matrices."""

    def __init__(
        self,
        module: Any,
        rotation: Rotation,
        run: Callable[[FusedAttention, Tensor, tuple[Tensor, Tensor]], Tensor | None],
    ) -> None:
        """Replace ``module.forward``. ``run``: computes the module for (this, x, (cos, sin)), or returns None
        if the pass is not Weft's."""
        self.layer: int = module.layer_idx
        self.rotation = rotation
        self.group: Joined = module.q_proj.group
        self.out: Callable[[Tensor], Tensor] = module.o_proj
        self.heads, self.kv_heads = (size // rotation.dim for size in self.group.sizes[:2])
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        self.norms = [norm.inner.weight if isinstance(norm, FlatNorm) else None for norm in norms]
        self._plain = module.forward
        self._run = run
        module.forward = self.forward

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return what the module returns: (output, None)."""
        place = self.rotation.place
        x = named["hidden_states"] if "hidden_states" in named else given[0]
        angles = named.get("position_embeddings", given[place] if len(given) > place else None)
        if isinstance(angles, tuple) and angles[0].shape[-1] in self.rotation.widths:
            made = self._run(self, x, angles)
            if made is not None:
                return made, None
        return self._plain(*given, **named)


def is_joined(module: Any) -> bool:
    """Return True if the queries, keys and values of ``module`` are one matrix in this order, alone."""
    parts = [getattr(module, name) for name in _PARTS]
    if not all(isinstance(part, JoinedPart) for part in parts):
        return False
    group = parts[0].group
    own = all(part.group is group and part.number == number for number, part in enumerate(parts))
    return own and len(group.sizes) == len(parts)
