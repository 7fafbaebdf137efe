"""How many drafts each sequence gets: the most tokens a second that acceptance and cost allow.

Speculation never changes a token, only how many of them a step makes. A row of ``1 + k`` tokens costs more
than one of 1, and so do the drafts; it gives ``1 + a`` tokens, ``a`` the accepted drafts. So the policy keeps
of every slot a running share of first drafts that were accepted, and of every later place in a row the share
that was accepted after the one before it. What a step costs comes from the cost model, fitted to the steps as
they ran. Drafts are then given out in the order of their chance to be accepted, as long as each makes the
expected tokens a second more. So a sequence whose drafts are never right gets none, and none gets any where a
step is bound by arithmetic.

To know what it rejects the policy has to try: at first, for every size of batch, each number of drafts a few
times; later steps without drafts now and then, and drafts where they do not pay, less and less often.

Pure: no clock, no randomness.
"""

from __future__ import annotations

import numpy as np

from weft.scheduler.columns import Columns
from weft.scheduler.cost import CostModel, StepShape, decode_shape
from weft.scheduler.fit import CostFitter

TRIALS = 4
"""Steps that each number of drafts is tried at first, for each size of batch."""
FIRST_PROBE, LAST_PROBE = 32, 512
"""Steps between two probes while nothing is drafted: at first, and at most."""
PLAIN_EVERY = 400
"""Steps after which ``PLAIN_STEPS`` have no drafts, to see again what they cost."""
PLAIN_STEPS = 2
WORTH = 1.01
"""Expected tokens a second with drafts over those without from which on there are drafts."""
EXPECTED = 0.7
"""Share of drafts accepted, before the first."""
_SLOT_WEIGHT, _ALL_WEIGHT = 0.1, 0.02


