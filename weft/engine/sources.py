"""What tells a head that input has come which its sequences await."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weft.common.errors import EngineDead
from weft.engine.rooms import HeadRooms, RoomScheduler
from weft.runner.doorbell import Doorbell
from weft.types.messages import TokenEvent

if TYPE_CHECKING:
    from weft.engine.grammars import GrammarSource
    from weft.engine.step_scheduler import StepScheduler


class AwaitedSource(Protocol):
    """Tells a head that input which its sequences await has come: KV of another engine, a mask.

    The step loop does not poll it: while it is idle, it sleeps on the source's sockets, too.
    """

    @property
    def sockets(self) -> Sequence[Any]:
        """zmq sockets or descriptors that are readable once there is something to ``take``."""

    def take(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Tells the scheduler what came since the last call. Does not wait."""

    def asked(self, scheduler: StepScheduler) -> list[TokenEvent]:
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


class StepEnds:
    """The ``AwaitedSource`` of steps that nobody waits for otherwise."""

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell

    @property
    def sockets(self) -> Sequence[Any]:
        """To sleep on."""
        return [self._bell.descriptor]

    def take(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """The engine looks at its steps by itself."""
        self._bell.hear()
        return []

    def asked(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Nothing is asked of a bell."""
        return []


def sources_of(
    grammars: GrammarSource, rooms: HeadRooms | None, embeddings: HeadRooms | None, bell: Doorbell | None
) -> list[AwaitedSource]:
    """All that a head has."""
    of_images = None if embeddings is None else EmbeddingSource(embeddings)
    of_steps = None if bell is None else StepEnds(bell)
    return [grammars, *(source for source in (rooms, of_images, of_steps) if source is not None)]
