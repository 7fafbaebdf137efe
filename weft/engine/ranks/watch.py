"""Heartbeats between an engine process and the ranks of a group, sent and answered by dedicated threads.

A heartbeat proves a running process, not progress. Progress is checked where a step waits for outcomes.
Heartbeats have connections of their own, so a large step frame does not delay a heartbeat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from weft.common.counted_log import CountedLog
from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.group.liveness import SILENT, Liveness
from weft.parallel.control import EngineChannel, RankChannel
from weft.types.frames import FrameError, RankHeartbeat, decode_to_engine, decode_to_rank, encode

strangers = CountedLog(get_logger(__name__))


class _Thread:
    """A thread that calls ``work`` repeatedly until ``close``."""

    def __init__(self, name: str, rank_timeout: float) -> None:
        self._interval = min(0.5, rank_timeout / 16)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait up to 5 seconds for the end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        """Call ``work`` until ``close``, then ``end``."""
        try:
            while not self._stop.is_set():
                self.work()
        finally:
            self.end()

    def _take_all(self) -> None:
        """Handle the frames of one interval, then all frames already received, because a late thread must not
        count frames sent in time as missing.
        """
        until = time.monotonic() + self._interval
        while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
            self.take(left)
        while self.take(0):
            pass

    def take(self, wait: float) -> bool:
        """Handle one frame.

        Return False if no frame arrived within ``wait`` seconds. Subclasses implement the method.
        """
        raise NotImplementedError

    def work(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError


class EngineWatch(_Thread):
    """The engine's side: answers heartbeats. The callbacks run in the watch's thread."""

    def __init__(
        self,
        channel: EngineChannel,
        rank_timeout: float,
        heard: Callable[[RankHeartbeat], RankHeartbeat],
        looked: Callable[[], None],
    ) -> None:
        """``heard(heartbeat)`` returns the answer. ``looked`` is called after all received heartbeats were
        handled.
        """
        super().__init__("weft-watch", rank_timeout)
        self._channel = channel
        self._heard = heard
        self._looked = looked

    def work(self) -> None:
        self._take_all()
        self._looked()

    def end(self) -> None:
        self._channel.close()

    def take(self, wait: float) -> bool:
        """Answer one heartbeat.

        Return False if no frame came within ``wait`` seconds. Invalid frames are logged; a lost rank is
        ignored.
        """
        found = self._channel.receive(wait)
        if found is None:
            return False
        peer, data = found
        try:
            heartbeat = decode_to_engine(data)
            if isinstance(heartbeat, RankHeartbeat):
                self._channel.send(peer, encode(self._heard(heartbeat)))
        except FrameError as error:
            strangers.warn("dropped an invalid frame on the heartbeat channel: %s", error.message)
        except EngineDead:  # the rank is gone, and the silence will be noticed
            pass
        return True


class RankWatch(_Thread):
    """A rank's side: learns which epoch has ended, and detects the loss of the engine process."""

    def __init__(
        self,
        channel: RankChannel,
        rank_timeout: float,
        heartbeat: Callable[[], RankHeartbeat],
        ended: Callable[[int], None],
        orphaned: Callable[[], None],
    ) -> None:
        """``ended(epoch)`` reports the end of the epoch and of all earlier epochs. ``orphaned`` is called
        repeatedly while the engine process is silent, has given this rank up, or another engine answers.
        """
        super().__init__("weft-heartbeats", rank_timeout)
        self._channel = channel
        self._liveness = Liveness(SILENT * rank_timeout)
        self._liveness.expect([0], time.monotonic())
        self._heartbeat = heartbeat
        self._ended = ended
        self._orphaned = orphaned
        self._replaced = False

    def work(self) -> None:
        """Send a heartbeat and handle the answers of one interval.

        Call ``orphaned`` if the engine process is silent or replaced.
        """
        with suppress(EngineDead):  # the missing answer will be noticed
            self._channel.send(encode(self._heartbeat()))
        self._take_all()
        if self._liveness.silent(time.monotonic()) is not None or self._replaced:
            self._orphaned()

    def end(self) -> None:
        self._channel.close(deliver=False)  # a late heartbeat has no use

    def take(self, wait: float) -> bool:
        """Handle one frame and report aborted epochs to ``ended``.

        Return False if no frame came within ``wait`` seconds. Invalid frames are logged.

        Sets ``_replaced`` when another engine answers, or the engine has given this rank up.
        """
        data = self._channel.receive(wait)
        if data is None:
            return False
        try:
            heartbeat = decode_to_rank(data)
        except FrameError as error:
            strangers.warn("dropped an invalid frame on the heartbeat channel: %s", error.message)
            return True
        if not isinstance(heartbeat, RankHeartbeat):
            return True
        # Another incarnation answers at the old address: the rank's own engine process is gone. An engine
        # process that has given this rank up waits for a new hello. Its ``RankRefused`` may be lost.
        if heartbeat.given_up or heartbeat.incarnation != self._heartbeat().incarnation:
            self._replaced = True
        else:
            self._liveness.heartbeat(0, time.monotonic())
            self._ended(heartbeat.aborted)
        return True
