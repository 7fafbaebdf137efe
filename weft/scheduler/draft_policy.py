"""How many drafts each sequence gets: the most tokens a second that acceptance and cost allow.

Speculation never changes a token, only how many of them a step makes. A row of ``1 + k`` tokens costs more
than one of 1, and so do the drafts; it gives ``1 + a`` tokens, ``a`` the accepted drafts. So the policy keeps
of every slot a running share of first drafts that were accepted, and of every later place in a row the share
that was accepted after the one before it. What a step costs comes from the cost model, fitted to the steps as
they ran. Drafts are then given out in the order of their chance to be accepted, as long as each makes the
expected tokens a second more. So a sequence whose drafts are never right gets none, and none gets any where a
step is bound by arithmetic.

To know what it rejects the policy has to try: for every size of batch that lasts, a few steps without drafts,
then the most drafts a few times, later fewer; steps without drafts now and then, and drafts where they do not
pay, less and less often. All of that, and all that drafts lose where a model was wrong, is bounded: a ledger
sets every step with drafts against what its tokens would have taken without
(``weft/scheduler/draft_budget.py``).

Pure: no clock, no randomness.
"""

from __future__ import annotations

import numpy as np

from weft.scheduler.acceptance import Acceptance
from weft.scheduler.draft_budget import DraftBudget, has_drafts
from weft.scheduler.fit import CostFitter
from weft.scheduler.slot_columns import SlotColumns
from weft.scheduler.step_cost import CostModel, StepShape, decode_shape, shape_of
from weft.types.plan import StepPlan

TRIALS = 4
"""Steps that each number of drafts is tried, for each size of batch."""
PATIENCE = 32
"""Plans of a size of batch before any of its steps drafts, but for the first size: a batch that ends passes
the smaller ones in some steps each."""
REPEATS = 12
"""Trials of a number of drafts, on average, that are made again as they said nothing of later steps."""
FIRST_PROBE, LAST_PROBE = 32, 512
"""Steps between two probes while nothing is drafted: at first, and at most."""
PLAIN_EVERY = 400
"""Steps after which ``PLAIN_STEPS`` have no drafts, to see again what they cost."""
PLAIN_STEPS = 12
HOLD, LONGEST_HOLD = 8, 32
"""Steps for which a sequence keeps its number of drafts: to reckon takes as long as a small op. Twice as many
each time that nothing changed."""
LEARN_EVERY = 5
"""Steps of which one is learned from, while nothing changes. Nothing else comes every so many."""
MAX_IN_FLIGHT = 4
"""Plans that may be under way, and more."""
IDLE_STEPS = 24
"""Plans without a new choice once drafts do not pay, so that the policy costs nothing then."""
WORTH = 1.01
"""Expected tokens a second with drafts over those without from which on there are drafts."""


