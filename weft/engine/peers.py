"""The ranks of a group as their head knows them: who said hello, who is ready; frames to and from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from weft.common.errors import ConfigError, EngineDead, WeftError
from weft.common.log import get_logger
from weft.config.group import compare
from weft.parallel.control import HeadChannel, PeerGone
from weft.types import frames as f

log = get_logger(__name__)


class Peers:
    """Knows each rank by the channel's name of its present process."""

    def __init__(
        self, channel: HeadChannel, ranks: Sequence[int], settings: Mapping[str, str], beats: str
    ) -> None:
        """``settings``: the head's, which ranks must share; ``beats``: the address that they beat to."""
        self._channel, self._ranks = channel, ranks
        self._settings, self._beats = dict(settings), beats
        self._names: dict[int, bytes] = {}
        self.ready: dict[int, None] = {}
        """Those whose weights are there."""
        self.strict = True
        """Whether a rank that differs ends whoever waits for it; else it is refused, and nothing more."""

    def __contains__(self, rank: object) -> bool:
        """Whether its process said hello."""
        return rank in self._names

    def speaks(self, name: bytes, rank: int) -> bool:
        """Whether it is the present process of ``rank`` that goes by ``name``."""
        return self._names.get(rank) == name

    def received(self, wait: float) -> Iterator[tuple[bytes, f.ToHead]]:
        """(name, frame) of all that came, waiting ``wait`` seconds for the first.

        Raises ConfigError for a rank of another version, if ``strict``.
        """
        while (found := self._channel.receive(wait)) is not None:
            wait = 0
            name, data = found
            try:
                frame = f.decode_to_head(data)
            except f.FrameError as error:
                self._refuse(name, error)
                if self.strict and isinstance(error, f.VersionMismatch):
                    raise ConfigError(error.message) from None
            else:
                yield name, frame

    def hello(self, name: bytes, hello: f.RankHello) -> bool:
        """Welcomes a rank, or refuses it. Whether it is welcome; raises ConfigError, if ``strict``."""
        try:
            if hello.rank not in self._ranks:
                self._refuse(name, ConfigError(f"rank {hello.rank} is not of this group"))
                return False
            compare(self._settings, hello.settings, "the head", f"rank {hello.rank}")
        except ConfigError as error:
            self._refuse(name, error)
            if self.strict:
                raise
            return False
        self._names[hello.rank] = name
        self.ready.pop(hello.rank, None)
        self.tell(hello.rank, f.RankWelcome(beats=self._beats))
        return True

    def forget(self, rank: int) -> None:
        """Its process has ended, or must: another one will say hello."""
        if rank in self._names:
            gone = EngineDead("the head of the group has given this rank up")
            self.tell(rank, f.Refused(error=gone.info()))
            del self._names[rank]
        self.ready.pop(rank, None)

    def send(self, rank: int, data: bytes) -> None:
        """Raises PeerGone."""
        if rank not in self._names:
            raise PeerGone("it did not say hello")
        self._channel.send(self._names[rank], data)

    def tell(self, rank: int, frame: f.ToRank) -> None:
        """Sends a frame, if that can be."""
        with suppress(PeerGone):
            self.send(rank, f.encode(frame))

    def tell_all(self, frame: f.ToRank) -> None:
        """``tell`` to all who said hello."""
        for rank in list(self._names):
            self.tell(rank, frame)

    def _refuse(self, name: bytes, error: WeftError) -> None:
        log.error("a rank is refused: %s", error.message)
        with suppress(PeerGone):
            self._channel.send(name, f.encode(f.Refused(error=error.info())))
