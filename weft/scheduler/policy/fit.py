"""Fit a cost model to the measured steps of a running system.

Observations are grouped by class of step: powers of two of prefill tokens, decode rows, positions read,
verified drafts, and drafter passes. Each class keeps the latest observations: an hour of pure decode does not
erase the cost of prompts. The fit minimizes squared *relative* errors under coefficients >= 0, by least
squares with Huber weights: a step slowed by a page fault or a paused process pulls no more than a small
error. The fit is pulled lightly towards the prior, scaled to the measured level. Slopes of merged tokens are
pulled towards neighbouring slopes, to extrapolate from seen to unseen sizes.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from weft.scheduler.policy.step_cost import (
    FIRST_SLOPE,
    NAMES,
    NUM_SLOPES,
    PRIOR,
    CostModel,
    StepShape,
    features,
)

KINDS, LATEST = 192, 8
"""Number of step classes, and number of observations per class."""
_PRIOR_WEIGHT = 1e-3
_SMOOTH_WEIGHT = 3e-3
_HALF_LIFE = 4096.0
"""Number of steps after which an observation counts half."""
_ROUNDS = 4
_SURPRISE = 0.25
_SOON = 4
_AT_LEAST = 64
_TINY = 1e-9


class CostFitter:
    """Collects observations and returns the fitted model."""

    def __init__(self, prior: CostModel = PRIOR) -> None:
        self._model = prior
        self.observations = 0
        self._since = 0
        """Number of observations since the last fit. A fit takes one or two milliseconds."""
        self._soon = _SOON
        """Observations needed for a new fit when the model was far off; doubles while new fits do not
        help."""
        self._due = False
        """True if the next read of ``model`` fits a new model. Models are fitted only when read."""
        self._prior = np.array(prior.coefficients)
        self._rows: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._x = np.zeros((KINDS, LATEST, len(NAMES)))
        self._y = np.zeros((KINDS, LATEST))
        self._at = np.zeros((KINDS, LATEST))
        self._filled = np.zeros(KINDS, np.int64)
        self._next = np.zeros(KINDS, np.int64)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Record one step. Infinite times, NaN and times <= 0 are ignored.

        A new fit is due after the first step of a class, within a few steps if the model was far off, and
        after ``_AT_LEAST`` steps in any case.
        """
        if not seconds > 0.0 or not np.isfinite(seconds):
            return
        kind = self._kind(shape)
        place = self._next[kind]
        self._x[kind, place] = features(shape)
        self._y[kind, place] = seconds
        self._at[kind, place] = self.observations
        self._next[kind] = (place + 1) % LATEST
        self._filled[kind] = min(self._filled[kind] + 1, LATEST)
        self.observations += 1
        self._since += 1
        if self._due:
            return
        # While new fits do not remove the surprise, fit less and less often.
        new = bool(self._filled[kind] == 1)
        surprised = abs(self._model.predict(shape) / seconds - 1.0) > _SURPRISE
        self._due = new or self._since >= (self._soon if surprised else _AT_LEAST)
        if self._due:
            self._soon = min(2 * self._soon, _AT_LEAST) if surprised and not new else _SOON

    @property
    def model(self) -> CostModel:
        """The fitted model; the prior before the first observation. May run a fit."""
        return self.fit() if self._due else self._model

    def fit(self) -> CostModel:
        """Fit ``model`` to all observations and return the model."""
        used = np.arange(LATEST) < self._filled[:, None]
        if not used.any():
            return self._model
        self._since = 0
        self._due = False
        kinds = self._filled > 0
        middle = np.zeros(KINDS)
        middle[kinds] = np.nanmedian(np.where(used[kinds], self._y[kinds], np.nan), axis=1)
        typical = np.broadcast_to(middle[:, None], used.shape)[used]
        age = self.observations - 1 - self._at[used]
        coefficients = fit_relative(
            self._x[used], self._y[used], typical, np.exp2(-age / _HALF_LIFE), self._prior
        )
        self._model = CostModel(tuple(coefficients.tolist()), f"fitted to {self.observations} steps")
        return self._model

    def _kind(self, shape: StepShape) -> int:
        key = (
            shape.prefill_tokens.bit_length(),
            shape.decode_rows.bit_length(),
            shape.prefill_read.bit_length() // 2,
            shape.decode_pairs.bit_length() // 2,
            (shape.decode_tokens - shape.decode_rows).bit_length(),
            shape.draft_passes,
        )
        kind = self._rows.get(key)
        if kind is None:
            kind = len(self._rows)
            if kind == KINDS:
                _, kind = self._rows.popitem(last=False)  # the class not seen for the longest time
                self._filled[kind] = self._next[kind] = 0
            self._rows[key] = kind
        else:
            self._rows.move_to_end(key)
        return kind


