"""The layout of a model over ranks."""

from __future__ import annotations

import msgspec


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """``data`` replicas of ``tensor`` ranks each. Rank r is place ``r % tensor`` of replica ``r // tensor``.

    With ``expert``, all ranks share the experts of every routed layer and form one expert-parallel group.
    Without ``expert``, each replica has all experts, split over the replica's ranks, and forms a separate
    group.
    """

    tensor: int = 1
    data: int = 1
    expert: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.data

    @property
    def expert_ranks(self) -> int:
        """Number of ranks of one expert-parallel group."""
        return self.ranks if self.expert else self.tensor

    def replica(self, rank: int) -> int:
        return rank // self.tensor

    def place(self, rank: int) -> int:
        """Return the number of ``rank`` within the replica; 0 is the engine's rank."""
        return rank % self.tensor


ALONE = Layout()
