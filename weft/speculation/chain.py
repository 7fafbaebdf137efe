"""Make drafts one after another, and capture such runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.common.log import get_logger
from weft.common.recent import Recent
from weft.models.decoder import Model
from weft.ops import sampling as ops
from weft.ops.cpu import CannotCapture
from weft.ops.cpu import sampling as direct
from weft.parallel.comm import drive
from weft.speculation.base import Sampled
from weft.types.plan import EMPTY_SEGMENT, Segment, column

log = get_logger(__name__)

Tensor = torch.Tensor


class DraftSteps(Protocol):
    """Makes steps over the rows of a drafter; implemented by ``runner.batch.BatchBuilder``."""

    def follow(
        self, prefill: Segment, decode: Segment, starts: Tensor, logits_index: np.ndarray, shift: int
    ) -> StepInput:
        """Return the step over any rows."""

    def decode(
        self, slots: Tensor, bound: Segment, starts: Tensor | None = None, shift: int = 0
    ) -> StepInput:
        """Return the step over rows with equal numbers of tokens."""


class Chain:
    """Makes drafts one after another by a multi-token prediction module that reads its own output."""

    def __init__(
        self,
        model: Model,
        cache: Sequence[LayerCache],
        backends: Backends,
        steps: DraftSteps,
        history: Tensor,
        vocab_size: int,
    ) -> None:
        """history: int32 [slots + 1, longest]."""
        self._model = model
        self._cache = cache
        self._backends = backends
        self.steps = steps
        self.history = history
        self._vocab = vocab_size
        self.passes = 0
        """Number of passes of the module so far."""

    def capturable(self, *tokens: int) -> bool:
        """Return ``Model.capturable(*tokens)``; True on a GPU, where only a rank alone captures drafts."""
        return self._model.device.type != "cpu" or self._model.capturable(*tokens)

    @property
    def direct(self) -> bool:
        """True if collectives run on the calling thread."""
        return self._model.mesh.launcher.direct

    @property
    def sizes(self) -> tuple[int, torch.dtype, torch.device]:
        """(elements, dtype, device) of hidden states."""
        return self._model.width, self._model.dtype, self._model.device

    def lookahead(self, step: StepInput, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Run ``Model.lookahead`` to the end and count the pass."""
        self.passes += 1
        return drive(self._model.lookahead(step, hidden, self._cache, self._backends, rows))

    def run_empty(self) -> None:
        """Run a pass without rows, to match the collectives of other ranks."""
        hidden, dtype, device = self.sizes
        none = torch.zeros(0, dtype=torch.int64, device=device)
        step = self.steps.follow(EMPTY_SEGMENT, EMPTY_SEGMENT, none, np.zeros(0, np.int64), 1)
        self.lookahead(step, torch.zeros(0, hidden, dtype=dtype, device=device))

    def propose_after(
        self, hidden: Tensor, slots: Tensor, ends: Tensor, bounds: np.ndarray, count: int
    ) -> Tensor:
        """Return the drafts after the newest tokens at ``ends`` (int64 [rows]), int64 [rows, count].

        hidden: output of the module [rows, hidden] at the positions before. ``bounds``: upper bounds of
        ``ends``, on the host. Rows with fewer wanted drafts run along; their further drafts and cache entries
        are dropped. Writes the drafts into ``history``.
        """
        most = self.history.shape[1] - 1
        drafts = [self._best(hidden)]
        # Each pass embeds the last draft and predicts the next one.
        for place in range(1, count):
            lookahead = (ends + place).clamp_(max=most)
            # The module reads the last draft from the history, like any other token.
            self.history[slots, lookahead] = drafts[-1].to(self.history.dtype)
            bound = rows_of(np.minimum(bounds + place, most) - 1, 1)
            one = self.steps.decode(slots, bound, lookahead - 1, 1)
            hidden = self.lookahead(one, hidden)
            drafts.append(self._best(hidden))
        return torch.stack(drafts, dim=1)

    def _best(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token after each hidden state, int64 [rows]; 0 if the logits are not
        finite."""
        logits = drive(self._model.draft_logits(hidden))
        ids, named = likeliest(logits, min(self._vocab, logits.shape[1])), self._model.draft_ids
        return ids if named is None else named[ids]


def likeliest(logits: Tensor, vocab_size: int) -> Tensor:
    """Return the likeliest of the first ``vocab_size`` tokens of each row, int64 [rows]; 0 if the logits are
    not finite."""
    if direct.serves(logits):
        order = torch.arange(len(logits), device=logits.device)
        ids, wrong = direct.greedy(logits, order, vocab_size)
    else:
        ids, wrong = ops.greedy(logits[:, :vocab_size])
    return ids.masked_fill(wrong, 0)


def rows_of(starts: np.ndarray, each: int) -> Segment:
    """Return rows of ``each`` tokens as a segment with only the fields needed for shapes."""
    one = column(np.ones(len(starts)))
    return Segment(slot=one, start=column(starts), count=column(np.full(len(starts), each)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Settings for capturing and replaying drafts after steps with decode rows only."""

    capture: Callable[[Callable[[], None]], Callable[[], None]]
    """Runs a function of fixed tensors once and returns a function to repeat the run. Raises CannotCapture,
    after the run, if a repetition is impossible."""
    contexts: Sequence[int]
    """Bounds of a row's positions, one capture each, in ascending order. Longer rows are not captured."""
    rows: Sequence[int]
    """Numbers of rows that are captured, ascending. A step with another number is padded with rows of the
    spare slot."""
    most_each: int
    after: int
    """Number of equal steps after which a step is captured."""
    most_kept: int
    """Maximum number of stored captures. On a CPU the least recently used capture is dropped. On a GPU a
    dropped capture may still run, so nothing more is captured."""
    spare: int
    """Slot without a sequence."""


class CapturedChains:
    """Captured drafting after steps of decode rows with equal token counts, and the last part of drafting
    after any step. A capture is a function of only

        slots, starts, ends [rows]; hidden [rows * each, hidden], with 0 columns for a draft model

    All four are copied into fixed buffers, read by the capture. Padding rows follow the rows of the step: a
    padding row drafts for the spare slot, into the null block. As with steps (weft/runner/graphs/graphs.py),
    the result follows from plans alone; each rank decides alone about replaying.
    """

    def __init__(self, chain: Chain, capturing: CaptureOptions) -> None:
        hidden, dtype, device = chain.sizes
        rows = capturing.rows[-1]
        self.replayed = 0
        """Number of replays."""
        self.uncaptured = False
        """True if the last step was not replayed but later equal steps will be."""
        self._chain = chain
        self._capturing = capturing
        self._slots, self._starts, self._ends = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(rows * capturing.most_each, hidden, dtype=dtype, device=device)
        self._drafts = torch.zeros(rows, capturing.most_each, dtype=torch.int64, device=device)
        self._order = torch.arange(rows, device=device)
        self._replays: Recent[tuple[int, int, int, int], Callable[[], None]] = Recent(capturing.most_kept)
        self._seen: dict[tuple[int, int, int, int], int] = {}
        self._works = True
        self._on_gpu = device.type != "cpu"

    def reset(self) -> None:
        """Drop all captures at the end of an epoch."""
        self._replays.clear()
        self._seen.clear()

    def propose(self, step: Sampled) -> Tensor | None:
        """Return the drafts of all rows, int64 [rows, most ``next_k``], by a replay or by a run that may be
        captured. Return None if such steps are not captured, or not yet. Sets ``uncaptured``."""
        assert step.hidden is not None
        rows = step.plan.rows
        count = int(step.next_k.max())
        each, odd = divmod(len(step.hidden), rows)
        even = step.each or (step.plan.decode.count == each).all()
        if odd or not even:
            self.uncaptured = False
            return None
        return self._replayed(step.hidden, step.slots, step.ends, step.bounds(), count, each, step.starts)

    def propose_after(
        self, hidden: Tensor, slots: Tensor, ends: Tensor, bounds: np.ndarray, count: int
    ) -> Tensor | None:
        """Return ``Chain.propose_after`` by a capture; None if there is none."""
        return self._replayed(hidden, slots, ends, bounds, count)

    def _replayed(
        self,
        hidden: Tensor,
        slots: Tensor,
        ends: Tensor,
        bounds: np.ndarray,
        count: int,
        each: int = 0,
        starts: Tensor | None = None,
    ) -> Tensor | None:
        """Draft by a capture, or run and capture. Return None if the step cannot be captured or is not due
        yet.

        ``each``: tokens per row in ``hidden``, from ``starts`` on; 0: ``hidden`` is output of the module.
        """
        self.uncaptured = False
        rows = len(slots)
        longest = int(bounds.max()) + each + count
        context = next((bound for bound in self._capturing.contexts if bound >= longest), None)
        if context is None or rows > self._capturing.rows[-1] or each > self._capturing.most_each:
            return None
        padded = self._capturing.rows[bisect_left(self._capturing.rows, rows)]
        if not self._chain.capturable(*([padded * each, padded] if each else [padded])):
            return None
        # Fill the fixed input buffers before every path: a replay, a capture and a plain run all read the
        # buffers.
        self._slots[:rows].copy_(slots)
        self._ends[:rows].copy_(ends)
        if hidden.shape[1]:
            self._hidden[: len(hidden)].copy_(hidden)
        if starts is not None:
            self._starts[:rows].copy_(starts)
            self._starts[rows:padded].zero_()
        if padded > rows:
            self._slots[rows:padded].fill_(self._capturing.spare)
            self._ends[rows:padded].fill_(each)
        # A capture has fixed shapes: rows, tokens per row, drafts, and a bound of positions.
        key = (padded, each, count, context)
        self._seen[key] = seen = self._seen.get(key, 0) + 1
        full = self._on_gpu and len(self._replays) >= self._capturing.most_kept
        works = self._works and self._chain.direct and not full
        self.uncaptured = works and key not in self._replays
        if seen < self._capturing.after:
            return None
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            self.replayed += 1
        elif works:
            self._capture(key)
        else:
            self._closure(key)()
        return self._drafts[:rows, :count].clone()

    def _capture(self, key: tuple[int, int, int, int]) -> None:
        """Run the drafting of ``key`` and store the capture. If capturing is impossible, log a warning and
        never capture again."""
        run = self._closure(key)
        try:
            self._replays.put(key, self._capturing.capture(run))
            return
        except CannotCapture as error:
            why, made = str(error), True
        except RuntimeError as error:
            if not self._on_gpu:
                raise
            why, made = str(error), False
        log.warning("drafts are made op by op, and not replayed: %s", why)
        self._works = self.uncaptured = False
        # The run before the capture failed, for example for lack of memory. On a GPU no other rank takes
        # part, and drafts are a function of the buffers: run once more. The error is gone here, and with it
        # the memory that its frames held.
        if not made:
            run()

    def _closure(self, key: tuple[int, int, int, int]) -> Callable[[], None]:
        """Return a function that drafts for ``key`` from the fixed input buffers into the fixed output
        buffer."""
        rows, each, count, context = key
        slots = self._slots[:rows]
        starts = self._starts[:rows]
        ends = self._ends[:rows]
        hidden = self._hidden[: rows * max(each, 1)]
        drafts = self._drafts[:rows, :count]
        order = self._order[:rows]
        chain = self._chain
        first = rows_of(np.full(rows, context - each - count), each)
        bounds = np.full(rows, context - count)

        def run() -> None:
            if not each:
                drafts.copy_(chain.propose_after(hidden, slots, ends, bounds, count))
                return
            step = chain.steps.decode(slots, first, starts, 1)
            # [rows], index of each row's last accepted token in `hidden`
            keep = order * each + (ends - starts - 1)
            own = chain.lookahead(step, hidden, keep)
            drafts.copy_(chain.propose_after(own, slots, ends, bounds, count))

        return run