class DraftPolicy:
    """Chooses ``next_k`` for the rows of one plan after another.

    For each plan: ``choose`` for its decode rows, then ``first`` for each prefill row that samples;
    ``verified`` when its result commits, ``beside`` when its time was observed.
    """

    def __init__(self, most: int, adaptive: bool, columns: Columns, fitter: CostFitter) -> None:
        """``most``: drafts of a row, >= 1. Not ``adaptive``: always as many."""
        self.most = most
        self.adaptive = adaptive
        self.fitter = fitter
        self._columns = columns
        self._expected = EXPECTED
        """Share of first drafts accepted, over all sequences."""
        self._later = np.full(most - 1, EXPECTED)
        """Share of drafts 2, 3, .. accepted where the one before was."""
        self._beside = StepShape()
        """The last step."""
        self._least = 0.0
        """Chance of the last draft that was worth its cost."""
        self._tried: dict[int, np.ndarray] = {}
        self._steps = self._idle = 0
        """Steps chosen for, and since one had drafts."""
        self._probe = FIRST_PROBE
        self._forced = -1
        """Drafts of every row of this plan; -1: as reckoned."""

    def enter(self, slot: int) -> None:
        """A new tenant."""
        self._columns.acceptance[slot] = self._expected

    def choose(self, slots: np.ndarray, starts: np.ndarray, room: np.ndarray) -> np.ndarray:
        """int32 [rows]: drafts that each decode row proposes, at most ``room``, to be verified a step later.

        slots, starts (their positions) and room: integers [rows].
        """
        most: np.ndarray = np.minimum(room, self.most).astype(np.int32)
        self._forced = -1
        if not self.adaptive or not len(slots):
            return most
        self._steps += 1
        self._forced = self._trial(len(slots))
        if self._forced >= 0:
            most = np.minimum(most, self._forced)
            return most
        chosen = self._best(slots, starts, most)
        if self._probing(bool(chosen.any())):
            chosen = np.maximum(chosen, np.minimum(most, 1))
        return chosen

    def first(self, room: int) -> int:
        """Drafts that a sequence proposes after its prompt."""
        if not self.adaptive or self._forced >= 0:
            return min(room, self._forced if self.adaptive else self.most)
        chances = self._expected * np.cumprod(np.concatenate([[1.0], self._later]))
        return min(room, int((chances >= self._least).sum()))

    def verified(self, slots: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """What became of the drafts of rows that had some: integers [rows], ``accepted <= drafts``."""
        if not self.adaptive or not len(slots):
            return
        hit = (accepted > 0).astype(np.float64)
        share = self._columns.acceptance
        share[slots] += _SLOT_WEIGHT * (hit - share[slots])
        if hit.mean() > self._expected:  # better than it was: look again soon
            self._probe = FIRST_PROBE
        self._expected += _weight(len(hit)) * (float(hit.mean()) - self._expected)
        for place in range(1, self.most):
            seen = (drafts > place) & (accepted >= place)
            if seen.any():
                right = float((accepted[seen] > place).mean())
                self._later[place - 1] += _weight(int(seen.sum())) * (right - self._later[place - 1])

    def beside(self, shape: StepShape) -> None:
        """A step of ``shape`` has run: the next ones will have a prompt's part like it."""
        self._beside = shape

    def _trial(self, rows: int) -> int:
        """Drafts to try with that many rows; -1 when everything was tried often enough."""
        tried = self._tried.setdefault(rows.bit_length(), np.zeros(self.most + 1, np.int64))
        if tried.min() >= TRIALS:
            return 0 if self._steps % PLAIN_EVERY < PLAIN_STEPS else -1
        drafts = self.most - int(np.argmin(tried[::-1] // TRIALS > 0))
        tried[drafts] += 1
        return drafts

    def _probing(self, drafting: bool) -> bool:
        """Whether rows without drafts get one in this plan, to see what would become of it."""
        if drafting:  # whoever has none tries one beside the others
            self._idle, self._probe = 0, FIRST_PROBE
            return self._steps % FIRST_PROBE == 0
        self._idle += 1
        if self._idle < self._probe:
            return False
        self._idle, self._probe = 0, min(2 * self._probe, LAST_PROBE)
        return True

    def _best(self, slots: np.ndarray, starts: np.ndarray, most: np.ndarray) -> np.ndarray:
        """The drafts that make the expected tokens a second the most."""
        places = np.arange(1, self.most + 1)
        chain = np.cumprod(np.concatenate([[1.0], self._later]))
        chances = self._columns.acceptance[slots][:, None] * chain
        chances[places > most[:, None]] = 0.0
        # Of equal chances the earlier place goes first: a row's drafts are always its first ones.
        order = np.argsort(-chances, axis=None, kind="stable")
        order = order[: int((chances > 0.0).sum())]
        gains = np.cumsum(chances.ravel()[order])
        deepest = np.maximum.accumulate(places[order % self.most]) if len(order) else order
        pairs = np.cumsum((starts[order // self.most] + 1).astype(np.float64))
        plain, extra = self._costs(starts, deepest, pairs)
        rows = len(slots)
        rates = (rows + gains) / (plain + extra)
        best = int(rates.argmax()) if len(rates) else 0
        if not len(rates) or rates[best] < WORTH * rows / plain:
            self._least = np.inf
            return np.zeros(rows, np.int32)
        taken = order[: best + 1]
        self._least = float(chances.ravel()[order[best]])
        return np.bincount(taken // self.most, minlength=rows).astype(np.int32)

    def _costs(self, starts: np.ndarray, deepest: np.ndarray, pairs: np.ndarray) -> tuple[float, np.ndarray]:
        """(seconds of a step without drafts, what 1, 2, .. drafts in all add to it)."""
        model: CostModel = self.fitter.model
        rows = decode_shape(starts, np.ones(len(starts), np.int64))
        beside = self._beside
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
        return model.predict(shape), extra + model.coefficient("draft") * count


def _weight(count: int) -> float:
    """Of the mean of ``count`` observations against all before them."""
    return float(1.0 - (1.0 - _ALL_WEIGHT) ** count)
