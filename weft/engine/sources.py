"""What tells a head that input has come which its sequences await."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weft.common.errors import EngineDead
from weft.engine.rooms import HeadRooms, RoomScheduler
from weft.types.messages import TokenEvent

if TYPE_CHECKING:
    from weft.engine.grammars import GrammarSource
    from weft.scheduler.scheduler import Scheduler


class AwaitedSource(Protocol):
    """Tells a head that input which its sequences await has come: KV of another engine, a mask.

    The step loop does not poll it: while it is idle, it sleeps on the source's sockets, too.
    """

    @property
    def sockets(self) -> Sequence[Any]:
        """zmq sockets or descriptors that are readable once there is something to ``take``."""

    def take(self, scheduler: Scheduler) -> list[TokenEvent]:
        """Tells the scheduler what came since the last call. Does not wait."""

    def asked(self, scheduler: Scheduler) -> list[TokenEvent]:
        """Carries out what the scheduler asks for: called whenever it was given something, and behind each
        step that was launched or committed. Does not wait; cheap when there is nothing.
        """


class MediaScheduler(Protocol):
    """A scheduler whose group sends or takes embeddings."""

    @property
    def embeddings(self) -> RoomScheduler | None: ...


class EmbeddingSource:
    """The ``AwaitedSource`` of rooms of embeddings: these speak to a part of the scheduler."""

    def __init__(self, rooms: HeadRooms) -> None:
        self._rooms = rooms

    @property
    def sockets(self) -> Sequence[Any]:
        """To sleep on."""
        return self._rooms.sockets

    def take(self, scheduler: MediaScheduler) -> list[TokenEvent]:
        """See ``HeadRooms.take``."""
        return self._rooms.take(_part(scheduler))

    def asked(self, scheduler: MediaScheduler) -> list[TokenEvent]:
        """See ``HeadRooms.asked``."""
        return self._rooms.asked(_part(scheduler))


def _part(scheduler: MediaScheduler) -> RoomScheduler:
    if scheduler.embeddings is None:
        raise EngineDead("the scheduler of a group that moves embeddings takes no part in that")
    return scheduler.embeddings


def sources_of(
    grammars: GrammarSource, rooms: HeadRooms | None, embeddings: HeadRooms | None
) -> list[AwaitedSource]:
    """All that a head has."""
    of_images = None if embeddings is None else EmbeddingSource(embeddings)
    return [grammars, *(source for source in (rooms, of_images) if source is not None)]