class DraftPolicy:
    """Chooses ``next_k`` for the rows of one plan after another.

    For each plan: ``choose`` for its decode rows, then ``first`` for each prefill row that samples;
    ``verified`` when its result commits, then ``observe`` when its time is known.
    """

    def __init__(self, most: int, adaptive: bool, columns: SlotColumns, fitter: CostFitter) -> None:
        """``most``: drafts of a row, >= 1. Not ``adaptive``: always as many."""
        self.most = most
        self.adaptive = adaptive
        self.fitter = fitter
        self.budget = DraftBudget()
        self._columns = columns
        self._shares = Acceptance(most, columns)
        self._beside: StepPlan | None = None
        """The last step that was looked at."""
        self._least = np.inf
        """Chance of the last draft that was worth its cost; infinite where none is."""
        self._accepted = 0
        """Drafts that were right in the step that was committed last."""
        self._tried: dict[int, np.ndarray] = {}
        """By size of batch: trials of each number of drafts, [most + 1]."""
        self._met: dict[int, int] = {}
        """By size of batch, before the first trial: plans."""
        self._repeats: dict[int, int] = {}
        """By size of batch: trials that will still be made again if they must."""
        self._steps = self._idle = 0
        """Steps chosen for, and since one had drafts."""
        self._next = self._size = 0
        """When the numbers are reckoned again, and for what size of batch they were."""
        self._hold, self._total = HOLD, 0
        """Steps for which they are kept; and the drafts of all rows."""
        self._probe = FIRST_PROBE
        self._forced = -1
        """Drafts of every row of this plan; -1: as reckoned."""
        self._observed = 0
        """Steps that could have been learned from."""
        self._idle_left = self._rested = 0
        """Plans for which drafting stays idle; and idle plans so far."""

    def enter(self, slot: int) -> None:
        """``slot`` has a new sequence."""
        self._shares.enter(slot)
        self._columns.wanted[slot] = self._wants()

    def idle(self) -> bool:
        """Whether drafting is idle for the next plan: it has no drafts, and nothing is chosen. Call it once a
        plan.
        """
        if not self._idle_left:
            return False
        self._idle_left -= 1
        self._rested += 1
        self._forced = -1
        return True

    def choose(self, slots: np.ndarray, starts: np.ndarray, room: np.ndarray) -> np.ndarray:
        """int32 [rows]: drafts that each decode row proposes, at most ``room``, to be verified a step later.

        slots, starts (their positions) and room: integers [rows].
        """
        most: np.ndarray = np.minimum(room, self.most).astype(np.int32)
        self._forced = -1
        if not self.adaptive or not len(slots):
            return most
        chosen = self._choose(slots, starts, most)
        if chosen.any():
            self.budget.drafting()
        return chosen

    def _choose(self, slots: np.ndarray, starts: np.ndarray, most: np.ndarray) -> np.ndarray:
        """``choose`` where numbers are adapted; ``most``: int32 [rows], of each row."""
        self._steps += 1
        if not self._opened(len(slots)):
            self._least = np.inf
            self._idle_left = IDLE_STEPS * (len(slots).bit_length() in self._tried)
            return np.zeros(len(slots), np.int32)
        self._forced = self._trial(len(slots))
        if self._forced >= 0:
            most = np.minimum(most, self._forced)
            return most
        wanted = self._columns.wanted
        if self._steps >= self._next or len(slots).bit_length() != self._size:
            wanted[slots] = best = self._best(slots, starts)
            self._keep(len(slots).bit_length(), int(best.sum()))
        chosen: np.ndarray = np.minimum(wanted[slots], most)
        drafting = bool(chosen.any())
        if self._probing(drafting):
            chosen = np.maximum(chosen, np.minimum(most, 1))
            return chosen
        self._idle_left = 0 if drafting else IDLE_STEPS
        return chosen

    def _keep(self, size: int, total: int) -> None:
        """Numbers were reckoned for batches of ``size``, in all ``total``."""
        alike = size == self._size and total == self._total > 0
        self._hold = min(2 * self._hold, LONGEST_HOLD) if alike else HOLD
        self._next = self._steps + self._hold
        self._size = size
        self._total = total

    def first(self, room: int) -> int:
        """Drafts that a sequence proposes after its prompt."""
        if not self.adaptive:
            return min(room, self.most)
        return min(room, self._forced if self._forced >= 0 else self._wants())

    def _wants(self) -> int:
        """Drafts that were worth their cost lately, of a sequence of which nothing is known."""
        if self._least == np.inf:
            return 0
        return int((self._shares.expected * self._shares.chain() >= self._least).sum())

    def verified(self, slots: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """What became of the drafts of rows that had some: integers [rows], ``accepted <= drafts``."""
        if not self.adaptive or not len(slots):
            return
        self._accepted = int(accepted.sum())
        self._shares.see(slots, drafts, accepted, now=self._least == np.inf)
        if self._shares.rose:  # better than it was: look again soon
            self._shares.rose = False
            self._probe = FIRST_PROBE
            if self._least == np.inf:
                self._next = self._steps

    def observe(self, plan: StepPlan, seconds: float, fit: bool, uncaptured: bool = False) -> None:
        """``plan`` took ``seconds``. ``fit``: the cost model should learn from it; else it does already.

        ``uncaptured``: longer than later ones like it will, so the model learns nothing; a trial is made
        again. While nothing is drafted, the model learns from one step in ``IDLE_STEPS``.
        """
        if not self.adaptive:
            return
        if 0 < self._idle_left < IDLE_STEPS - MAX_IN_FLIGHT:  # no drafts were in flight when the pause began
            self.budget.pause(plan.decode.rows, seconds)
            return
        self.budget.step(plan, seconds, self._accepted, uncaptured)
        self._accepted = 0
        if uncaptured:
            self._repeat(plan)
        elif not self._idle_left and (self.budget.settled or plan.prefill.rows or has_drafts(plan)):
            self._beside = plan
            self._observed += 1
            if fit and (self._hold == HOLD or self._forced >= 0 or self._observed % LEARN_EVERY == 0):
                self.fitter.observe(shape_of(plan), seconds)

    def _repeat(self, plan: StepPlan) -> None:
        """If the plan was a trial, there is another."""
        drafts = int(plan.decode.next_k.max(initial=0))
        size = plan.decode.rows.bit_length()
        tried = self._tried.get(size)
        if not drafts or tried is None or not 0 < tried[drafts] <= TRIALS:
            return
        left = self._repeats.get(size, REPEATS * self.most)
        if left:
            tried[drafts] -= 1
            self._repeats[size] = left - 1

    def _opened(self, rows: int) -> bool:
        """Whether plans of that many rows may have drafts at all, as far as losses go."""
        size = rows.bit_length()
        if self._tried and size not in self._tried:
            self._met[size] = met = self._met.get(size, 0) + 1
            if met < PATIENCE:
                return False
        tried = self._tried.setdefault(size, np.zeros(self.most + 1, np.int64))
        return bool(tried[0] < TRIALS) or self.budget.allows(rows)

    def _trial(self, rows: int) -> int:
        """Drafts to try with that many rows; -1 when there is nothing to try now."""
        tried = self._tried[rows.bit_length()]
        drafts = 0
        if tried[0] >= TRIALS:
            if self._steps % PLAIN_EVERY >= PLAIN_EVERY - PLAIN_STEPS:
                return 0
            drafts = int(np.flatnonzero(tried < TRIALS).max(initial=0))
            if not drafts or (drafts < self.most and not self.budget.allows_trial(rows, drafts)):
                return -1
        tried[drafts] += 1
        return drafts

    def _probing(self, drafting: bool) -> bool:
        """Whether rows without drafts get one in this plan, to see what would become of it."""
        if drafting:  # rows without drafts try one beside the others
            self._idle = 0
            self._rested = 0
            self._probe = FIRST_PROBE
            return self._steps % FIRST_PROBE == 0
        self._idle += 1 + self._rested
        self._rested = 0
        if self._idle < self._probe:
            return False
        self._idle = 0
        self._probe = min(2 * self._probe, LAST_PROBE)
        return True

    def _best(self, slots: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """int32 [rows]: the drafts that make the expected tokens a second the most."""
        places = np.arange(1, self.most + 1)
        self._shares.learn()
        chances = self._columns.acceptance[slots][:, None] * self._shares.chain()
        # Of equal chances the earlier place goes first: a row's drafts are always its first ones.
        order = np.argsort(-chances, axis=None, kind="stable")
        gains = np.cumsum(chances.ravel()[order])
        deepest = np.maximum.accumulate(places[order % self.most])
        pairs = np.cumsum((starts[order // self.most] + 1).astype(np.float64))
        plain, extra = self._costs(starts, deepest, pairs)
        rows = len(slots)
        rates = (rows + gains) / (plain + extra)
        best = int(rates.argmax())
        if rates[best] < WORTH * rows / plain:
            self._least = np.inf
            return np.zeros(rows, np.int32)
        taken = order[: best + 1]
        self._least = float(chances.ravel()[order[best]])
        return np.bincount(taken // self.most, minlength=rows).astype(np.int32)

    def _costs(self, starts: np.ndarray, deepest: np.ndarray, pairs: np.ndarray) -> tuple[float, np.ndarray]:
        """(seconds of a step without drafts, what 1, 2, .. drafts in all add to it)."""
        model: CostModel = self.fitter.model
        rows = decode_shape(starts, np.ones(len(starts), np.int64))
        beside = StepShape() if self._beside is None else shape_of(self._beside)
        shape = rows._replace(
            prefill_rows=beside.prefill_rows,
            prefill_tokens=beside.prefill_tokens,
            prefill_pairs=beside.prefill_pairs,
            prefill_read=beside.prefill_read,
        )
        count = np.arange(1, len(pairs) + 1)
        tokens = model.token_seconds(np.concatenate([[0], count]) + float(shape.tokens))
        extra = tokens[1:] - tokens[0] + model.coefficient("decode_pair") * pairs
        extra += model.coefficient("verify") + model.coefficient("draft_pass") * deepest
        # A model that has seen few steps may say that one costs nothing.
        plain = max(model.predict(shape), 0.5 * self.budget.plain(shape.decode_rows))
        return plain, extra + model.coefficient("draft") * count
