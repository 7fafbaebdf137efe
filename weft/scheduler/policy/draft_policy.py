"""The number of drafts per sequence: maximize tokens per second, given acceptance and cost.

Speculation never changes a token, only the number of tokens per step. A row of ``1 + k`` tokens costs more
than a row of one token, and proposing drafts costs time too. Such a row yields ``1 + a`` tokens for ``a``
accepted drafts. The policy keeps, for every slot, a moving average of the acceptance of first drafts. For
every later draft position, the policy keeps the share accepted after an accepted predecessor. The cost model,
fitted to measured steps, predicts the cost of a step. Drafts are handed out in order of acceptance
probability, as long as each draft raises the expected tokens per second. A sequence with useless drafts gets
none, and nobody gets drafts if arithmetic limits the step.

Rejected choices must be tried to be known. For every lasting batch size, the policy first runs a few steps
without drafts, then tries the maximum number of drafts, later fewer. Steps without drafts are repeated now
and then. Where drafts do not pay, drafts are probed less and less often. The total loss by trials and by a
wrong cost model is bounded: a ledger compares every step with drafts to the time of the same tokens without
drafts (``weft/scheduler/policy/draft_budget.py``).

Pure: no clock, no randomness.
"""

from __future__ import annotations

import numpy as np

from weft.scheduler.policy.acceptance import Acceptance
from weft.scheduler.policy.draft_budget import DraftBudget, has_drafts
from weft.scheduler.policy.fit import CostFitter
from weft.scheduler.policy.step_cost import CostModel, StepShape, decode_shape, shape_of
from weft.scheduler.slot_columns import SlotColumns
from weft.types.plan import StepPlan

TRIALS = 4
"""Number of steps in which each number of drafts is tried, per batch size."""
PATIENCE = 32
"""Plans of a batch size before the first trial, except for the first size: a batch that drains passes through
the smaller sizes in a few steps each."""
REPEATS = 12
"""Average number of repeated trials per number of drafts; a trial without useful timing is repeated."""
FIRST_PROBE, LAST_PROBE = 32, 512
"""First and maximum number of steps between two probes while nothing is drafted."""
PLAIN_EVERY = 400
"""Period, in steps, after which ``PLAIN_STEPS`` steps run without drafts to measure the cost again."""
PLAIN_STEPS = 12
HOLD, LONGEST_HOLD = 8, 32
"""Steps for which draft counts stay fixed: a new choice costs as much as a small kernel. The number doubles,
up to ``LONGEST_HOLD``, for each unchanged choice."""
LEARN_EVERY = 5
"""Learn from one step in so many while draft counts are stable. No other period has the same length."""
MAX_IN_FLIGHT = 4
"""Upper bound of plans in flight."""
IDLE_STEPS = 24
"""Plans without a new choice once drafts do not pay, to save the time of the policy."""
WORTH = 1.01
"""Minimum ratio of expected tokens per second with drafts to tokens per second without drafts."""


