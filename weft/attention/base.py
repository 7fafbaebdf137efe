"""What a step looks like to a model, and the interface of attention backends.

Everything but core attention runs once on the merged rows ``[prefill | decode]``; core attention runs per
segment. Cumulative lengths and indices inside a ``SegmentInput`` are relative to that segment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch

from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.types.exchange import UNAGREED, Exchange

Tensor = torch.Tensor

LayerCache: TypeAlias = Mapping[int, tuple[Tensor, ...]]
"""A layer's caches: for each cache kind that it is in, by the kind's number, the tensors of it.

full, window    (``[1 + blocks, 2, kv_heads, block, head_dim]``,)
                in 8 bits: values E4M3 of that shape, scales float32 ``[1 + blocks, 2, kv_heads, block]``
latent          (``[1 + blocks, block, width]``,)
                in 8 bits: values E4M3 ``[.., width - exact]``, scales float32 ``[1 + blocks, block]``, and
                what is left of the entries, ``[.., exact]``
compressed      (``[1 + blocks, block // ratio, width]``,), the block counted in source positions
state           for each part one, ``[slots + 1, copies, *shape]``; see ``SegmentInput.live``
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInput:
    """One segment of a step, staged on the device. R rows, T tokens; both may be 0.

    The tensors belong to the step's staging buffers: valid until the step's result was read, never written
    by a model or backend. ``host_*`` are host copies for shapes and loops, so that no backend synchronises.
    """

    begin: int
    """First token of the segment in the merged rows."""
    rows: int
    tokens: int
    host_counts: np.ndarray
    """int32 [R]: tokens of each row."""
    host_starts: np.ndarray
    """int32 [R]: upper bound of the context before the row's tokens; exact if no verify row is in flight."""
    q_offsets: Tensor
    """int32 [R + 1]: row r's tokens are ``q_offsets[r] .. q_offsets[r + 1]`` of the segment."""
    starts: Tensor
    """int64 [R]: the true ``num_computed`` of each row before the step."""
    slots: Tensor
    """int64 [R]."""
    live: Tensor
    """int64 [R]: the copy of each row's recurrent state that holds for its start. A row of the decode segment
    writes the state after its token j to copy j; a prefill row its last state to copy 0. A row that starts at
    position 0 starts from zeros, whatever the copy holds."""
    tables: tuple[Tensor, ...]
    """For each cache kind, int64 [R, W]: block ids; entry i holds positions i * block .. ; padded with 0.
    W is 0 for ``state``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRows:
    """The tokens of a step that stand for images: M of the T merged rows."""

    rows: Tensor
    """int64 [M], ascending: merged rows."""
    main: Tensor
    """[M, hidden] in the model's dtype: what stands in place of their embeddings."""
    levels: Tensor | None = None
    """[n, M, hidden]: what is added to the stream at these rows behind layers 0 .. n - 1 (deepstack)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step (or micro-batch), as a model sees it. T tokens merged over both segments."""

    ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: absolute, derived on the device."""
    writes: tuple[Tensor, ...]
    """For each cache kind, int64 [T]: where each token's entry goes, ``block id * block + offset`` positions;
    a compressed entry goes to this ``// ratio`` of its group's last token. Empty for ``state``."""
    segments: tuple[SegmentInput, SegmentInput]
    """(prefill, decode)."""
    prepared: tuple[tuple[object, ...], ...]
    """For each segment and cache kind, what the attention backend prepared."""
    logits_index: Tensor
    """int64 [L]: merged rows whose logits are wanted, in plan order."""
    exchange: Exchange = UNAGREED
    """What ranks agreed on for rows that go to experts of other ranks."""
    rope_positions: Tensor | None = None
    """int64 [3, T]: frame, row and column by which each token is rotated, of models whose rope has sections;
    None: all three are ``positions``."""
    media: MediaRows | None = None
    """None where no token stands for an image."""


class Backend(ABC):
    """One form of core attention, for one segment at a time. One instance serves all layers of a model."""

    #: Which form it computes, as ``CacheSpec.form`` names it.
    form: ClassVar[str]
    #: Whether a row's output bits are independent of the other rows, chunking and batch size.
    invariant: bool = False
    #: Whether ``prepare`` and attention of rows of one token each can be captured in a CUDA graph: no copy
    #: from the host, shapes from the host's upper bounds alone.
    capturable: bool = False

    @abstractmethod
    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ConfigError, when the model is loaded, unless it can serve such layers of such a model."""

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> object:
        """What all layers of a kind share in one step (gather indices, masks), computed once.

        The result is passed back as ``prepared`` and must not outlive the step. None by default.
        """
        return None


def refuse_fp8(name: str, cache: CacheSpec) -> None:
    """For backends that read plain entries alone. Raises ConfigError for others."""
    if cache.fp8:
        raise ConfigError(
            f"attention backend {name!r} cannot read a cache in 8 bits: use --kv-cache-dtype auto, or "
            "another --attention-backend",
            param="--kv-cache-dtype",
        )


class Backends:
    """The backends of one model, by form."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._by_form = {backend.form: backend for backend in backends}

    def __getitem__(self, form: str) -> Backend:
        return self._by_form[form]

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._by_form.values())

    @property
    def invariant(self) -> bool:
        """Whether all are."""
        return all(backend.invariant for backend in self)

    @property
    def capturable(self) -> bool:
        """Whether all are."""
        return all(backend.capturable for backend in self)

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> object:
        """``Backend.prepare`` of the form that reads this kind; None where none does."""
        return self[spec.form].prepare(segment, kind, spec, block_size, dtype) if spec.form else None


class AttentionBackend(Backend):
    """Grouped-query attention over the paged cache, which holds the segment's own keys and values.

    A backend that lacks something (dtype, head size, window, sinks) says so in ``check``.
    """

    form = "gqa"

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, head_dim] of this segment
        out: Tensor,  # [T, heads, head_dim], written
        cache: Tensor,  # [blocks, 2, kv_heads, block, head_dim] of this layer
        segment: SegmentInput,
        kind: int,
        spec: CacheSpec,
        scale: float,
        prepared: object = None,
        sinks: Tensor | None = None,  # [heads], q's dtype
        scales: Tensor | None = None,  # float32 [blocks, 2, kv_heads, block], where the cache is E4M3
    ) -> None:
        """Attends causally (and within ``spec.window``) to keys and values that are all in the cache.

        Entries of the block table that lie wholly outside the window, and positions beyond a row's end, may
        belong to other sequences: never let their values (NaN included) reach an output. Block 0 is the null
        block. Must accept a segment with no rows. ``prepared`` is ``prepare``'s answer for this segment and
        kind; without it the backend prepares by itself. ``sinks``: a score of each head that takes its part
        of the softmax and adds nothing to the sum; who sees no key gets 0.
        """
