"""The pause of a server by an operator: the state, and the agreement between all API servers.

    POST /pause ──► change ──► apply: fleets hold sequences, abort ends requests
                      │  ▲
                 state▼  │state, number of running sequences
                 other API servers

A sleep is a pause with parts of the memory freed (asleep). ``wake`` fills parts again. After the last part
the server is as before the sleep.

Each change has a stamp: (a number above all known numbers, the name of the API server). The highest stamp
wins everywhere, so all API servers agree after concurrent changes. An API server gets the state of the others
at its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, NamedTuple

from weft.common.errors import DeadlineExceeded, EngineDead, InvalidRequest, Unavailable
from weft.common.log import get_logger
from weft.front.siblings import Siblings
from weft.store.fixed_weights import PARTS

if TYPE_CHECKING:
    from weft.front.requests.context import Front
    from weft.front.requests.served_model import ServedModel

log = get_logger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
POLL_S = 0.02
"""Seconds between two counts of running sequences."""
MEET_S = 0.05
"""Seconds between two reads of the states that engine processes know."""
ANSWER_S = 5.0
"""Maximum seconds for the answers of the engine processes."""


class PauseState(NamedTuple):
    """The latest change. States are compared by ``number``, then ``name``."""

    number: int = 0
    name: str = ""
    """API server of the change."""
    mode: str = ""
    """A mode of ``MODES``; "" for a server that is not paused."""
    level: int = 0
    """Level of the sleep: 1 frees the KV cache, 2 also the weights; 0 for a server that is awake."""
    asleep: tuple[str, ...] = ()
    """The members of ``PARTS`` that are asleep, in order."""
    before: str = ""
    """``mode`` after the sleep."""

    def next(self, name: str, mode: str) -> PauseState:
        """Return the state after a pause or a resume here. Raises InvalidRequest for the resume of a server
        that is asleep."""
        if not self.level:
            return PauseState(self.number + 1, name, mode)
        if not mode:
            raise InvalidRequest("the server is asleep: send POST /wake_up instead of /resume")
        return self._replace(number=self.number + 1, name=name, mode=mode, before=_later(mode))

    def sleep(self, name: str, mode: str, level: int) -> PauseState:
        """Return the state after a sleep here. A second sleep keeps the higher level."""
        before = self.before if self.level else _later(self.mode)
        return PauseState(self.number + 1, name, mode, max(level, self.level), PARTS, before)

    def wake(self, name: str, parts: Collection[str]) -> PauseState:
        """Return the state after ``parts`` are awake again. The last part ends the sleep."""
        asleep = tuple(one for one in self.asleep if one not in parts)
        if not asleep:
            return PauseState(self.number + 1, name, self.before)
        return self._replace(number=self.number + 1, name=name, mode=_later(self.mode), asleep=asleep)

    def text(self) -> str:
        """Return the state as a line for other API servers."""
        asleep = "+".join(self.asleep)
        return " ".join(map(str, (*self[:1], *(one or "-" for one in (*self[1:4], asleep, self.before)))))

    @staticmethod
    def read(text: str) -> PauseState:
        """Return the state of ``text``. Raises ValueError."""
        number, name, mode, level, asleep, before = text.split()
        for one in (mode, before):
            if one not in (*MODES, "-"):
                raise ValueError(f"unknown mode {one!r}")
        parts = tuple(one for one in PARTS if one in asleep.split("+"))
        return PauseState(
            int(number),
            name.strip("-"),
            mode.strip("-"),
            int(level.replace("-", "0")),
            parts,
            before.strip("-"),
        )


def _later(mode: str) -> str:
    """Return the mode that holds the same requests and ends none: ``abort`` acts once."""
    return "wait" if mode == "abort" else mode


class Pausing:
    """The pause, as one API server knows and applies the pause. Used from the event loop."""

    def __init__(self, front: Front, siblings: Siblings | None) -> None:
        """``front``: of the process. ``siblings``: the other API servers, if any."""
        self._front, self._siblings = front, siblings
        self._name = secrets.token_hex(8) if siblings is None else siblings.name
        self._meets: asyncio.Task[None] | None = None
        """Takes the states of API servers that run alone (``weft front``), which meet at the engines."""
        self._shared = PauseState()
        """The last state that the engine processes got from here."""
        self.state = PauseState()
        if siblings is not None:
            siblings.pause = self._on_sibling

    @property
    def paused(self) -> bool:
        """True from a pause until the resume."""
        return bool(self.state.mode)

    @property
    def asleep(self) -> bool:
        """True from a sleep until all parts are awake."""
        return self.state.level > 0

    async def join(self) -> None:
        """Take over the state of the other API servers, at the start."""
        await self._tell()

    def meet(self, model: ServedModel) -> None:
        """Share the pause with API servers that run alone, through the engine processes of ``model``. Call
        before the first connection. Does nothing for an API server with siblings, or without shared
        engines."""
        if self._siblings is None and model.owner.shared:
            self._meets = self._meets or asyncio.create_task(self._meet())
            model.links.share_pause("")

    def close(self) -> None:
        """Stop taking states of other API servers. Idempotent."""
        if self._meets is not None:
            self._meets.cancel()

    async def _meet(self) -> None:
        while True:
            await asyncio.sleep(MEET_S)
            self.take()

    def take(self) -> None:
        """Read the states that the engine processes know, see ``meet``. Apply and acknowledge the newest
        state."""
        if self._meets is None:
            return
        for instance in [one for model in self.models for one in model.links.instances]:
            if instance.alive and instance.pause:
                # A later release may have further modes.
                with contextlib.suppress(ValueError):
                    self._apply(PauseState.read(instance.pause))
        self._share()

    def _share(self) -> None:
        """Send the state to the engine processes. A change of this API server leaves at once. The pause of
        another API server is acknowledged when no sequence runs here: a begun sequence between two engine
        processes is in no count of an engine process."""
        own = self.state.name == self._name
        if self._meets is None or self._shared == self.state or (self.paused and not own and self._running()):
            return
        self._shared = self.state
        for model in self.models:
            model.links.share_pause(self.state.text())

    def joined(self, model: ServedModel) -> None:
        """Apply the state to a model that is loaded now, and share the state with its engine processes."""
        self._follow(model)
        if self._meets is not None and self._shared.number:
            model.links.share_pause(self._shared.text())

    async def pause(self, mode: PauseMode, seconds: float) -> None:
        """Pause all API servers, and wait until no sequence runs. Raises DeadlineExceeded after ``seconds``,
        and Unavailable for a resume meanwhile or an API server that does not answer; in both cases, new
        requests wait until the resume."""
        await self._hold_all(self.state.next(self._name, mode), seconds)
        log.info("the server is paused over /pause (%s)", mode)

    async def sleep(self, mode: PauseMode, level: int, seconds: float) -> None:
        """Pause all API servers for a sleep, as ``pause`` does with the same errors. The caller then frees
        the memory."""
        await self._hold_all(self.state.sleep(self._name, mode, level), seconds)
        log.info("the server sleeps at level %d over /sleep (%s)", level, mode)

    async def wake(self, parts: Collection[str]) -> None:
        """End the sleep of ``parts`` at all API servers; the last part ends the pause of the sleep. Raises
        Unavailable for an API server that does not answer."""
        if self.asleep:
            self._apply(self.state.wake(self._name, parts))
            log.info("awake over /wake_up: %s", ", ".join(parts))
        await self._tell()  # also to an API server that did not answer the last call

    async def _hold_all(self, state: PauseState, seconds: float) -> None:
        """Take ``state``, a pause, and wait until no sequence runs. Errors: see ``pause``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        self._apply(state)
        while self._running() + await self._tell() and self.paused:
            if loop.time() > deadline:
                raise DeadlineExceeded(f"requests still run after {seconds:g} seconds; new requests wait")
            await asyncio.sleep(POLL_S)
        if not self.paused:
            raise Unavailable("the server was resumed before the pause was complete")

    async def resume(self) -> None:
        """Resume all API servers. Raises Unavailable for an API server that does not answer."""
        self._apply(self.state.next(self._name, ""))
        log.info("the server is resumed over /resume")
        await self._tell()

    async def _tell(self) -> int:
        """Send the state to the other API servers, and take newer states. Return the number of sequences that
        run there. Raises Unavailable for an API server that does not answer."""
        if self._meets is not None:
            return sum(await asyncio.gather(*(self._tell_engines(model) for model in self.models)))
        if self._siblings is None:
            return 0
        running = 0
        for answer in await self._siblings.tell_pause(self.state.text()):
            count, _, state = answer.decode().partition(" ")
            running += int(count)
            self._apply(PauseState.read(state))
        return running

    async def _tell_engines(self, model: ServedModel) -> int:
        """Ask the engine processes for newer states. Return a sum that is 0 when the pause is complete: the
        other API servers that have not acknowledged the state, their sequences, and 1 if an engine process
        did not answer."""
        try:
            await model.links.stats(ANSWER_S)
        except EngineDead:  # within a long step; the caller asks again
            return 1
        self.take()
        living = [one for one in model.links.instances if one.alive]
        return sum(len(one.behind) + one.elsewhere for one in living)

    def _on_sibling(self, text: str) -> bytes:
        """Take the state of another API server. Return the number of sequences that run here, and the state.
        Raises ValueError for an invalid line."""
        self._apply(PauseState.read(text))
        return f"{self._running()} {self.state.text()}".encode()

    def _apply(self, state: PauseState) -> None:
        """Take ``state`` if newer than the state here."""
        if state[:2] <= self.state[:2]:
            return
        self.state = state
        self._front.lifecycle.paused = self.paused
        for model in self.models:
            self._follow(model)
        if state.mode == "abort":
            for generation in list(self._front.running.values()):
                generation.abort()
        self._share()  # last: from here on this API server sends no new sequence

    def _follow(self, model: ServedModel) -> None:
        """Hold the requests of a model, or release the requests."""
        model.lifecycle.paused = self.paused
        model.links.asleep = self.state.level
        if self.paused:
            model.links.hold(running=self.state.mode == "keep")
        else:
            model.links.release_held()

    @property
    def models(self) -> list[ServedModel]:
        """Return all loaded models."""
        several = self._front.several
        return [self._front.model] if several is None else several.loaded

    def _running(self) -> int:
        """Return the number of sequences of this API server that do not wait for the resume."""
        return sum(model.links.fleet.open.pause_of_server.running for model in self.models)
