"""Limits of how long sequences wait for instances. Pure."""

from __future__ import annotations

import math

from weft.common.errors import Unavailable
from weft.common.log import get_logger
from weft.control.fleet.instance_table import InstanceTable, Patience

log = get_logger(__name__)

LATE = "the engine failed and did not come back in time; try again later"
UNFIT = "the available groups do not fit together; see the server's log"
NO_ROLE = "no group of the role "
"""First words of the error for missing roles."""


class _Limit:
    """A time limit for one kind of lack. ``passed`` is True once the lack has lasted for the limit."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.passed = False

    def deadline(self, since: float) -> float:
        """Return the time at which the limit passes; inf if already passed."""
        return math.inf if self.passed else since + self._seconds

    def look(self, since: float, now: float) -> None:
        """Update ``passed``. ``since`` is the start time of the lack; inf if nothing is lacking."""
        self.passed = since < math.inf and (self.passed or now >= since + self._seconds)


class Lateness:
    """Decides whether requests have waited too long for an instance, for a missing role, or for image
    encoding.

    While an instance is expected to come back, requests wait for ``Patience.recovery``. The time counts from
    the end of the last process able to serve: a process that drains for a planned restart is present. New
    requests wait for ``Patience.role`` if no instance will come, and before decode instances also prefill.
    """

    def __init__(self, table: InstanceTable, patience: Patience) -> None:
        """``table``: read only. ``patience``: the limits, in seconds."""
        self._table = table
        self._any = _Limit(patience.recovery)
        self._role = _Limit(patience.role)
        self._role_again = _Limit(max(patience.role, patience.recovery))
        self._images = _Limit(patience.role)
        self._images_again = _Limit(max(patience.role, patience.recovery))
        self._lacked = False
        """True if anything was missing at the last ``look``."""

    def deadline(self) -> float:
        """Return the time at which ``look`` will next change something; inf for never."""
        return min(limit.deadline(since) for limit, since in self._limits())

    def look(self, now: float) -> None:
        """Update all limits.

        Call after each change of instances, and at ``deadline``. Logs the first time that no pair has come in
        time.
        """
        lacks = any(since < math.inf for _, since in self._limits())
        if not lacks and not self._lacked:  # the usual case
            return
        self._lacked = lacks
        before = self._role.passed
        for limit, since in self._limits():
            limit.look(since, now)
        if self._role.passed and not before:
            self._say_what_follows()

    def _say_what_follows(self) -> None:
        """Log what happens to requests without a pair of a prefill and a decode instance."""
        if not self._table.local:
            then = "requests wait for a pair" if self._table.awaited else "requests are rejected"
        elif self._table.blind:
            then = "decode engines also prefill prompts without images; prompts with images wait"
        else:
            then = "decode engines also prefill"
        log.warning("no pair of a prefill engine and a decode engine is available: %s", then)

    def _limits(self) -> tuple[tuple[_Limit, float], ...]:
        """Return (limit, time since when the limit runs; inf if nothing is lacking) for each limit."""
        lacking, gone = self._table.lacking, self._table.gone
        return (
            (self._any, gone.any),
            (self._role, lacking.pair),
            (self._role_again, gone.pair),
            (self._images, lacking.images),
            (self._images_again, gone.images),
        )

    @property
    def local(self) -> bool:
        """True if decode instances also compute prompts, because no prefill instance came in time."""
        return self._role.passed and self._table.local

    def why(self, begun: bool, images: bool = False) -> Unavailable | None:
        """Return the error to end the wait of a sequence without an instance; None if the sequence should
        wait.

        With ``begun`` the sequence was at an instance before; with ``images`` the sequence has images.
        """
        if self._any.passed:
            return Unavailable(LATE)
        # A sequence once at an instance, or an expected instance, justifies the longer limits (`_again`).
        waits = begun or self._table.awaited
        if not self._table.local and (self._role_again if waits else self._role).passed:
            return self._lacks(images=False)
        if images and (self._images_again if waits else self._images).passed:
            return self._lacks(images=True)
        return None

    def _lacks(self, images: bool) -> Unavailable:
        roles = self._table.missing(images)
        if not roles:
            return Unavailable(UNFIT)
        return Unavailable(f"{NO_ROLE}{' or '.join(roles)} takes requests; try again later")
