"""Self check of a loaded model, in three comparisons of hidden states.

A sequence computed whole must equal the same sequence computed in pieces. The whole must also equal a pass
with the attention and the masks of transformers.

A third comparison replaces attention: every row attends to itself. Then no row may change with the rows
beside it. A small state shows in 16 bits. A rotation by the longest row of a step shows, too. The two passes
cost about an eighth of the whole check.

Every rank checks its own part of the model. Sums over ranks stay partial, on both sides of a comparison.

State outside of the KV caches (a convolution over tokens, a recurrent state, positions counted by the model)
makes the pieces differ. The probe cannot see such state in a layer that also attends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, SegmentInput, StepInput
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.spec import ModelSpec
from weft.models.generic.interface import AttentionCall, published_experts
from weft.models.generic.model import TransformersModel
from weft.ops.kv_fp8 import VALUES
from weft.parallel.comm import drive

log = get_logger(__name__)

Tensor = torch.Tensor
R = TypeVar("R")

_TOKENS, _BLOCK, _BLOCKS = 21, 8, 12
_PIECES = (9, 5, 1, 1, 1, 1, 1, 1, 1)
"""Tokens of each piece: two chunks of a prompt, then single tokens."""
_WANTED = (20, 17, 11, 6, 4, 0)
"""Rows of the whole sequence that the last layer computes alone."""
_LIMITS = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}
"""Largest accepted difference between whole and pieces, relative to the norm of a hidden state. Modules of
transformers compute in float32 inside, also for float64. State outside of the caches gives about 1."""
_PUBLISHED_LIMITS = {**_LIMITS, torch.bfloat16: 0.7, torch.float16: 0.7}
"""Largest accepted difference from the attention of transformers. In a model of 16 bits, transformers rounds
scores to 16 bits, so only gross errors show. Unrelated hidden states differ by 1.4."""
_ROW_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
"""Largest accepted change of a row when the rows beside change. Without attention a row reads no other row,
so at most another order of sums changes a row."""
_LOOP_LIMIT = 0.1
"""The same in 16 bits, for experts in a loop of transformers: an expert multiplies as many rows as chose the
expert. Kernels for other numbers of rows round other bits, and every layer adds to the difference."""


@dataclass(slots=True)
class _Row:
    """One sequence of the check."""

    ids: list[int]
    blocks: list[int]
    """Block ids, in every KV cache group alike."""
    computed: int = 0
    made: list[Tensor] = field(default_factory=list)
    """Hidden states [hidden] of the computed tokens."""


class _Check:
    """Runs steps of a model over small caches of its own, full of NaN."""

    def __init__(self, model: TransformersModel, backends: Backends) -> None:
        self._model = model
        self._backends = backends
        self._kv = [self._caches(layer) for layer in range(model.spec.layers)]

    def _caches(self, layer: int) -> LayerCache:
        model = self._model
        made = dict[int, tuple[Tensor, ...]]()
        for kind in model.spec.caches_of(layer):
            spec = model.spec.caches[kind]
            shape = (1 + _BLOCKS, 2, spec.kv_heads, _BLOCK, spec.head_dim)
            if spec.fp8:
                values = torch.zeros(shape, dtype=torch.uint8, device=model.device).view(VALUES)
                made[kind] = (values, torch.full(shape[:-1], torch.nan, device=model.device))
            else:
                made[kind] = (torch.full(shape, torch.nan, dtype=model.dtype, device=model.device),)
        return made

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

    def _segment(self, rows: list[tuple[_Row, int]], begin: int) -> SegmentInput:
        counts = np.array([count for _, count in rows], np.int32)
        starts = np.array([row.computed for row, _ in rows], np.int32)
        width = max((len(row.blocks) for row, _ in rows), default=0)
        table = [row.blocks + [0] * (width - len(row.blocks)) for row, _ in rows]
        tables = self._column([block for blocks in table for block in blocks]).view(len(rows), width)
        return SegmentInput(
            begin=begin,
            rows=len(rows),
            tokens=int(counts.sum()),
            host_counts=counts,
            host_starts=starts,
            q_offsets=self._column([0, *np.cumsum(counts).tolist()]).int(),
            starts=self._column(starts.tolist()),
            slots=self._column(list(range(len(rows)))),
            live=self._column([0] * len(rows)),
            tables=(tables,) * len(self._model.spec.caches),
        )

    def step(self, prefill: list[tuple[_Row, int]], decode: list[tuple[_Row, int]]) -> None:
        """Compute more tokens of each row, and append the hidden states to the rows."""
        hidden = self.hidden(prefill, decode)
        # The rows of ``hidden`` are in the order of the rows: prefill before decode.
        begin = 0
        for row, count in (*prefill, *decode):
            row.made += list(hidden[begin : begin + count].double())
            row.computed += count
            begin += count

    def hidden(
        self,
        prefill: list[tuple[_Row, int]],
        decode: list[tuple[_Row, int]],
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the hidden states of more tokens of each row: of all tokens, or of the rows ``wanted``."""
        rows = [*prefill, *decode]
        spans = [(row, range(row.computed, row.computed + count)) for row, count in rows]
        first = self._segment(prefill, 0)
        segments = (first, self._segment(decode, first.tokens))
        places = [row.blocks[p // _BLOCK] * _BLOCK + p % _BLOCK for row, span in spans for p in span]
        caches = list(enumerate(self._model.spec.caches))
        prepare, dtype = self._backends.prepare, self._model.dtype
        step = StepInput(
            ids=self._column([row.ids[p] for row, span in spans for p in span]),
            positions=self._column([p for _, span in spans for p in span]),
            writes=(self._column(places),) * len(caches),
            segments=segments,
            prepared=tuple(
                tuple(prepare(segment, kind, spec, _BLOCK, dtype) for kind, spec in caches)
                for segment in segments
            ),
            logits_index=self._column(range(len(places))),
        )
        index = None if wanted is None else self._column(wanted)
        return drive(self._model.hidden(step, self._kv, self._backends, index))


class _Apart:
    """Receiver of a pass in which every row attends to itself: the result of attention is the row's value."""

    attends = True

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        """Queries, keys and values [T / 2, elements] of the odd rows, of all calls."""

    def attend(self, call: AttentionCall) -> Tensor:
        self.seen += [part[0, :, 1::2].transpose(0, 1).flatten(1) for part in (call.q, call.k, call.v)]
        return (
            call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], dim=1).transpose(1, 2).contiguous()
        )

    def route(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return published_experts(module, x, ids, weights)


def _change_beside(model: TransformersModel, ids: list[int]) -> float:
    """Return the change of the odd rows when the tokens of the even rows change, and the last row moves to
    the end of the context. The change is relative to the row, the median over the rows."""
    others = [one if number % 2 else ids[-1 - number] for number, one in enumerate(ids)]
    positions = list(range(len(ids)))
    moved = [*positions[:-1], max(model.spec.max_position - 1, positions[-1])]
    found = []
    for tokens, places in ((ids, positions), (others, moved)):
        seen = _Apart()
        column = torch.tensor([tokens, places], device=model.device)
        hidden = model.hidden_apart(column[0], column[1], seen)
        found.append([*seen.seen, hidden[1::2]])
    # Doubles of one part at a time: a large model has hundreds of parts.
    return max(_apart(one.double(), other.double(), ()) for one, other in zip(*found, strict=True))


def _check_rows(model: TransformersModel, beside: float) -> None:
    """Raise ConfigError if rows meet outside of attention. ``beside``: the result of ``_change_beside``."""
    limit = _ROW_LIMITS[model.dtype]
    if model.loops and model.dtype in (torch.bfloat16, torch.float16):
        limit = _LOOP_LIMIT
    if not beside <= limit:
        raise _refused(
            model.spec,
            f"outside of attention, a row changes by {beside:.1e} with the rows beside it (limit {limit:g}): "
            "by a state, or by a rotation that depends on the longest row of a step",
        )


@torch.inference_mode()
def check_loaded(model: TransformersModel) -> float:
    """Return the difference between a whole sequence and its pieces, relative to the hidden states.

    The pieces share their steps with another sequence. Raises ConfigError if a difference is too large.
    """
    spec = model.spec
    backends = choose("torch", spec, model.dtype, model.device, _BLOCK)
    stride = max(1, (spec.vocab_size - 3) // 29)
    ids = [2 + (7 + 5 * n) * stride % (spec.vocab_size - 2) for n in range(_TOKENS)]
    model.sums.alone = True
    try:
        check = _Check(model, backends)
        whole = _Row(ids, [5, 2, 9])
        check.step([(whole, _TOKENS)], [])
        # Another order of blocks, beside a row of another length.
        pieces, other = _Row(ids, [7, 1, 4]), _Row(ids[::-1] * 2, [3, 8, 6, 10])
        for count in _PIECES:
            if count > 1:
                check.step([(other, 3), (pieces, count)], [])
            else:
                check.step([(other, 2)], [(pieces, 1)])
        head = drive(model.logits(torch.stack(whole.made[-1:]).to(model.dtype)))
        _try_last_rows(model, check, whole)
        beside = _of_class(model, "of rows beside others", lambda: _change_beside(model, ids)) or 0.0
        published = None
        if not model.cuts:  # a rank's attention has zeros for the heads of other ranks
            column = torch.tensor(ids, device=model.device)
            published = _of_class(
                model,
                "with the attention of transformers",
                lambda: model.published_hidden(column).double(),
            )
    finally:
        model.sums.alone = False
    if head.shape != (1, spec.vocab_size):
        raise ConfigError(
            f"{spec.architecture}: the head gives logits of shape {list(head.shape)}", param="--model"
        )
    begins = (_PIECES[0], _PIECES[0] + _PIECES[1])
    one = torch.stack(whole.made)
    found = _apart(one, torch.stack(pieces.made), begins)
    fp8 = any(cache.fp8 for cache in spec.caches)
    limit = _LIMITS[torch.bfloat16 if fp8 else model.dtype]
    if not found <= limit:  # NaN is refused as well
        raise _refused(
            spec,
            f"a sequence in pieces differs from the whole sequence by {found:.1e} (limit {limit:g}), so "
            "the model keeps state outside of the KV cache",
        )
    _check_rows(model, beside)
    if published is not None:
        apart = _apart(one, published, begins)
        limit = _PUBLISHED_LIMITS[torch.bfloat16 if fp8 else model.dtype]
        if not apart <= limit:
            raise _refused(
                spec,
                f"Weft's attention differs from the attention of transformers by {apart:.1e} (limit "
                f"{limit:g}), so the model asks for a computation that Weft does not know",
            )
    log.info("self check of %s: pieces differ from the whole by %.1e", spec.architecture, found)
    return found


def _of_class(model: TransformersModel, name: str, compare: Callable[[], R]) -> R | None:
    """Return ``compare()``, a pass through code of the class that Weft otherwise replaces.

    ``name``: of the comparison, for the log. Such code may count the heads of all ranks. So an error on one
    of several ranks gives None: the comparison needs one rank.
    """
    try:
        return compare()
    except Exception as error:  # code of transformers raises many types
        if model.sums.comm.size == 1 or isinstance(error, ConfigError):
            raise
        log.info(
            "%s: the comparison %s in the self check needs one rank: %s", model.spec.architecture, name, error
        )
        return None


def _try_last_rows(model: TransformersModel, check: _Check, whole: _Row) -> None:
    """Compute the last layer for a few rows from now on, if the rows are equal to the rows of ``whole``."""
    last = model.last_rows
    if last is None:
        return
    last.on = True
    why = "other values"
    try:
        found = check.hidden([(_Row(whole.ids, whole.blocks), _TOKENS)], [], _WANTED).double()
        due = torch.stack([whole.made[row] for row in _WANTED])
        last.on = found.shape == due.shape and _apart(due, found, ()) <= _LIMITS[model.dtype]
    except Exception as error:  # code of transformers raises many types for other numbers of rows
        last.on, why = False, str(error)
    if not last.on:
        log.info("%s: the last layer computes all rows (%s)", model.spec.architecture, why)


def _apart(one: Tensor, other: Tensor, begins: tuple[int, ...]) -> float:
    """Return the difference of two [T, hidden], relative to the rows of ``one``.

    The result is the largest median over the parts of the rows, cut at ``begins``: in bf16 a few tokens may
    choose other experts.
    """
    apart = (one - other).norm(dim=1) / one.norm(dim=1).clamp(min=1e-30)
    return max(float(part.median()) for part in apart.tensor_split(begins))


def _refused(spec: ModelSpec, why: str) -> ConfigError:
    return ConfigError(
        f"{spec.architecture} cannot be served with the implementation of transformers: {why}",
        param="--model",
    )
