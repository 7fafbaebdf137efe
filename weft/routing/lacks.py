"""Since when requests lack instances that would take them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Lacks(NamedTuple):
    """Three things that requests may lack."""

    any: bool = False
    """No instance takes sequences."""
    pair: bool = False
    """Some take sequences, but none can do all work, and no two are partners."""
    images: bool = False
    """Some take sequences, but none of them takes sequences with images."""


class Since:
    """Since when each of ``Lacks`` holds; inf while it does not. Seconds of the fleet's clock."""

    def __init__(self) -> None:
        self.any = self.pair = self.images = math.inf

    def note(self, lacks: Lacks, now: float) -> None:
        """Takes in what is lacking at ``now``."""
        for name, lacking in lacks._asdict().items():
            setattr(self, name, min(getattr(self, name), now) if lacking else math.inf)

    def stall(self, seconds: float, now: float) -> None:
        """This process stood still for ``seconds``, in which instances may have come."""
        for name in Lacks._fields:
            if (since := getattr(self, name)) != math.inf:
                setattr(self, name, min(now, since + seconds))


def missing_roles(known: Iterable[str | None], present: Iterable[str | None], images: bool) -> list[str]:
    """Return the roles of ``known`` instances that none of the ``present`` ones has, in order.

    ``images``: whether the role "encode" counts, too.
    """
    there = {*present, None if images else "encode", None}
    return list(dict.fromkeys(role for role in known if role is not None and role not in there))