class DraftPolicy:
    """Chooses ``next_k`` for the rows of each plan.

    For each plan: ``choose`` for decode rows, then ``first`` for each sampling prefill row. ``verified`` when
    the result commits, then ``observe`` when the time is known.
    """

    def __init__(self, most: int, adaptive: bool, columns: SlotColumns, fitter: CostFitter) -> None:
        """``most``: maximum drafts per row, >= 1. Without ``adaptive``, every row gets the maximum."""
        self.most = most
        self.adaptive = adaptive
        self.fitter = fitter
        self.budget = DraftBudget()
        self._columns = columns
        self._shares = Acceptance(most, columns)
        self._beside: StepPlan | None = None
        """The last step used for learning."""
        self._least = np.inf
        """Acceptance probability of the last draft worth its cost; infinity without such a draft."""
        self._accepted = 0
        """Number of accepted drafts in the last committed step."""
        self._tried: dict[int, np.ndarray] = {}
        """Batch size class -> number of trials per number of drafts, [most + 1]."""
        self._met: dict[int, int] = {}
        """Batch size class -> number of plans before the first trial."""
        self._repeats: dict[int, int] = {}
        """Batch size class -> number of repeatable trials left."""
        self._steps = self._idle = 0
        """Number of steps with a choice, and number of steps since a step with drafts."""
        self._next = self._size = 0
        """Step of the next recomputation of draft counts, and batch size class of the last."""
        self._hold, self._total = HOLD, 0
        """Steps for which draft counts stay fixed, and the total number of drafts of all rows."""
        self._probe = FIRST_PROBE
        self._forced = -1
        """Number of drafts of every row of the plan; -1 if not forced by a trial."""
        self._observed = 0
        """Number of steps usable for learning."""
        self._idle_left = self._rested = 0
        """Number of idle plans left, and number of idle plans since the last choice."""

    def enter(self, slot: int) -> None:
        """Reset the acceptance and the draft count of ``slot`` for a new sequence."""
        self._shares.enter(slot)
        self._columns.wanted[slot] = self._wants()

    def idle(self) -> bool:
        """Return True if the next plan has no drafts and needs no choice: do not call ``choose`` then.

        Call at most once per plan: each True uses up one plan of the pause.
        """
        if not self._idle_left:
            return False
        self._idle_left -= 1
        self._rested += 1
        self._forced = -1
        return True

    def choose(self, slots: np.ndarray, starts: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Return int32 [rows]: number of drafts to propose in each decode row, at most ``room``.

        slots, starts (positions) and room: integers [rows]. The drafts are verified in the next step.
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
        """Return the adaptive choice. ``most``: int32 [rows], maximum per row."""
        self._steps += 1
        # Order of precedence: closed budget, trial, stable or recomputed choice, probe.
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
        """Record a recomputation: ``total`` drafts for batch size class ``size``. A stable choice is kept
        longer."""
        alike = size == self._size and total == self._total > 0
        self._hold = min(2 * self._hold, LONGEST_HOLD) if alike else HOLD
        self._next = self._steps + self._hold
        self._size = size
        self._total = total

    def first(self, room: int) -> int:
        """Return the number of drafts to propose after a prompt, at most ``room``."""
        if not self.adaptive:
            return min(room, self.most)
        return min(room, self._forced if self._forced >= 0 else self._wants())

    def _wants(self) -> int:
        """Return the number of drafts recently worth the cost, for a sequence without history."""
        if self._least == np.inf:
            return 0
        return int((self._shares.expected * self._shares.chain() >= self._least).sum())

    def verified(self, slots: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Record accepted drafts of rows with drafts: integers [rows], ``accepted <= drafts``."""
        if not self.adaptive or not len(slots):
            return
        self._accepted = int(accepted.sum())
        self._shares.see(slots, drafts, accepted, now=self._least == np.inf)
        if self._shares.rose:  # better than the average: look again soon
            self._shares.rose = False
            self._probe = FIRST_PROBE
            if self._least == np.inf:
                self._next = self._steps

    def observe(self, plan: StepPlan, seconds: float, fit: bool, uncaptured: bool = False) -> None:
        """Record the ``seconds`` of ``plan``. Does nothing unless ``adaptive``.

        ``fit``: the cost model may learn from the time. In a steady state only one step in ``LEARN_EVERY``
        teaches the model.

        ``uncaptured``: the step took longer than later equal steps will, so the cost model does not learn,
        and a trial is repeated. While drafting is idle, the model learns from one step in ``IDLE_STEPS``.
        """
        if not self.adaptive:
            return
        if 0 < self._idle_left < IDLE_STEPS - MAX_IN_FLIGHT:  # No drafts were in flight when the pause began.
            self.budget.pause(plan.decode.rows, seconds)
            return
        self.budget.step(plan, seconds, self._accepted, uncaptured)
        self._accepted = 0
        if uncaptured:
            self._repeat(plan)
        # Learn only from settled plain steps and from steps with prompts or drafts.
        elif not self._idle_left and (self.budget.settled or plan.prefill.rows or has_drafts(plan)):
            self._beside = plan
            self._observed += 1
            if fit and (self._hold == HOLD or self._forced >= 0 or self._observed % LEARN_EVERY == 0):
                self.fitter.observe(shape_of(plan), seconds)

    def _repeat(self, plan: StepPlan) -> None:
        """Schedule one more trial if ``plan`` was a trial and repeats are left."""
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
        """Return True if plans of ``rows`` rows may have drafts: first trials, or the loss budget allows
        drafts."""
        size = rows.bit_length()
        if self._tried and size not in self._tried:
            self._met[size] = met = self._met.get(size, 0) + 1
            if met < PATIENCE:
                return False
        tried = self._tried.setdefault(size, np.zeros(self.most + 1, np.int64))
        return bool(tried[0] < TRIALS) or self.budget.allows(rows)

    def _trial(self, rows: int) -> int:
        """Return the number of drafts to try with ``rows`` rows; -1 for no trial."""
        tried = self._tried[rows.bit_length()]
        drafts = 0
        # Plain steps first: all other trials are compared with plain steps.
        if tried[0] >= TRIALS:
            if self._steps % PLAIN_EVERY >= PLAIN_EVERY - PLAIN_STEPS:
                return 0
            drafts = int(np.flatnonzero(tried < TRIALS).max(initial=0))
            if not drafts or (drafts < self.most and not self.budget.allows_trial(rows, drafts)):
                return -1
        tried[drafts] += 1
        return drafts

    def _probing(self, drafting: bool) -> bool:
        """Return True if rows without drafts get one draft in the plan, to measure acceptance."""
        if drafting:  # a row without drafts tries one beside the other rows
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
        """Return int32 [rows]: the numbers of drafts with the maximum expected tokens per second."""
        places = np.arange(1, self.most + 1)
        self._shares.learn()
        chances = self._columns.acceptance[slots][:, None] * self._shares.chain()  # [rows, most]
        # Stable sort: with equal chances the earlier draft position comes first, because drafts of a row are
        # a prefix.
        order = np.argsort(-chances, axis=None, kind="stable")
        gains = np.cumsum(chances.ravel()[order])
        deepest = np.maximum.accumulate(places[order % self.most])
        # All [rows * most], cumulative over drafts in descending order of acceptance.
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
        """Return (seconds of a step without drafts, [drafts] additional seconds of the first 1, 2, ..
        drafts)."""
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
        # A model fitted to few steps may predict zero: bound the prediction by half the measured time.
        plain = max(model.predict(shape), 0.5 * self.budget.plain(shape.decode_rows))
        return plain, extra + model.coefficient("draft") * count
