"""How long sequences wait for instances: until they come, or their patience is used up. Pure."""

from __future__ import annotations

import math

from weft.common.errors import Unavailable
from weft.common.log import get_logger
from weft.routing.instance_table import InstanceTable, Patience

log = get_logger(__name__)

LATE = "the engine failed and did not come back in time; try again later"
NO_PAIR = "no engine of a role that the request needs takes requests; try again later"
NO_ENCODER = "no group that encodes images is there; try again later"


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

    New ones wait for a role for ``Patience.role`` only; those that were begun, as long as for any instance.
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
            then = "those that decode prefill, too" if self._table.local else "requests are refused"
            log.warning("no pair of engines that prefill and decode takes requests: %s", then)

    def _limits(self) -> tuple[tuple[_Limit, float], ...]:
        unpaired, blind = self._table.unpaired_since, self._table.blind_since
        return (
            (self._any, self._table.unready_since),
            (self._role, unpaired),
            (self._role_again, unpaired),
            (self._images, blind),
            (self._images_again, blind),
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
        if (self._role_again if begun else self._role).passed and not self._table.local:
            return Unavailable(NO_PAIR)
        blind = images and (self._images_again if begun else self._images).passed
        return Unavailable(NO_ENCODER) if blind else None
