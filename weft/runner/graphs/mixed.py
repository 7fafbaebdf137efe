"""Captured steps with prompts: rows of prompts and rows that decode, replayed as one CUDA graph.

Launched op by op, a step of a few hundred tokens takes longer to launch than to compute. Such a step is
captured for buckets of prompt tokens, of decode rows and of context. One copy fills the columns of a step:

    slots      [prompt rows, decode rows]   the spare slot for rows beyond the step's
    offsets    [prompt rows + 1]            first token of each prompt row; the end of the bucket
    moved      [prompt rows]                positions that a row advances beyond its sampled token
    drawn      [prompt rows, decode rows]   the slot of a row that samples; else the spare slot
    flag       1                            ``DRAWS``

The device derives the rest. The tokens beyond the step's are one more prompt row, of the spare slot: the row
reads and writes the null block. Prompt rows behind this row are empty.

The draw is a part of the capture. So steps with rows that the kernels cannot draw alone (masks, penalties,
logprobs) are launched op by op, as are steps with prompt logprobs, images, adapters, drafts, or more prompt
tokens than the largest bucket. All graphs are captured before the first step, so their memory is bounded.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache
from weft.common.log import get_logger
from weft.common.progress import progress_bar
from weft.models.decoder import Model
from weft.ops.draw import DRAWS
from weft.ops.upload import upload
from weft.parallel.comm import drive
from weft.runner.batch.batch import BatchBuilder
from weft.runner.batch.staging import StagingBuffer
from weft.runner.graphs.graphs import MORE_MEMORY, GraphOptions, bound, context_buckets, reserved
from weft.runner.graphs.programs import CannotCapture
from weft.runner.result import Drawn
from weft.runner.sampling.sampler import End
from weft.runner.slot_state import SlotState
from weft.types.plan import EMPTY_SEGMENT, BindMedia, Segment, StepPlan

log = get_logger(__name__)

Tensor = torch.Tensor

TOKENS = (32, 64, 128, 256, 512)
"""Buckets of prompt tokens. A step with more tokens computes long enough to hide its launches."""
PROMPTS = 16
"""Maximum prompt rows of a captured step."""
DECODES = (0, 4, 16, 64, 256)
"""Buckets of decode rows. Padding rows are cheap beside prompts, so few buckets serve."""


class MixedKey(NamedTuple):
    """Bucket of steps that share one capture."""

    tokens: int
    """Prompt tokens."""
    decodes: int
    """Decode rows."""
    context: int
    """Maximum number of positions of a row."""


class MixedGraphs:
    """Captured steps with prompts of one runner. Used from the thread of the runner only."""

    def __init__(
        self,
        model: Model,
        cache: Sequence[LayerCache],
        backends: Backends,
        builder: BatchBuilder,
        state: SlotState,
        max_len: int,
        options: GraphOptions,
        end: End,
    ) -> None:
        """Capture all buckets that ``backends`` can capture. ``max_len``: longest sequence. ``end``: samples
        the steps."""
        self.replayed = 0
        """Number of steps that ran as a graph."""
        self._model, self._cache, self._backends, self._end = model, cache, backends, end
        self._builder, self._state, self._spare = builder, state, state.spare
        self._prompts = min(PROMPTS, options.max_rows) + 1  # and the row of the padding
        self._tokens = _up_to(TOKENS, min(options.prompt_tokens, max_len))
        self._decodes = _up_to(DECODES, options.max_rows)
        self._contexts = context_buckets(max_len)
        rows = self._prompts + self._decodes[-1]
        width = 3 * self._prompts + 2 * self._decodes[-1] + 2 + rows + state.most_appended
        self._columns = torch.full((width,), self._spare, dtype=torch.int64, device=model.device)
        self._drawn = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self._replays: dict[MixedKey, Callable[[], None]] = {}
        self._capture(options)

    @torch.inference_mode()
    def _capture(self, options: GraphOptions) -> None:
        """Capture every bucket, the largest first, and log the time and the memory. After a failed capture,
        log a warning and drop all captures: steps with prompts are launched op by op."""
        began, before = time.monotonic(), reserved(self._columns.device)
        keys = [
            MixedKey(*key)
            for key in itertools.product(self._tokens, self._decodes, self._contexts)
            if key[2] <= self._backends.ragged_context(self._model.spec, key[0])
        ]
        # Smaller graphs then fit into the memory of the largest.
        keys.sort(key=lambda key: (key.tokens + key.decodes, key.context), reverse=True)
        for key in progress_bar(keys, title="capturing prompts", unit="graph", shown=options.progress):
            columns = np.concatenate(
                columns_of(key, EMPTY_SEGMENT, EMPTY_SEGMENT, self._prompts, self._spare)
            )
            columns[-1] = self._spare  # the flag: nothing is drawn
            self._columns[: len(columns)].copy_(upload(columns, self._columns.device))
            try:
                self._replays[key] = options.capture(self._closure(key))
            except (CannotCapture, RuntimeError) as error:
                self._replays.clear()  # no graph has run yet, and the memory may be needed
                log.warning("steps with prompts are not captured as graphs: %s; %s", error, MORE_MEMORY)
                return
        log.info(
            "%d CUDA graphs for steps with prompts, up to %d prompt tokens and %d decode rows, captured in "
            "%.1f s; they take %d MiB",
            len(keys),
            self._tokens[-1],
            self._decodes[-1],
            time.monotonic() - began,
            (reserved(self._columns.device) - before) >> 20,
        )

    def _closure(self, key: MixedKey) -> Callable[[], None]:
        """Return a function that computes a step of bucket ``key`` for ``_columns``, samples into ``_drawn``
        and advances the slots."""
        prompts, rows = self._prompts, self._prompts + key.decodes
        lengths = (rows, prompts + 1, prompts, rows, 1)
        slots, offsets, moved, drawn, flag = self._columns[: sum(lengths)].split(lengths)
        first, behind = bound(prompts, key.tokens, key.context), bound(key.decodes, 1, key.context)

        def run() -> None:
            step = self._builder.mixed(slots, offsets, first, behind)
            logits = drive(self._model.steps(step, self._cache, self._backends))
            # The draw adds the position of the sampled token.
            self._state.num_computed.index_add_(0, slots[:prompts], moved)
            self._drawn[:rows].copy_(self._end(logits, drawn, flag))

        return run

    def find(self, plan: StepPlan) -> MixedKey | None:
        """Return the bucket for the step of ``plan``; None if the step must be launched op by op.

        The caller has checked that the kernels can draw all rows.
        """
        prefill, decode = plan.prefill, plan.decode
        if plan.agreed is not None or plan.micro_batches > 1 or prefill.rows >= self._prompts:
            return None
        tokens = prefill.tokens
        if not 1 <= tokens <= self._tokens[-1] or decode.rows > self._decodes[-1]:
            return None
        if (prefill.logits != prefill.sample).any() or (decode.count != 1).any():
            return None
        if any(isinstance(op, BindMedia) for op in plan.ops):
            return None
        longest = max(int((part.start + part.count).max(initial=0)) for part in (prefill, decode))
        sizes = ((self._tokens, tokens), (self._decodes, decode.rows), (self._contexts, longest))
        if longest > self._contexts[-1]:
            return None
        key = MixedKey(*(buckets[bisect_left(buckets, size)] for buckets, size in sizes))
        return key if key in self._replays else None

    def run(self, key: MixedKey, plan: StepPlan, buffer: StagingBuffer) -> Drawn:
        """Replay the step of ``plan`` and return its tokens. The slots advance."""
        prefill, decode = plan.prefill, plan.decode
        columns = columns_of(key, prefill, decode, self._prompts, self._spare)
        self._builder.stage_mixed(columns, buffer, self._columns)
        self._replays[key]()
        self.replayed += 1
        sampled = np.flatnonzero(prefill.sample)
        at = np.concatenate([sampled, np.arange(self._prompts, self._prompts + decode.rows)])
        return Drawn(self._drawn[: self._prompts + decode.rows], at)


def columns_of(
    key: MixedKey, prefill: Segment, decode: Segment, prompts: int, spare: int
) -> list[np.ndarray]:
    """Return the columns of a step of bucket ``key``, int64: see the head of the module. ``prompts``: prompt
    rows of a capture, more than ``prefill`` has."""
    rows = prefill.rows
    slots = np.full(prompts + key.decodes, spare, np.int64)
    slots[:rows] = prefill.slot
    slots[prompts : prompts + decode.rows] = decode.slot
    offsets = np.full(prompts + 1, key.tokens, np.int64)
    offsets[0] = 0
    np.cumsum(prefill.count, out=offsets[1 : rows + 1])
    moved = np.zeros(prompts, np.int64)
    moved[:rows] = prefill.count - prefill.sample
    drawn = slots.copy()
    drawn[:rows][prefill.sample == 0] = spare
    return [slots, offsets, moved, drawn, np.array([DRAWS])]


def _up_to(buckets: Sequence[int], most: int) -> list[int]:
    """Return the buckets below ``most``, and ``most`` or the largest bucket."""
    return [*(size for size in buckets if size < most), min(most, buckets[-1])]
