"""What a simulated cluster has beside its instances where prefill and decode have groups of their own."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

from weft.sim.rank_side import RankSide, dims_of
from weft.sim.ranks import RankProcess, Replica
from weft.sim.room_network import RoomNetwork
from weft.sim.room_rules import RoomRules
from weft.sim.wires import Wires
from weft.types.messages import Role

if TYPE_CHECKING:
    from weft.sim.cluster import Cluster
    from weft.sim.head import HeadProcess

PAIRED = 0.3
"""Share of schedules that have roles."""
PAIRS: tuple[tuple[Role, ...], ...] = (
    ("prefill", "decode"),
    ("prefill", "decode"),
    ("prefill", "decode", "decode"),
    ("prefill", "prefill", "decode"),
    ("unified", "prefill", "decode"),
    ("prefill", "prefill", "decode", "decode"),
)


class RoomWorld:
    """Of one schedule. Drawn from the seed by itself, so schedules without roles do not depend on it."""

    def __init__(self, cluster: Cluster, heads: int) -> None:
        """``heads``: how many there are where they have no roles."""
        self._cluster = cluster
        rng = random.Random(f"rooms of {cluster.seed}")
        roles: list[Role] = ["unified"] * heads
        self.paired = rng.random() < PAIRED
        """Whether prefill and decode have groups of their own."""
        if self.paired:
            roles = list(rng.choice(PAIRS))
        self.roles = {f"head{number}": role for number, role in enumerate(roles)}
        """Of each instance."""
        self.local_prefill = not self.paired or rng.random() < 0.7
        """See ``Fleet``."""
        self.watermark = rng.choice((0.0, 0.05, 0.3))
        """See ``TransferSection.decode_watermark``."""
        self.heads: dict[int, HeadProcess] = {}
        """All processes of heads that ever were, by incarnation."""
        kind: Literal["shm", "tcp"] = rng.choice(("shm", "shm", "tcp"))
        sees = kind == "shm" or rng.random() < 0.5
        delay = rng.choice((0.005, 0.05, 0.2))
        self.wires = Wires(cluster, kind, delay, rng.choice((64, 1 << 20)), 1 << 20)
        loss, repeat = rng.choice(((0.0, 0.0), (0.0, 0.1), (0.1, 0.1), (0.25, 0.1)))
        self.network = RoomNetwork(cluster, loss, repeat, rng.choice((0.002, 0.02, 0.1)), sees)

    def make_side(self, replica: Replica, process: RankProcess | HeadProcess) -> RankSide:
        """The cache and the transfers of a rank, which is a process of its own or the head's."""
        cluster = self._cluster
        number = process.rank - replica.ranks[0] if isinstance(process, RankProcess) else 0
        rules = RoomRules(cluster, replica, process)
        return RankSide(self.wires, process, number, cluster.kv, dims_of(cluster.kv, cluster.tensor), rules)

    def can_serve(self, retired: set[str]) -> bool:
        """Whether instances that are not ``retired`` can do all of a request."""
        left = {role for name, role in self.roles.items() if name not in retired}
        return "unified" in left or ("decode" in left and (self.local_prefill or "prefill" in left))

    def tally(self, head: HeadProcess) -> None:
        """Counts what came of the rooms of a head that decodes."""
        transfers = head.engine.stats().transfers
        if transfers is not None and head.engine.transfer.role == "decode":
            self._cluster.count("transfers done", transfers.done)
            self._cluster.count("transfers failed", transfers.failed)
            self._cluster.count("sequences given back", transfers.evictions)
