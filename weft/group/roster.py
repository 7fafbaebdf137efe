"""Book of a group's ranks in the engine process: hello, load stage and memory of each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.common.errors import ConfigError, EngineDead, WeftError
from weft.common.log import get_logger
from weft.config.group_settings import compare
from weft.group import types as t
from weft.group.sizes import least
from weft.types import frames as f
from weft.types.transfer import Endpoint

log = get_logger(__name__)


@dataclass(slots=True)
class RankMember:
    """State of one rank other than the rank of the engine process."""

    local: bool
    """True if the process runs on this host. Otherwise the process's own host does restarts."""
    since: float = 0.0
    """Time at which the current wait began: the wait for the hello, then for the weights."""
    starting: bool = False
    """True while ``Spawn`` is in progress. Reports in the meantime belong to the previous process."""
    outlived: bool = False
    """True if the process outlived an earlier engine process and has not said hello to the present one."""
    gone: str = ""
    """Reason for the end of the process; empty while the process runs."""
    peer: bytes | None = None
    """Channel name of the present process; None before the hello."""
    ready: bool = False
    endpoint: Endpoint | None = None
    """Receive address for bytes of other groups. Set by a ready rank of a group with a role."""
    embeddings: Endpoint | None = None
    """Receive address for embeddings. Set by a ready rank of a group with embedding transfers."""
    formed: bool = False
    """True if the rank is in the present epoch."""
    stopped: bool = False
    """True if the process can continue after a lost epoch: a failure was reported, or the process is new."""
    bereft: bool = False
    """True if a collective failed on the rank. The fault is elsewhere."""


