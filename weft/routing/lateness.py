"""How long sequences wait for instances: until they come, or their patience is used up. Pure."""

from __future__ import annotations

import math

from weft.common.errors import Unavailable
from weft.common.log import get_logger
from weft.routing.instance_table import InstanceTable, Patience

log = get_logger(__name__)

LATE = "the engine failed and did not come back in time; try again later"
UNFIT = "the groups that take requests do not fit together; see the server's log"
NO_ROLE = "no group of the role "
"""How an error begins that names roles which are missing."""


class _Limit:
    """Whether something has been missing for too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.passed = False

    def deadline(self, since: float) -> float:
        """When it will have been missing for too long; inf if it has been already."""
        return math.inf if self.passed else since + self._seconds

    def look(self, since: float, now: float) -> None:
        """``since`` when it has been missing; inf if it is there."""
        self.passed = since < math.inf and (self.passed or now >= since + self._seconds)


class Lateness:
    """Whether requests wait too long: for any instance, or for a role that no instance has; those with images
    for one that encodes these, too.

    They wait for ``Patience.recovery`` while an instance that is not up will be. The time counts from when
    the last process that could have served them is gone: one that drains, for a planned restart, is there.
    New requests wait for ``Patience.role`` where none will come, and until instances that decode prefill.
    """

    def __init__(self, table: InstanceTable, patience: Patience) -> None:
        self._table = table
        self._any = _Limit(patience.recovery)
        self._role = _Limit(patience.role)
        self._role_again = _Limit(max(patience.role, patience.recovery))
        self._images = _Limit(patience.role)
        self._images_again = _Limit(max(patience.role, patience.recovery))
        self._lacked = False
        """Whether anything was missing at the last look."""

    def deadline(self) -> float:
        """When ``look`` will change something, if nothing happens before; inf for never."""
        return min(limit.deadline(since) for limit, since in self._limits())

    def look(self, now: float) -> None:
        """To be called after each change of instances, and at the deadline."""
        lacks = any(since < math.inf for _, since in self._limits())
        if not lacks and not self._lacked:  # as nearly always
            return
        self._lacked = lacks
        before = self._role.passed
        for limit, since in self._limits():
            limit.look(since, now)
        if self._role.passed and not before:
            self._say_what_follows()

    def _say_what_follows(self) -> None:
        if not self._table.local:
            then = "requests wait until one comes back" if self._table.awaited else "requests are refused"
        elif self._table.blind:
            then = "those that decode compute prompts without images, too; prompts with images wait"
        else:
            then = "those that decode compute prompts, too"
        log.warning("no pair of engines that prefill and decode takes requests: %s", then)

    def _limits(self) -> tuple[tuple[_Limit, float], ...]:
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
        """Whether instances that decode compute prompts, too: none that prefills has come in time."""
        return self._role.passed and self._table.local

    def why(self, begun: bool, images: bool = False) -> Unavailable | None:
        """Why a sequence that no instance takes should wait no longer; None when it should wait.

        ``begun``: whether an instance has had it. ``images``: whether it has some.
        """
        if self._any.passed:
            return Unavailable(LATE)
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
