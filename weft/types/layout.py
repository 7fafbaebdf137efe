"""How a model lies over ranks, as numbers: no communicator behind it."""

from __future__ import annotations

import msgspec


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """``data`` replicas of ``tensor`` ranks each. Rank r is place ``r % tensor`` of replica ``r // tensor``.

    With ``expert`` all ranks share the experts of every routed layer and are one domain; else each replica
    has all of them, split over its ranks, and is a domain of its own.
    """

    tensor: int = 1
    data: int = 1
    expert: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.data

    @property
    def domain(self) -> int:
        """Ranks of one domain."""
        return self.ranks if self.expert else self.tensor

    def replica(self, rank: int) -> int:
        return rank // self.tensor

    def place(self, rank: int) -> int:
        """Number of ``rank`` in its replica; 0 is the head."""
        return rank % self.tensor


ALONE = Layout()
