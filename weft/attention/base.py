"""What a step looks like to a model, and the interface of attention backends.

Everything but core attention runs once on the merged rows ``[prefill | decode]``; core attention runs per
segment. Cumulative lengths and indices inside a ``SegmentInput`` are relative to that segment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from weft.config.spec import CacheSpec

Tensor = torch.Tensor


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
    tables: tuple[Tensor, ...]
    """For each cache kind, int64 [R, W]: block ids; entry i holds positions i * block .. ; padded with 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step (or micro-batch), as a model sees it. T tokens merged over both segments."""

    ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: absolute, derived on the device."""
    writes: tuple[Tensor, ...]
    """For each cache kind, int64 [T]: where each token's key and value go, ``block id * block + offset``."""
    segments: tuple[SegmentInput, SegmentInput]
    """(prefill, decode)."""
    prepared: tuple[tuple[object, ...], ...]
    """For each segment and cache kind, what the attention backend prepared."""
    logits_index: Tensor
    """int64 [L]: merged rows whose logits are wanted, in plan order."""


class AttentionBackend(ABC):
    """Core attention of one segment over the paged cache, which holds the segment's own keys and values.

    One instance serves all layers of a model. A backend that lacks a form (dtype, head size, window)
    says so in ``check``, when the model is loaded.
    """

    #: Whether a row's output bits are independent of the other rows, chunking and batch size.
    invariant: bool = False
    #: Whether ``prepare`` and ``attend`` of rows of one token each can be captured in a CUDA graph: no copy
    #: from the host, shapes from the host's upper bounds alone.
    capturable: bool = False

    @abstractmethod
    def check(
        self, cache: CacheSpec, heads: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ConfigError when this backend cannot serve such layers."""

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> object:
        """What all layers of a kind share in one step (gather indices, masks), computed once.

        The result is passed back as ``prepared`` and must not outlive the step. None by default.
        """
        return None

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
    ) -> None:
        """Attends causally (and within ``spec.window``) to keys and values that are all in the cache.

        Entries of the block table that lie wholly outside the window, and positions beyond a row's end, may
        have other tenants: never let their values (NaN included) reach an output. Block 0 is the null block.
        Must accept a segment with no rows. ``prepared`` is ``prepare``'s answer for this segment and kind;
        without it the backend prepares by itself.
        """
