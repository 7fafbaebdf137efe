"""Who still runs: beats between a head and its ranks, from threads that do nothing else.

A beat proves that a process runs, not that it gets on: that is seen by what a step's outcome waits for. Beats
have connections of their own, so they pass steps however large these are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.parallel.control import HeadChannel, RankChannel
from weft.types.frames import Beat, FrameError, decode_to_head, decode_to_rank, encode

log = get_logger(__name__)

SILENT, COLLECTIVE, GRACE = 0.6, 0.8, 0.15
"""Shares of the rank timeout: how long a rank may be silent; a collective, or a step's outcome, may be waited
for; and who was at fault may take to show. So a lost rank is noticed, and named, within the timeout."""


class Liveness:
    """When each rank was last heard of. Pure."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heard: dict[int, float] = {}
        self._loading: dict[int, None] = {}
        self._looked = -1.0

    def expect(self, ranks: Iterable[int], now: float, loading: Iterable[int] = ()) -> None:
        """From now on these ranks, and no others, must be heard of; who is loading from the first beat on."""
        self._heard, self._loading = dict.fromkeys(ranks, now), dict.fromkeys(loading)

    def heard(self, rank: int, now: float, new: bool = False) -> None:
        """``rank`` runs; nothing to one that is not expected. ``new``: it has not been in any epoch."""
        if rank in self._heard or (new and rank in self._loading):
            self._heard[rank] = now

    def silent(self, now: float) -> int | None:
        """A rank that was silent for too long; call it often.

        Whoever was late to look does not judge: it was this process that stood still.
        """
        late, self._looked = now - self._looked > self._patience / 2, now
        if late:
            self._heard = dict.fromkeys(self._heard, now)
        return next((rank for rank, at in self._heard.items() if now - at > self._patience), None)


class _Thread:
    """A thread that works every so often, until it is closed."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; returns when it has."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.work()
        finally:
            self.end()

    def work(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError


class HeadWatch(_Thread):
    """The head's side: answers beats, and tells of ranks that fell silent or whose process ended."""

    def __init__(
        self,
        channel: HeadChannel,
        rank_timeout: float,
        beat: Callable[[], Beat],
        lost: Callable[[int, str], None],
        dead: Callable[[], tuple[int, str] | None],
    ) -> None:
        """``beat``: what to answer. ``lost(rank, reason)`` is called once for each ``expect``. ``dead``: a
        rank whose process has ended, and how. All are called in this thread.
        """
        super().__init__("weft-watch")
        self._channel = channel
        self._interval = min(0.5, rank_timeout / 16)
        self._liveness = Liveness(SILENT * rank_timeout)
        self._beat, self._lost, self._dead = beat, lost, dead
        self._lock = threading.Lock()
        self._armed = False

    def expect(self, ranks: Iterable[int], loading: Iterable[int] = ()) -> None:
        """Watches ``ranks``, and those ``loading`` from their first beat on, until one of them is lost or
        ``relax`` is called.
        """
        with self._lock:
            self._liveness.expect(ranks, time.monotonic(), loading)
            self._armed = True

    def relax(self) -> None:
        """Watches nobody."""
        with self._lock:
            self._armed = False

    def work(self) -> None:
        until = time.monotonic() + self._interval
        while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
            self._take(left)
        while self._take(0):  # what lies there was sent in time, however late we look
            pass
        found: tuple[int, str] | None = None
        with self._lock:
            if self._armed:
                found = self._dead() or self._silent()
                self._armed = found is None
        if found is not None:
            self._lost(*found)

    def end(self) -> None:
        self._channel.close()

    def _silent(self) -> tuple[int, str] | None:
        rank = self._liveness.silent(time.monotonic())
        return None if rank is None else (rank, "it fell silent")

    def _take(self, wait: float) -> bool:
        found = self._channel.receive(wait)
        if found is None:
            return False
        peer, data = found
        try:
            beat = decode_to_head(data)
            if isinstance(beat, Beat):
                answer = self._beat()
                if beat.life == answer.life:  # else it has not noticed yet that its head is another
                    with self._lock:
                        self._liveness.heard(beat.rank, time.monotonic(), new=beat.epoch < 0)
                self._channel.send(peer, encode(answer))
        except FrameError as error:
            log.warning("dropped a frame beside the beats: %s", error.message)
        except EngineDead:  # it is gone: its silence will tell
            pass
        return True


class RankWatch(_Thread):
    """A rank's side: beats, and hears from the head which epoch has ended, or that it is there no more."""

    def __init__(
        self,
        channel: RankChannel,
        rank_timeout: float,
        beat: Callable[[], Beat],
        ended: Callable[[int], None],
        orphaned: Callable[[], None],
    ) -> None:
        """``ended(epoch)``: that epoch, and all before it, are over. ``orphaned``: the head fell silent, or
        another one answers in its place; called again and again.
        """
        super().__init__("weft-beats")
        self._channel = channel
        self._interval = min(0.5, rank_timeout / 16)
        self._liveness = Liveness(SILENT * rank_timeout)
        self._liveness.expect([0], time.monotonic())
        self._beat, self._ended, self._orphaned = beat, ended, orphaned
        self._replaced = False

    def work(self) -> None:
        with suppress(EngineDead):  # it shows in what does not come back
            self._channel.send(encode(self._beat()))
        until = time.monotonic() + self._interval
        while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
            self._take(left)
        while self._take(0):
            pass
        if self._liveness.silent(time.monotonic()) is not None or self._replaced:
            self._orphaned()

    def end(self) -> None:
        self._channel.close(deliver=False)  # nobody needs to hear a beat late

    def _take(self, wait: float) -> bool:
        data = self._channel.receive(wait)
        if data is None:
            return False
        try:
            beat = decode_to_rank(data)
        except FrameError as error:
            log.warning("dropped a frame beside the beats: %s", error.message)
            return True
        if isinstance(beat, Beat) and beat.life != self._beat().life:
            self._replaced = True
        elif isinstance(beat, Beat):
            self._liveness.heard(0, time.monotonic())
            self._ended(beat.aborted)
        return True
