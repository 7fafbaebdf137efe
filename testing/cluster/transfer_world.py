"""Roles of instances in a simulated cluster, and everything between instances of different roles."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

from testing.cluster.ranks import RankProcess, Replica
from testing.cluster.transfers.embedding_side import EmbeddingSide, embedding_dims_of
from testing.cluster.transfers.image_rules import ImageRules
from testing.cluster.transfers.image_world import ImageWorld
from testing.cluster.transfers.rank_side import RankSide, dims_of
from testing.cluster.transfers.sides import Sides
from testing.cluster.transfers.transfer_network import TransferNetwork
from testing.cluster.transfers.transfer_rules import TransferRules
from testing.cluster.transfers.wires import Wires
from weft.config.resolved import KVConfig
from weft.types.messages import Role

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.engine_process import EngineProcess

PAIRED = 0.3
"""Share of schedules with roles."""
PAIRS: tuple[tuple[Role, ...], ...] = (
    ("prefill", "decode"),
    ("prefill", "decode"),
    ("prefill", "decode", "decode"),
    ("prefill", "prefill", "decode"),
    ("unified", "prefill", "decode"),
    ("prefill", "prefill", "decode", "decode"),
)


class TransferWorld:
    """Roles and transfers of one schedule.

    Uses a random generator of its own, so schedules without roles do not depend on it.
    """

    def __init__(self, cluster: Cluster, engine_processes: int) -> None:
        """Draw the roles. ``engine_processes`` is the number of instances in a cluster without roles."""
        self._cluster = cluster
        rng = random.Random(f"rooms of {cluster.seed}")
        roles: list[Role] = ["unified"] * engine_processes
        self.paired = rng.random() < PAIRED
        """True if prefill and decode, or images, have groups of their own."""
        if self.paired:
            roles = list(rng.choice(PAIRS))
        self.images = ImageWorld(cluster.seed)
        roles = self.images.roles(roles, self.paired)
        self.roles = {f"head{number}": role for number, role in enumerate(roles)}
        """Instance -> role."""
        self.local_prefill = not self.paired or rng.random() < 0.7
        """True if decode instances may prefill. See ``Fleet``."""
        self.watermark = rng.choice((0.0, 0.05, 0.3))
        """Free share of the cache kept by decode groups. See ``TransferSection.decode_watermark``."""
        self.mode: Literal["push", "pull"] = "pull" if cluster.seed % 4 == 3 else "push"
        """See ``TransferSection.transfer_mode``."""
        self.engine_processes: dict[int, EngineProcess] = {}
        """Incarnation -> engine process, for all processes of the schedule."""
        kind: Literal["shm", "tcp"] = rng.choice(("shm", "shm", "tcp"))
        sees = kind == "shm" or rng.random() < 0.5
        delay = rng.choice((0.005, 0.05, 0.2))
        self.wires = Wires(cluster, kind, delay, rng.choice((64, 1 << 20)), 1 << 20)
        loss, repeat = rng.choice(((0.0, 0.0), (0.0, 0.1), (0.1, 0.1), (0.25, 0.1)))
        self.paired = self.paired or self.images.there
        self.network = TransferNetwork(cluster, loss, repeat, rng.choice((0.002, 0.02, 0.1)), sees)

    def moves(self, name: str) -> bool:
        """Return True if ranks of the instance take part in transfers."""
        return self.roles[name] != "unified" or self.images.there

    def caches(self, name: str) -> KVConfig:
        """Return the cache settings of an instance."""
        return self.images.caches(self._cluster.kv, self.roles[name])

    def make_sides(self, replica: Replica, process: RankProcess | EngineProcess) -> Sides:
        """Return the caches and transfers of a rank: a rank process, or the engine's own rank."""
        cluster, images = self._cluster, self.images
        number = process.rank - replica.ranks[0] if isinstance(process, RankProcess) else 0
        kv, role = self.caches(replica.name), self.roles[replica.name]
        own: RankSide | None = None
        if role in ("prefill", "decode"):
            rules = TransferRules(cluster, replica, process)
            own = RankSide(self.wires, process, number, kv, dims_of(kv, cluster.tensor), rules, images.seen)
        seen: EmbeddingSide | None = None
        if kv.media is not None and role != "decode":
            dims = embedding_dims_of(kv.media, cluster.tensor)
            checks = ImageRules(cluster, replica, process)
            seen = EmbeddingSide(self.wires, process, number, kv.media, dims, checks, images.shown)
        return Sides(own, seen)

    def can_serve(self, retired: set[str]) -> bool:
        """Return True if instances outside ``retired`` can do all work of a request."""
        left = {role for name, role in self.roles.items() if name not in retired}
        return "unified" in left or ("decode" in left and (self.local_prefill or "prefill" in left))

    def tally(self, engine_process: EngineProcess) -> None:
        """Add the outcomes of an engine's transfers to the cluster's counts."""
        stats = engine_process.engine.stats()
        transfers, images = stats.transfers, stats.embedding_transfers
        if images is not None and engine_process.engine.transfer.role != "encode":
            self._cluster.count("embeddings received", images.done)
            self._cluster.count("embeddings failed", images.failed)
            self._cluster.count("sequences whose images were late", engine_process.engine.late_images)
        if engine_process.engine.transfer.role == "encode":
            self._cluster.count("images encoded apart", stats.images_encoded)
            self._cluster.count("images found where they are encoded", stats.image_hits)
        if transfers is not None and engine_process.engine.transfer.role == "decode":
            self._cluster.count("transfers done", transfers.done)
            self._cluster.count("transfers failed", transfers.failed)
            self._cluster.count("sequences given back", transfers.returns)