class Roster:
    """All ranks of a group. Actions collect in ``actions`` until ``take_actions``."""

    def __init__(
        self, rank: int, local: Mapping[int, bool], settings: Mapping[str, str], welcome: f.RankWelcome
    ) -> None:
        """Create a roster without any hello. For the parameters see ``Membership``."""
        self.members = {other: RankMember(here) for other, here in local.items()}
        self.seen = -1
        """Highest epoch in any hello, possibly of an earlier engine process; -1 for none."""
        self.pools: tuple[int, ...] | None = None
        """Number of blocks of each pool; None until all ranks have loaded."""
        self.actions: list[t.Action] = []
        self.welcome = welcome
        self._rank, self._settings = rank, settings
        self._rooms: dict[int, tuple[int, ...]] = {}
        """Rank -> number of blocks in each pool for which the rank has memory. Includes the own rank."""
        self._given_up: set[bytes] = set()
        """Channel names of replaced processes. Only looked up, never iterated."""

    def take_actions(self) -> list[t.Action]:
        """Return the collected actions in order and clear ``actions``."""
        actions, self.actions = self.actions, []
        return actions

    def of(self, peer: bytes, rank: int) -> RankMember | None:
        """Return the member ``rank`` if ``peer`` is the member's present process; otherwise None."""
        member = self.members.get(rank)
        return None if member is None or member.peer != peer else member

    def has_given_up(self, peer: bytes) -> bool:
        """Return True if the rank process with the control connection ``peer`` was replaced."""
        return peer in self._given_up

    def hello(self, peer: bytes, hello: f.RankHello, now: float) -> bool:
        """Handle a hello.

        Return True if ``peer`` is a new and accepted process. Return False for a known, refused or ignored
        process.

        A refused process gets the reason. A new process replaces the rank's former process. Repeated hellos
        of a known process get the welcome again. Raises ConfigError if the settings differ, after a refusal.
        """
        rank, member = hello.rank, self.members.get(hello.rank)
        if member is None:
            self.refuse(peer, ConfigError(f"rank {rank} does not belong to this group"))
            return False
        if peer in self._given_up:
            self.refuse(peer, EngineDead("the engine has replaced this process of the rank"))
            return False
        try:
            compare(self._settings, hello.settings, "the engine", f"rank {rank}")
        except ConfigError as error:
            self.refuse(peer, error)
            raise
        if member.starting:  # the previous process repeats hellos until an answer comes
            return False
        self.actions.append(t.SendFrame(peer, self.welcome))
        if member.peer == peer:
            return False
        self.forget(rank)
        member.peer, member.since = peer, now
        self.seen = max(self.seen, hello.epoch)
        return True

    def loaded(self, rank: int, blocks: tuple[int, ...]) -> None:
        """Record that ``rank`` has weights and memory for ``blocks``.

        The last rank to load decides ``pools``, and all ranks get the sizes. Later ranks get the same
        sizes. Raises EngineDead if a rank has a different number of pools.
        """
        self._rooms[rank] = blocks
        if self.pools is not None:
            if any(has < all_have for has, all_have in zip(blocks, self.pools, strict=False)):
                log.warning("rank %d has less memory than the KV cache of the group needs", rank)
            self.tell(rank, f.Pools(blocks=self.pools))
        # `_rooms` includes the own rank, so more entries than members means all ranks.
        elif len(self._rooms) > len(self.members):
            own = self._rooms[self._rank]
            self.pools = least(own, {other: self._rooms[other] for other in self.members})
            if self.pools != own:
                log.info("KV cache blocks: %s, the minimum over all ranks", list(self.pools))
            self.tell_all(f.Pools(blocks=self.pools))

    def is_late(self, rank: int) -> bool:
        """Return True if the next move is the rank's: to load, or to allocate known pools."""
        return rank not in self._rooms or (self.pools is not None and not self.members[rank].ready)

    def spawn(self, rank: int, anew: bool) -> None:
        """Request the start of the rank's process. ``anew``: end a running process first."""
        self.members[rank].starting = True
        self.actions.append(t.Spawn(rank, anew))

    def replace(self, rank: int, why: str) -> None:
        """Give up the rank's process, which is notified.

        If the rank is local, request a new process. Logged for local ranks.
        """
        # The refusal must come first: ``forget`` drops the address of the process.
        self.tell(
            rank, f.RankRefused(error=EngineDead("the engine has replaced this process of the rank").info())
        )
        served_another = self.members[rank].outlived
        self.forget(rank)
        if self.members[rank].local:
            if served_another:  # no fault: the process may have ended together with an engine process
                log.info("rank %d belonged to an earlier engine process, and is replaced: %s", rank, why)
            else:
                log.warning("rank %d is started again: %s", rank, why)
            self.spawn(rank, anew=True)

    def forget(self, rank: int) -> None:
        """Forget the rank's present process: address, endpoints, load state and memory.

        Further frames of the process are ignored.
        """
        member = self.members[rank]
        if member.peer is not None:
            self._given_up.add(member.peer)
        member.peer, member.gone, member.ready, member.formed, member.outlived = None, "", False, False, False
        member.endpoint = member.embeddings = None
        self._rooms.pop(rank, None)

    def tell(self, rank: int, frame: f.ToRank) -> None:
        """Queue a frame to ``rank``. Does nothing if the rank has not said hello."""
        member = self.members.get(rank)
        if member is not None and member.peer is not None:
            self.actions.append(t.SendFrame(member.peer, frame))

    def tell_all(self, frame: f.ToRank) -> None:
        """Queue a frame to every rank with a hello."""
        for rank in self.members:
            self.tell(rank, frame)

    def dismiss(self, local_only: bool) -> None:
        """Queue a shutdown to every rank with a hello. ``local_only``: except ranks of other hosts."""
        for rank, member in self.members.items():
            if member.local or not local_only:
                self.tell(rank, f.RankShutdown())

    def refuse(self, peer: bytes, error: WeftError) -> None:
        """Log and queue a refusal to the process ``peer``."""
        log.error("a rank is rejected: %s", error.message)
        self.actions.append(t.SendFrame(peer, f.RankRefused(error=error.info())))
