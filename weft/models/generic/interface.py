"""Entry points that transformers calls: attention, masks and experts, all named ``weft``.

The functions are global, because transformers registers functions by name. The receiver of a call is the
current step of the *thread*: several engines of one process run in different threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from weft.models.generic.masks import Mask, classify, make_mask

Tensor = torch.Tensor

NAME = "weft"
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "input_ids",
        "is_causal",
        "layer_type",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "shared_kv_states",
        "use_cache",
    }
)
"""Arguments of attention functions that do not change the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Arguments of one call of the attention function."""

    module: Any
    """Attention module of the layer, with ``layer_idx``."""
    q: Tensor
    """[1, heads, T, dim]."""
    k: Tensor
    """[1, kv_heads, T, dim]."""
    v: Tensor
    """[1, kv_heads, T, v_dim]."""
    mask: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[heads]."""
    other: tuple[str, ...]
    """Names of further arguments that may change the result."""
    distances: Distances | None = None
    """Bias by the distance of query and key; None for no bias."""

    def with_distances(self, positions: Tensor) -> AttentionCall:
        """Return an equal call without ``distances``: the bias is in further dims of queries and keys.

        positions: int64 [T] of the queries, which are the positions of the keys.
        """
        if self.distances is None:
            return self
        q_more, k_more = self.distances.dims(self.q, self.scale, positions)
        k_more = k_more.expand(self.k.shape[1], *k_more.shape)
        q, k = (
            torch.cat((part, more[None].to(part)), dim=3)
            for part, more in ((self.q, q_more), (self.k, k_more))
        )
        return replace(self, q=q, k=k, distances=None)


class Distances:
    """A bias of scores by distance (ALiBi): ``slope of the head * (position of key - position of query)``.

    The part of the query is the same for all of its keys, so the softmax does not need the part. The rest is
    a product, which four further dims of queries and keys add to the score:

        query  slope, rounded to 8 bits  the same  the rest of the slope  the same
        key    position % 256            p - p % 256  position % 256      p - p % 256

    Each number is exact in 16 bits up to position 65,535. Zeros fill the dims to a multiple of 16.
    """

    LAST = (1 << 16) - 1
    """Last position with exact numbers in 16 bits."""

    def __init__(self, slopes: Tensor) -> None:
        """slopes: [heads], without memory of the device of the model."""
        self._slopes = slopes.double()
        self._made = dict[tuple[torch.device, float], Tensor]()

    def dims(self, q: Tensor, scale: float, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the further dims of queries [heads, T, n] and of keys [T, n], in a wide type.

        q: [1, heads, T, dim]. scale: factor of scores. positions: int64 [T].
        """
        filled = -(q.shape[3] + 4) % 16
        place = (q.device, scale)
        if place not in self._made:  # once, so that a captured step copies nothing from the host
            slopes = self._slopes / scale
            high = slopes.bfloat16().double()
            rows = torch.stack((high, high, slopes - high, slopes - high), dim=1)
            self._made[place] = torch.nn.functional.pad(rows, (0, filled)).to(q.device)
        near = positions % 256
        far = positions - near
        keys = torch.nn.functional.pad(torch.stack((near, far, near, far), dim=1), (0, filled))
        return self._made[place][:, None].expand(-1, len(positions), -1), keys


class Receiver(Protocol):
    """Object that answers the calls of one forward pass."""

    attends: bool
    """False for a pass with the attention of transformers."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [1, T, heads, v_dim]."""

    def route(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the chosen experts [T, hidden]. ids, weights: [T, k]."""


class _Current(threading.local):
    receiver: Receiver | None = None


_current = _Current()


@contextmanager
def answered_by(receiver: Receiver) -> Iterator[None]:
    """Send the calls of this thread to ``receiver``."""
    before = _current.receiver
    _current.receiver = receiver
    try:
        yield
    finally:
        _current.receiver = before


def current() -> Receiver | None:
    """Return the receiver of the calls of this thread."""
    return _current.receiver


def attends() -> bool:
    """Return True in a pass with Weft's attention, on this thread."""
    return _current.receiver is not None and _current.receiver.attends


def _receiver() -> Receiver:
    assert _current.receiver is not None, "attention was called outside of a forward pass of Weft"
    return _current.receiver


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    distances: Distances | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers. The result has shape [1, T, heads, v_dim].

    ``distances`` is no argument of transformers: see ``own_attention``.
    """
    causal = other.get("is_causal")
    seen = {name for name, value in other.items() if name not in _WITHOUT_EFFECT and value is not None}
    if causal is False or (causal is None and not getattr(module, "is_causal", True)):
        seen.add("is_causal")
    call = AttentionCall(
        module=module,
        q=query,
        k=key,
        v=value,
        mask=attention_mask,
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        other=tuple(sorted(seen)),
        distances=distances,
    )
    return _receiver().attend(call), None


def _mask(*_: Any, mask_function: Any = None, config: Any = None, **__: Any) -> Mask:
    """Mask function of transformers: a mask of one element that carries the kind."""
    text = None if config is None else config.get_text_config()
    return make_mask(classify(mask_function, getattr(text, "max_position_embeddings", None) or 0))


def _experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts function of transformers. x: [T, hidden]; ids, weights: [T, k]."""
    return _receiver().route(module, x, ids, weights)


def published_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the result of the family's own loop over experts. The loop reads values on the host."""
    loop = type(module).forward.__wrapped__
    result: Tensor = loop(module, x, ids, weights)
    return result


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def call_weft(config: Any, attention: str = NAME) -> None:
    """Select Weft's functions in ``config`` and in the configurations inside.

    ``attention``: another name of an attention function, for the self check.
    """
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}]
    for one in (config, *inner):
        if one is not None:
            one._attn_implementation = attention
            one._experts_implementation = NAME
