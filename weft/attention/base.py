"""Input of a model for one step, and the interface of attention backends.

All operations except core attention run once on the merged rows ``[prefill | decode]``. Core attention runs
per segment. Cumulative lengths and indices inside a ``SegmentInput`` are relative to the segment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch

from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.low_rank import AdapterRows
from weft.ops.row_routes import RowRoutes
from weft.types.exchange import UNAGREED, Exchange

Tensor = torch.Tensor

LayerCache: TypeAlias = Mapping[int, tuple[Tensor, ...]]
"""Caches of one layer: for each KV cache group of the layer, by number of the group, the tensors of the
group.

full, window    (``[1 + blocks, 2, kv_heads, block, head_dim]``,), also chunk
                in 8 bits: values E4M3 of the same shape, scales float32 ``[1 + blocks, 2, kv_heads, block]``
latent          (``[1 + blocks, block, width]``,)
                in 8 bits: values E4M3 ``[.., width - exact]``, scales float32 ``[1 + blocks, block]``, and
                the rest of the entries in the model's dtype, ``[.., exact]``
compressed      (``[1 + blocks, block // ratio, width]``,), the block counted in source positions
state           one tensor per part, ``[slots + 1, copies, *shape]``; see ``SegmentInput.live``
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInput:
    """One segment of a step, staged on the device. R rows, T tokens; both may be 0.

    The tensors belong to the staging buffers of the step: valid until the result of the step was read, never
    written by a model or backend. ``host_*`` are host copies for shapes and loops, so no backend
    synchronizes.
    """

    begin: int
    """First token of the segment in the merged rows."""
    rows: int
    tokens: int
    host_counts: np.ndarray
    """int32 [R]: tokens of each row."""
    host_starts: np.ndarray
    """int32 [R]: upper bound of the context before each row's tokens; exact unless a verify row is in
    flight."""
    q_offsets: Tensor
    """int32 [R + 1]: row r has tokens ``q_offsets[r] .. q_offsets[r + 1] - 1`` of the segment."""
    starts: Tensor
    """int64 [R]: exact ``num_computed`` of each row before the step."""
    slots: Tensor
    """int64 [R]."""
    live: Tensor
    """int64 [R]: valid copy of each row's recurrent state at its start. A decode row writes the state after
    its token j to copy j; a prefill row writes its last state to copy 0. A row at position 0 starts from
    zeros and ignores the copy."""
    tables: tuple[Tensor, ...]
    """Per KV cache group, int64 [R, W]: block ids, padded with 0. Entry i covers the ``block`` positions from
    i * block on. W is 0 for ``state``."""
    ragged: bool = False
    """True if the host does not know the tokens of each row, as in captured steps with prompts: a row may be
    empty, and ``host_counts`` are upper bounds. ``tokens`` is exact."""
    ends: tuple[Tensor | None, ...] = ()
    """Per KV cache group, int64 [T]: end of the positions that a token reads, if behind the token itself
    (tokens of an image); at most the end of the row, and never decreasing within a row. None, and the empty
    tuple: a token reads up to its own position."""

    def end_of(self, kind: int) -> Tensor | None:
        """Return ``ends`` of a KV cache group."""
        return self.ends[kind] if self.ends else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRows:
    """Tokens of a step at image placeholders: M of the T merged rows."""

    rows: Tensor
    """int64 [M], ascending: merged rows."""
    main: Tensor
    """[M, hidden] in the model's dtype: replaces the token embeddings of the rows."""
    levels: Tensor | None = None
    """[n, M, hidden]: added to the stream of the rows after layers 0 .. n - 1 (deepstack); None without
    deepstack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Model input for one step or micro-batch. T tokens, merged over both segments."""

    ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: absolute positions, derived on the device."""
    writes: tuple[Tensor, ...]
    """Per KV cache group, int64 [T]: place of each token's entry in the cache, ``block id * block + offset``.
    A compressed entry is at ``// ratio`` of the place of its group's last token. Empty for ``state``."""
    segments: tuple[SegmentInput, SegmentInput]
    """(prefill, decode)."""
    prepared: tuple[tuple[object, ...], ...]
    """Result of ``Backend.prepare`` for each segment and KV cache group."""
    logits_index: Tensor
    """int64 [L]: merged rows with logits, in plan order."""
    exchange: Exchange = UNAGREED
    """Agreement of the ranks about rows for experts of other ranks."""
    rope_positions: Tensor | None = None
    """int64 [3, T]: frame, row and column for the rotation of each token, for models with rope sections.
    None: all three equal ``positions``."""
    media: MediaRows | None = None
    """None if no token is an image placeholder."""
    adapters: AdapterRows | None = None
    """Places of the adapters of the T rows; None if no row has an adapter."""
    routes: RowRoutes | None = None
    """Recorded and forced experts of the T rows; None if no request asks for routes. With routes, the last
    layer computes all rows."""

    def adapters_at(self, index: Tensor | None) -> AdapterRows | None:
        """Return ``adapters`` of the rows ``index`` (int64 [L]; None: all rows)."""
        return None if self.adapters is None else self.adapters.at(index)


class CoreInput(NamedTuple):
    """Arguments that every form of core attention takes, for one layer and one segment."""

    segment: SegmentInput
    """T tokens; may be empty."""
    caches: LayerCache
    """Caches of the layer. The caches already contain the entries of the segment."""
    scale: float
    """Factor of the products of queries and keys, before the softmax."""
    prepared: object = None
    """Result of ``Backend.prepare`` for the segment and the KV cache group of the layer; for sparse attention
    the result of ``SparseBackend.plan``. None: the backend prepares by itself."""
    sinks: Tensor | None = None
    """[heads], in q's dtype (wide for sparse attention): per head, a score that takes part in the softmax and
    has no value. Latent attention has no sinks."""
    softcap: float = 0.0
    """If greater than 0, scores are capped: see ``ScaleSpec.attention_softcap``. For grouped queries."""


class Backend(ABC):
    """One form of core attention, for one segment per call. One instance serves all layers of a model."""

    #: Form of the backend, as named by ``CacheSpec.form``.
    form: ClassVar[str]
    #: True if the output bits of a row are independent of other rows, chunking and batch size.
    invariant: bool = False
    #: True if ``prepare`` and attention of one-token rows can be captured in a CUDA graph: no copies from the
    #: host, and shapes only from the host's upper bounds.
    capturable: bool = False

    @abstractmethod
    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError unless the backend can serve such layers of the model. Called when the model is
        loaded."""

    def ragged_context(self, spec: ModelSpec, tokens: int) -> int:
        """Return the longest context of a ``ragged`` segment of ``tokens`` tokens that can be captured in a
        CUDA graph; 0, the default: none."""
        return 0

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> object:
        """Compute data shared by all layers of a KV cache group in one step (gather indices, masks).

        Returns None by default. The result is passed to the attention calls as ``prepared`` and must not
        outlive the step.
        """
        return None


def check_served(
    name: str, dtype: torch.dtype, device: torch.device, dtypes: Container[torch.dtype], *devices: str
) -> None:
    """Raise ConfigError unless the backend ``name`` has ``dtype`` and the type of ``device``."""
    if dtype not in dtypes:
        raise ConfigError(f"attention backend '{name}' has no {dtype}", param="--dtype")
    if device.type not in devices:
        raise ConfigError(f"attention backend '{name}' does not run on {device.type}", param="--device")


def refuse_fp8(name: str, cache: CacheSpec) -> None:
    """Raise ConfigError if the cache has 8-bit entries. For backends that read plain entries only."""
    if cache.fp8:
        raise ConfigError(
            f"attention backend {name!r} cannot read a cache in 8 bits: use --kv-cache-dtype auto, or "
            "another --attention-backend",
            param="--kv-cache-dtype",
        )


class Backends:
    """Backends of one model, by form."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._by_form = {backend.form: backend for backend in backends}

    def __getitem__(self, form: str) -> Backend:
        return self._by_form[form]

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._by_form.values())

    @property
    def invariant(self) -> bool:
        """True if all backends are invariant."""
        return all(backend.invariant for backend in self)

    @property
    def capturable(self) -> bool:
        """True if all backends are capturable."""
        return all(backend.capturable for backend in self)

    def ragged_context(self, spec: ModelSpec, tokens: int) -> int:
        """Return the longest context that all backends can capture: see ``Backend.ragged_context``."""
        return min((backend.ragged_context(spec, tokens) for backend in self), default=0)

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> object:
        """Call ``prepare`` of the backend for the form of the group; return None if no backend reads the
        group."""
        return self[spec.form].prepare(segment, kind, spec, block_size, dtype) if spec.form else None


class AttentionBackend(Backend):
    """Grouped-query attention over the paged cache. The cache already contains the segment's keys and values.

    ``check`` rejects everything that a backend does not support (dtype, head size, chunks, capped scores).
    """

    form = "gqa"

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, head_dim] of this segment
        out: Tensor,  # [T, heads, head_dim], written
        core: CoreInput,
        kind: int,  # KV cache group of the layer
        spec: CacheSpec,  # of the group
    ) -> None:
        """Attend causally (and within ``spec.window``, or the chunk) to keys and values in
        ``core.caches[kind]``. Writes ``out``.

        A token with an end in ``core.segment.ends`` also attends to later tokens before the end.

        TRAP: block table entries outside the window, and positions beyond the end of a row, may belong to
        other sequences. Their values (NaN included) must never reach an output. Block 0 is the null block.
        The call must accept a segment without rows. A query without visible keys gets 0.
        """
