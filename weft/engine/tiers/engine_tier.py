"""The KV tier of an engine process: an ``AwaitedSource`` between the scheduler's loads and the ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from weft.common.clock import Clock
from weft.common.log import get_logger
from weft.engine.tiers.group_tier import GroupTier
from weft.kv.tiers import Flushed
from weft.scheduler.loads import Loads
from weft.types.messages import TokenEvent
from weft.types.tier_flush import FlushTier
from weft.types.tiers import FlushStore

log = get_logger(__name__)

FLUSH_S = 10.0
"""Maximum seconds at the end of an engine process to store blocks of ended sequences."""
OPEN_S = 5.0
"""Maximum seconds that the start waits for the store. The first start reads all weights, which may take
longer: until then nothing is loaded."""
_POLL_S = 0.005


class EngineTier:
    """Carries out the commands of ``loads`` on the ranks, and returns the reports."""

    def __init__(self, loads: Loads, ranks: GroupTier, clock: Clock) -> None:
        self.loads, self._ranks, self._clock = loads, ranks, clock
        self._until: float | None = None
        """Time until which blocks are stored at the end of the process; None before the end."""
        ranks.wait(OPEN_S)
        self.take(None)

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets to poll while idle."""
        return self._ranks.sockets

    @property
    def moving(self) -> bool:
        """True while blocks of ended sequences are still to be stored, for at most ``FLUSH_S`` seconds after
        the first call. For callers that end the process: a slow disk or a write rate must not hold the
        end."""
        now = self._clock.now()
        self._until = now + FLUSH_S if self._until is None else self._until
        return now < self._until and self.loads.moving and not self.loads.book.stalled(now)

    @property
    def copying(self) -> bool:
        """True while a rank copies blocks, or will copy blocks by a command under way."""
        return self.loads.book.num_copying > 0

    def take(self, scheduler: object) -> list[TokenEvent]:
        """Apply the reports of the ranks. Return no events: a load changes no sequence's tokens."""
        for word in self._ranks.take():
            self.loads.on(word, self._clock.now())
        return []

    def serve(self, scheduler: object) -> list[TokenEvent]:
        """Send the commands of the scheduler to the ranks. Return no events."""
        for command in self.loads.requests(self._clock.now()):
            self._ranks.send(command)
        return []

    def flush(self, asked: FlushTier) -> None:
        """Forget planned stores, and remove records from the store unless the records stay."""
        self.loads.on(Flushed(), self._clock.now())
        if not asked.disk:
            return
        self._ranks.send(FlushStore(salt=asked.salt, session=asked.session))

    def regain(self) -> None:
        """Note that the group runs again after a loss of ranks."""
        self._ranks.regain()

    def finish(self) -> None:
        """Store the blocks that wait, as long as ``moving`` allows. Blocks."""
        while self.moving:
            self.serve(None)
            self.take(None)
            time.sleep(_POLL_S)
