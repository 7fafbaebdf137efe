"""Lacks of instances for requests, and since when each lack exists. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Lacks(NamedTuple):
    """Three possible lacks of requests."""

    any: bool = False
    """No instance takes sequences."""
    pair: bool = False
    """Some take sequences, but none can do all work, and no two are partners."""
    images: bool = False
    """Some take sequences, but no sequences with images."""


class Since:
    """Start time of each of the ``Lacks``, in seconds of the fleet's clock; inf while nothing is lacking."""

    def __init__(self) -> None:
        self.any = self.pair = self.images = math.inf

    def note(self, lacks: Lacks, now: float) -> None:
        """Update the start times with the lacks at ``now``."""
        for name, lacking in lacks._asdict().items():
            setattr(self, name, min(getattr(self, name), now) if lacking else math.inf)

    def stall(self, seconds: float, now: float) -> None:
        """Shift the start times by ``seconds``, because this process stood still and may have missed
        instances."""
        for name in Lacks._fields:
            if (since := getattr(self, name)) != math.inf:
                setattr(self, name, min(now, since + seconds))


def missing_roles(known: Iterable[str | None], present: Iterable[str | None], images: bool) -> list[str]:
    """Return the roles of ``known`` instances missing among the ``present`` ones, in order of first use.

    With ``images``, the role "encode" counts, too.
    """
    there = {*present, None if images else "encode", None}
    return list(dict.fromkeys(role for role in known if role is not None and role not in there))
