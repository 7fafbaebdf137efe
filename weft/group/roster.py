"""The ranks of a group as its head knows them: who said hello, who has room for what. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.common.errors import ConfigError, EngineDead, WeftError
from weft.common.log import get_logger
from weft.config.group_settings import compare
from weft.group import types as t
from weft.group.sizes import least
from weft.types import frames as f
from weft.types.rooms import Endpoint

log = get_logger(__name__)


@dataclass(slots=True)
class Member:
    """A rank beside the head, as the head knows it."""

    local: bool
    """Whether its process is on this host: else its own host starts it again."""
    since: float = 0.0
    """When the wait for its hello, or then for its weights, began."""
    starting: bool = False
    """Whether ``Spawn`` is under way: what is heard of it is of the process before."""
    outlived: bool = False
    """Whether its process outlived another head, and has not said hello to this one."""
    gone: str = ""
    """How its process ended."""
    peer: bytes | None = None
    """Its present process, once it has said hello."""
    ready: bool = False
    endpoint: Endpoint | None = None
    """Where it takes bytes of other groups, once it is ready, in a group with a role."""
    embeddings: Endpoint | None = None
    """Likewise of embeddings, in a group that sends or takes them."""
    formed: bool = False
    """Whether it is in the present epoch."""
    stopped: bool = False
    """Whether its process can go on though it lost the epoch: it told of its failure, or is a new one."""
    bereft: bool = False
    """Whether a collective failed there: somebody's fault, not its own."""


class Roster:
    """What it has to send is in ``actions``."""

    def __init__(
        self, rank: int, local: Mapping[int, bool], settings: Mapping[str, str], welcome: f.RankWelcome
    ) -> None:
        """See ``Membership``."""
        self.members = {other: Member(here) for other, here in local.items()}
        self.seen = -1
        """The last epoch that any rank was in, be it under another head."""
        self.pools: tuple[int, ...] | None = None
        """Blocks of each pool, once all ranks have loaded."""
        self.actions: list[t.Action] = []
        self.welcome = welcome
        self._rank, self._settings = rank, settings
        self._rooms: dict[int, tuple[int, ...]] = {}
        """Blocks of each pool that a rank has room for; this one's among them."""
        self._given_up: set[bytes] = set()
        """Processes that were replaced, for membership only."""

    def take_actions(self) -> list[t.Action]:
        """What is to be done now, in order."""
        actions, self.actions = self.actions, []
        return actions

    def of(self, peer: bytes, rank: int) -> Member | None:
        """Who says something; None for a stranger, or a process that was replaced."""
        member = self.members.get(rank)
        return None if member is None or member.peer != peer else member

    def has_given_up(self, peer: bytes) -> bool:
        """Return True if the rank process with the control connection ``peer`` was replaced."""
        return peer in self._given_up

    def hello(self, peer: bytes, hello: f.RankHello, now: float) -> bool:
        """Whether it is a new process, and welcome; else it is refused, or known. Raises ConfigError."""
        rank, member = hello.rank, self.members.get(hello.rank)
        if member is None:
            self.refuse(peer, ConfigError(f"rank {rank} is not of this group"))
            return False
        if peer in self._given_up:
            self.refuse(peer, EngineDead("the head of the group has given this rank up"))
            return False
        try:
            compare(self._settings, hello.settings, "the head", f"rank {rank}")
        except ConfigError as error:
            self.refuse(peer, error)
            raise
        if member.starting:  # it says hello until it is answered, unless it is the one that is to end
            return False
        self.actions.append(t.Send(peer, self.welcome))
        if member.peer == peer:
            return False
        self.forget(rank)
        member.peer, member.since = peer, now
        self.seen = max(self.seen, hello.epoch)
        return True

    def loaded(self, rank: int, blocks: tuple[int, ...]) -> None:
        """A rank has its weights. The last one decides what ``pools`` are. Raises EngineDead."""
        self._rooms[rank] = blocks
        if self.pools is not None:
            if any(has < all_have for has, all_have in zip(blocks, self.pools, strict=False)):
                log.warning("rank %d has less room than the ranks' caches take", rank)
            self.tell(rank, f.Pools(blocks=self.pools))
        elif len(self._rooms) > len(self.members):
            own = self._rooms[self._rank]
            self.pools = least(own, {other: self._rooms[other] for other in self.members})
            if self.pools != own:
                log.info("the ranks' caches have %s blocks, which all have room for", list(self.pools))
            self.tell_all(f.Pools(blocks=self.pools))

    def is_late(self, rank: int) -> bool:
        """Whether it is the rank's own turn to load or allocate."""
        return rank not in self._rooms or (self.pools is not None and not self.members[rank].ready)

    def spawn(self, rank: int, anew: bool) -> None:
        """Has its process started."""
        self.members[rank].starting = True
        self.actions.append(t.Spawn(rank, anew))

    def replace(self, rank: int, why: str) -> None:
        """Replaces a process that has ended, or must end: another one will say hello."""
        self.tell(rank, f.Refused(error=EngineDead("the head of the group has given this rank up").info()))
        served_another = self.members[rank].outlived
        self.forget(rank)
        if self.members[rank].local:
            if served_another:  # no fault: it may have ended with its head, a moment after this one began
                log.info("rank %d served the head before, and is replaced: %s", rank, why)
            else:
                log.warning("rank %d is started again: %s", rank, why)
            self.spawn(rank, anew=True)

    def forget(self, rank: int) -> None:
        """Nothing that its present process says counts any more."""
        member = self.members[rank]
        if member.peer is not None:
            self._given_up.add(member.peer)
        member.peer, member.gone, member.ready, member.formed, member.outlived = None, "", False, False, False
        member.endpoint = member.embeddings = None
        self._rooms.pop(rank, None)

    def tell(self, rank: int, frame: f.ToRank) -> None:
        """Sends a frame, if that can be."""
        member = self.members.get(rank)
        if member is not None and member.peer is not None:
            self.actions.append(t.Send(member.peer, frame))

    def tell_all(self, frame: f.ToRank) -> None:
        """``tell`` to all who said hello."""
        for rank in self.members:
            self.tell(rank, frame)

    def refuse(self, peer: bytes, error: WeftError) -> None:
        """To any process."""
        log.error("a rank is refused: %s", error.message)
        self.actions.append(t.Send(peer, f.Refused(error=error.info())))
