"""Sources of external input for blocked sequences, such as KV of another group or a compiled grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weft.common.errors import EngineDead
from weft.engine.disagg.engine_transfers import EngineTransfers
from weft.engine.disagg.transfer_ends import TransferScheduler
from weft.engine.kv_events import KVEventSource
from weft.runner.wakeup_descriptor import WakeupDescriptor
from weft.types.messages import TokenEvent

if TYPE_CHECKING:
    from weft.engine.grammars import GrammarSource
    from weft.engine.step_scheduler import StepScheduler


class AwaitedSource(Protocol):
    """Notifies an engine of external input for blocked sequences.

    The step loop does not poll a source. An idle loop sleeps on the source's sockets, too.
    """

    @property
    def sockets(self) -> Sequence[Any]:
        """zmq sockets or descriptors, readable once ``take`` has input."""

    def take(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Pass new input to the scheduler. Return the events. Does not block."""

    def serve(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Execute the scheduler's requests and return the events. Does not block; cheap when there are no
        requests.

        The engine calls ``serve`` after each input to the scheduler, and after each launch or commit of a
        step.
        """


class MediaScheduler(Protocol):
    """A scheduler of a group with embedding transfers."""

    @property
    def embeddings(self) -> TransferScheduler | None: ...


class EmbeddingSource:
    """The ``AwaitedSource`` of embedding transfers. The transfers use the ``embeddings`` part of the
    scheduler.
    """

    def __init__(self, transfers: EngineTransfers) -> None:
        self._transfers = transfers

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets to poll while idle."""
        return self._transfers.sockets

    def take(self, scheduler: MediaScheduler) -> list[TokenEvent]:
        """See ``EngineTransfers.take``."""
        return self._transfers.take(_part(scheduler))

    def serve(self, scheduler: MediaScheduler) -> list[TokenEvent]:
        """See ``EngineTransfers.serve``."""
        return self._transfers.serve(_part(scheduler))


def _part(scheduler: MediaScheduler) -> TransferScheduler:
    """Return the embedding transfers of a scheduler. Raises EngineDead if the scheduler has none."""
    if scheduler.embeddings is None:
        raise EngineDead("the group transfers embeddings, but its scheduler does not")
    return scheduler.embeddings


class StepEnds:
    """The ``AwaitedSource`` of step ends, for engines that do not wait inside ``step``."""

    def __init__(self, wakeup: WakeupDescriptor) -> None:
        self._wakeup = wakeup

    @property
    def sockets(self) -> Sequence[Any]:
        """Descriptor to poll while idle."""
        return [self._wakeup.descriptor]

    def take(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Reset the wake-up socket. The engine checks the steps, so there are no events."""
        self._wakeup.clear()
        return []

    def serve(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Return no events: the scheduler requests nothing from a wake-up socket."""
        return []


def sources_of(
    grammars: GrammarSource | None,
    transfers: EngineTransfers | None,
    embeddings: EngineTransfers | None,
    wakeup: WakeupDescriptor | None,
    kv_events: KVEventSource | None = None,
) -> list[AwaitedSource]:
    """Return the sources of an engine, without the absent ones. The grammar source comes first."""
    of_images = None if embeddings is None else EmbeddingSource(embeddings)
    of_steps = None if wakeup is None else StepEnds(wakeup)
    found = (grammars, transfers, of_images, of_steps, kv_events)
    return [source for source in found if source is not None]
