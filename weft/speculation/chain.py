"""The module that predicts one token further, run on its own output, and the captures of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.common.log import get_logger
from weft.common.recent import Recent
from weft.models.base import Model
from weft.ops import sampling as ops
from weft.ops.cpu import CannotCapture
from weft.ops.cpu import sampling as direct
from weft.overlap.drive import drive
from weft.speculation.base import Sampled
from weft.types.plan import EMPTY_SEGMENT, Segment, column

log = get_logger(__name__)

Tensor = torch.Tensor


class DraftSteps(Protocol):
    """Makes steps over rows of a drafter's own. ``runner.batch.BatchBuilder`` does."""

    def follow(
        self, prefill: Segment, decode: Segment, starts: Tensor, logits_index: np.ndarray, shift: int
    ) -> StepInput:
        """Any rows."""

    def decode(
        self, slots: Tensor, bound: Segment, starts: Tensor | None = None, shift: int = 0
    ) -> StepInput:
        """Rows of equally many tokens."""


class Chain:
    """One draft after another."""

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
        """Of the module, so far."""

    def capturable(self, *tokens: int) -> bool:
        """``Model.capturable``."""
        return self._model.capturable(*tokens)

    @property
    def direct(self) -> bool:
        """Whether collectives are calls of this thread."""
        return self._model.mesh.launcher.direct

    @property
    def sizes(self) -> tuple[int, torch.dtype, torch.device]:
        """(elements, dtype, device) of hidden states."""
        return self._model.spec.hidden, self._model.dtype, self._model.device

    def ahead(self, step: StepInput, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """``Model.ahead``."""
        self.passes += 1
        return drive(self._model.ahead(step, hidden, self._cache, self._backends, rows))

    def run_empty(self) -> None:
        """A pass without rows: collectives of the module, for ranks that have some."""
        hidden, dtype, device = self.sizes
        none = torch.zeros(0, dtype=torch.int64, device=device)
        step = self.steps.follow(EMPTY_SEGMENT, EMPTY_SEGMENT, none, np.zeros(0, np.int64), 1)
        self.ahead(step, torch.zeros(0, hidden, dtype=dtype, device=device))

    def go_on(self, hidden: Tensor, slots: Tensor, ends: Tensor, bounds: np.ndarray, count: int) -> Tensor:
        """int64 [rows, count]: the drafts behind the newest tokens, at ``ends`` (int64 [rows]).

        hidden: the module's [rows, hidden] at the positions before. ``bounds``: of ``ends``, on the host.
        Rows that want fewer drafts than others run along: what they get is dropped, and so are their entries.
        """
        most = self.history.shape[1] - 1
        drafts = [self._best(hidden)]
        for place in range(1, count):
            ahead = (ends + place).clamp_(max=most)
            self.history[slots, ahead] = drafts[-1].to(self.history.dtype)
            bound = _rows(np.minimum(bounds + place, most) - 1, 1)
            one = self.steps.decode(slots, bound, ahead - 1, 1)
            hidden = self.ahead(one, hidden)
            drafts.append(self._best(hidden))
        return torch.stack(drafts, dim=1)

    def _best(self, hidden: Tensor) -> Tensor:
        """int64 [rows]: the likeliest token behind each; any where there is none."""
        logits = drive(self._model.logits(hidden))
        if direct.serves(logits):
            order = torch.arange(len(logits), device=logits.device)
            ids, wrong = direct.greedy(logits, order, self._vocab)
        else:
            ids, wrong = ops.greedy(logits[:, : self._vocab])
        return ids.masked_fill(wrong, 0)


def _rows(starts: np.ndarray, each: int) -> Segment:
    """Rows of ``each`` tokens, as far as shapes depend on them."""
    one = column(np.ones(len(starts)))
    return Segment(slot=one, start=column(starts), count=column(np.full(len(starts), each)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """How drafting behind steps of decode rows alone is captured, and replayed."""

    capture: Callable[[Callable[[], None]], Callable[[], None]]
    """Runs a function of fixed tensors and returns what does the same again. Raises CannotCapture, when it
    ran, if nothing can."""
    contexts: Sequence[int]
    """Bounds of a row's positions, one capture for each; increasing, the last holds all."""
    most_rows: int
    most_each: int
    after: int
    """Steps alike after which one is captured."""
    most_kept: int
    """Captures."""


class CapturedChains:
    """Drafting behind steps of decode rows that take up equally many tokens each, and what is left of it
    behind any step once the module ran: functions of

    slots, starts, ends [rows]; hidden [rows * each, hidden]

    alone, all of which are copied to where the capture reads them. As with steps (weft/runner/graphs.py),
    what is computed follows from plans alone; whether this rank replays it is its own affair.
    """

    def __init__(self, chain: Chain, capturing: CaptureOptions) -> None:
        hidden, dtype, device = chain.sizes
        rows = capturing.most_rows
        self.replayed = 0
        """Steps."""
        self.uncaptured = False
        """Whether a step like the last one will be replayed, which that was not."""
        self._chain = chain
        self._capturing = capturing
        self._slots, self._starts, self._ends = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(rows * capturing.most_each, hidden, dtype=dtype, device=device)
        self._drafts = torch.zeros(rows, capturing.most_each, dtype=torch.int64, device=device)
        self._order = torch.arange(rows, device=device)
        self._replays: Recent[tuple[int, int, int, int], Callable[[], None]] = Recent(capturing.most_kept)
        self._met: dict[tuple[int, int, int, int], int] = {}
        self._works = True

    def reset(self) -> None:
        """An epoch has ended, and with it what was captured."""
        self._replays.clear()
        self._met.clear()

    def propose(self, step: Sampled) -> Tensor | None:
        """int64 [rows, most ``next_k``], of all rows; None where there is no capture of such steps."""
        assert step.hidden is not None
        rows = step.plan.rows
        count = int(step.next_k.max())
        each, odd = divmod(len(step.hidden), rows)
        even = step.each or (step.plan.decode.count == each).all()
        if odd or not even:
            self.uncaptured = False
            return None
        return self._replayed(step.hidden, step.slots, step.ends, step.bounds(), count, each, step.starts)

    def go_on(
        self, hidden: Tensor, slots: Tensor, ends: Tensor, bounds: np.ndarray, count: int
    ) -> Tensor | None:
        """``Chain.go_on``; None where there is no capture of it."""
        return self._replayed(hidden, slots, ends, bounds, count) if count > 1 else None

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
        """``each``: tokens of every row in ``hidden``, from ``starts`` on; 0: it is the module's already."""
        self.uncaptured = False
        rows = len(slots)
        longest = int(bounds.max()) + each + count
        context = next((bound for bound in self._capturing.contexts if bound >= longest), None)
        if context is None or rows > self._capturing.most_rows or each > self._capturing.most_each:
            return None
        if not self._chain.capturable(*([rows * each, rows] if each else [rows])):
            return None
        self._slots[:rows].copy_(slots)
        self._ends[:rows].copy_(ends)
        self._hidden[: len(hidden)].copy_(hidden)
        if starts is not None:
            self._starts[:rows].copy_(starts)
        key = (rows, each, count, context)
        self._met[key] = met = self._met.get(key, 0) + 1
        works = self._works and self._chain.direct
        self.uncaptured = works and key not in self._replays
        if met < self._capturing.after:
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
        try:
            self._replays.put(key, self._capturing.capture(self._closure(key)))
        except CannotCapture as error:
            log.warning("drafts are made op by op, and not replayed: %s", error)
            self._works = self.uncaptured = False

    def _closure(self, key: tuple[int, int, int, int]) -> Callable[[], None]:
        rows, each, count, context = key
        slots = self._slots[:rows]
        starts = self._starts[:rows]
        ends = self._ends[:rows]
        hidden = self._hidden[: rows * max(each, 1)]
        drafts = self._drafts[:rows, :count]
        order = self._order[:rows]
        chain = self._chain
        first = _rows(np.full(rows, context - each - count), each)
        bounds = np.full(rows, context - count)

        def run() -> None:
            if not each:
                drafts.copy_(chain.go_on(hidden, slots, ends, bounds, count))
                return
            step = chain.steps.decode(slots, first, starts, 1)
            keep = order * each + (ends - starts - 1)
            own = chain.ahead(step, hidden, keep)
            drafts.copy_(chain.go_on(own, slots, ends, bounds, count))

        return run