def fit_relative(
    x: np.ndarray, y: np.ndarray, typical: np.ndarray, weight: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """Return coefficients >= 0, float64 [features], with ``x @ c`` close to ``y`` in relative terms.

    x float64 [n, features]; y [n], seconds > 0; typical [n], robust guesses of y; weight [n] > 0; prior
    [features].
    """
    scale = float(np.median(y / np.maximum(x @ prior, _TINY)))
    expected = prior * scale
    share = x / typical[:, None]  # relative errors: divide by the typical seconds of the class
    size = _sizes(share, expected, float(np.median(typical)))
    share = share / size
    target = y / typical
    pull, goal = _regularisation(size, expected, float(weight.sum()))
    residual = target - 1.0
    found: np.ndarray = np.zeros(x.shape[1])
    # Iteratively reweighted least squares; normal equations [features, features].
    for _ in range(_ROUNDS):
        w = weight * _huber(residual)
        weighted = share * w[:, None]
        found = solve_non_negative(weighted.T @ share + pull, weighted.T @ target + goal)
        residual = target - share @ found
    coefficients: np.ndarray = found / size
    return coefficients


def _huber(residual: np.ndarray) -> np.ndarray:
    """Return weights: 1 within 1.5 robust standard deviations, then falling as 1 / |residual|."""
    bound = max(1.5 * 1.4826 * float(np.median(np.abs(residual))), 0.02)
    weights: np.ndarray = bound / np.maximum(np.abs(residual), bound)
    return weights


def _sizes(share: np.ndarray, expected: np.ndarray, seconds: float) -> np.ndarray:
    """Return [features]: the largest share of a step per unit coefficient, which makes coefficients
    comparable."""
    size: np.ndarray = share.max(axis=0)
    slopes = slice(FIRST_SLOPE, FIRST_SLOPE + NUM_SLOPES)
    size[slopes] = size[slopes].max()  # one unit for all slopes, to compare slopes
    unseen = size <= 0.0
    size[unseen] = 1.0 / np.maximum(expected[unseen], _TINY * seconds)
    return size


def _regularisation(size: np.ndarray, expected: np.ndarray, total: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (quadratic [n, n], linear [n]) terms with a pull towards ``expected``, and of slopes towards
    neighbours."""
    strength = np.full(len(size), _PRIOR_WEIGHT * (1.0 + 0.01 * total))
    strength[FIRST_SLOPE + 1 : FIRST_SLOPE + NUM_SLOPES] *= 1e-3  # slopes follow neighbours instead
    pull = np.diag(strength)
    goal = strength * expected * size
    smooth = _SMOOTH_WEIGHT * (1.0 + 0.01 * total)
    for i in range(FIRST_SLOPE, FIRST_SLOPE + NUM_SLOPES - 1):
        pull[i, i] += smooth
        pull[i + 1, i + 1] += smooth
        pull[i, i + 1] -= smooth
        pull[i + 1, i] -= smooth
    return pull, goal


def solve_non_negative(h: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Return the minimizer u >= 0 of u'hu / 2 - f'u; h [n, n] positive definite.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23).
    """
    u = np.zeros(len(f))
    free = np.zeros(len(f), bool)
    tolerance = 1e-10 * float(np.abs(f).max() + 1e-300)
    for _ in range(3 * len(f)):
        gradient = np.where(free, -np.inf, f - h @ u)
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        # Solve on the free variables. While the solution leaves u >= 0, step to the border and fix a variable
        # at 0.
        while True:
            at = np.flatnonzero(free)
            step = np.zeros(len(f))
            step[at] = np.linalg.solve(h[np.ix_(at, at)], f[at])
            negative = at[step[at] <= 0.0]
            if not len(negative):
                u = step
                break
            ratio = u[negative] / np.maximum(u[negative] - step[negative], 1e-300)
            u = u + float(ratio.min()) * (step - u)
            free[negative[ratio <= ratio.min()]] = False
            u[~free] = 0.0
            if not free.any():
                break
    return u
