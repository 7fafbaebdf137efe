"""Messages between the API servers of one server. Each API server can answer for all API servers: the metrics
and the load history. Each API server can abort any request.

Each API server listens on a socket in the server's private folder. A client sends one line, and gets one
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from weft.common.errors import Unavailable, WeftError

ANSWER_S = 1.0
"""Maximum seconds for the answers of other API servers. An API server without an answer is left out of the
page."""
STATE_S = 40.0
"""Maximum seconds for the answer to a change that all API servers must know, or to a question about state.
A busy process may take seconds. The supervisor replaces a process that stands still for 30 s."""
FOUND = b"found"
CARRIER_S = 5.0
"""Maximum seconds until the supervisor names the API server that carries out changes."""
POLL_S = 0.02
MOST_LINE = 64 << 20
"""Maximum bytes of one line: the state of weights may name thousands of files."""


class Siblings:
    """The other API servers of the server. Used from one event loop."""

    def __init__(
        self,
        name: str,
        folder: Path,
        others: Callable[[], Iterable[str]],
        carrier: Callable[[], str] = lambda: "",
    ) -> None:
        """``name``: this API server's name. ``folder``: private folder of the sockets. ``others``: returns
        the names of all running API servers; this server's own name is skipped. ``carrier``: returns the name
        of the API server that carries out changes for all; "" while the supervisor names none."""
        self._carrier = carrier
        self.name = name
        self._folder = folder
        self._others = others
        self._server: asyncio.Server | None = None
        self.adapters: dict[str, Callable[[str], bytes]] = {}
        """Model -> applies a change of LoRA adapters of the model, or returns all adapters for "". Set by
        their owners."""
        self.pause: Callable[[str], bytes] = lambda state: b""
        """Takes the pause of another API server, and returns the pause here. Set by the owner."""
        self.weights: dict[str, Callable[[str], bytes]] = {}
        """Model -> takes the updates of weights of another API server, and returns the updates here. Set by
        their owners."""
        self.carry: Callable[[str], Awaitable[bytes]] | None = None
        """Carries out a call for another API server, and returns the answer. Set by the owner."""
        self.leave: Callable[[str], Awaitable[None]] | None = None
        """Ends all requests of a model. Set by the owner."""

    async def start(
        self, page: Callable[[], bytes], abort: Callable[[str], bool], history: Callable[[int], bytes]
    ) -> None:
        """Start answering on a socket, in place of an earlier process of the same name. ``page()`` returns
        the metrics, ``abort(id)`` returns True if the request was found, and ``history(second)`` returns
        the samples of load after a second. A client that sends no line in time, or an invalid line, gets no
        answer."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            expected = (OSError, ValueError, TimeoutError, WeftError)  # a model may not be loaded here
            with contextlib.closing(writer), contextlib.suppress(*expected):
                async with asyncio.timeout(STATE_S):  # a busy process reads late
                    what, _, which = (await reader.readline()).decode().strip().partition(" ")
                if what == "abort":
                    writer.write(FOUND if abort(which) else b"")
                elif what == "adapter":
                    model, _, change = which.partition(" ")
                    if (take := self.adapters.get(unquote(model))) is not None:
                        writer.write(take(change))
                elif what == "weights":
                    model, _, state = which.partition(" ")
                    if (take_state := self.weights.get(unquote(model))) is not None:
                        writer.write(take_state(state))
                elif what == "carry" and self.carry is not None:
                    if self.carries:  # not a process that started again under the name
                        writer.write(await _while_open(reader, self.carry(which)))
                elif what == "leave" and self.leave is not None:
                    await self.leave(unquote(which))
                elif what == "pause":
                    writer.write(self.pause(which))
                elif what == "history":
                    writer.write(history(int(which)))
                else:
                    writer.write(page())
                await writer.drain()

        path = self._path(self.name)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(answer, path, limit=MOST_LINE)

    async def pages(self) -> dict[str, bytes]:
        """Return the pages of the other API servers by name, without API servers that do not answer."""
        return await self._ask_all("metrics")

    async def histories(self, second: int) -> list[bytes]:
        """Return the samples of load after ``second`` of each other API server that answers."""
        return list((await self._ask_all(f"history {second}")).values())

    async def abort(self, rid: str) -> bool:
        """Abort the request of this id in the other API servers. Return True if the request was found."""
        return FOUND in (await self._ask_all(f"abort {rid}")).values()

    async def tell_adapter(self, model: str, change: str) -> None:
        """Send a change of LoRA adapters of a model to the other API servers."""
        await self._ask_all(f"adapter {quote(model, safe='')} {change}", STATE_S)

    async def ask_adapters(self, model: str) -> list[bytes]:
        """Return the LoRA adapters of a model at each other API server that answers."""
        answers = await self._ask_all(f"adapter {quote(model, safe='')}", STATE_S)
        return list(answers.values())

    async def tell_pause(self, state: str) -> list[bytes]:
        """Send the state of the pause to each other API server, and return the answers.

        An API server that does not listen yet, or not any more, is left out: the API server asks at its
        start. Raises Unavailable for an API server that listens and does not answer in time.
        """
        names = [name for name in self._others() if name != self.name]
        answers = await asyncio.gather(*(self._ask(name, f"pause {state}", STATE_S) for name in names))
        for name, answer in zip(names, answers, strict=True):
            if answer is None:
                raise Unavailable(f"the API server {name} did not answer; try again")
        return [answer for answer in answers if answer]

    @property
    def carries(self) -> bool:
        """True for the API server that carries out changes for all."""
        return self._carrier() == self.name

    async def carrier(self) -> str:
        """Return the name of the API server that carries out changes for all. Raises Unavailable if the
        supervisor names none within ``CARRIER_S`` seconds."""
        until = asyncio.get_running_loop().time() + CARRIER_S
        while not (found := self._carrier()):
            if asyncio.get_running_loop().time() > until:
                raise Unavailable("no API server carries out changes of the weights yet; try again")
            await asyncio.sleep(POLL_S)
        return found

    async def tell_weights(self, model: str, state: str) -> list[bytes]:
        """Send the updates of a model's weights to each other API server, and return the answers."""
        answers = await self._ask_all(f"weights {quote(model, safe='')} {state}", STATE_S)
        return list(answers.values())

    async def tell_leave(self, model: str, seconds: float) -> None:
        """Let each other API server end its requests of a model. Waits at most ``seconds``."""
        await self._ask_all(f"leave {quote(model, safe='')}", seconds)

    async def ask_carrier(self, carrier: str, call: str, seconds: float) -> bytes:
        """Return the answer of ``carrier``, another API server, to ``call``. Raises Unavailable without an
        answer within ``seconds``."""
        answer = await self._ask(carrier, f"carry {call}", seconds)
        if not answer:
            raise Unavailable(f"the API server {carrier}, which changes weights, did not answer; try again")
        return answer

    async def _ask_all(self, line: str, seconds: float = ANSWER_S) -> dict[str, bytes]:
        """Send ``line`` to all other API servers at once. Return name -> answer, without API servers that
        are absent, silent or have nothing to say."""
        names = [name for name in self._others() if name != self.name]
        answers = await asyncio.gather(*(self._ask(name, line, seconds) for name in names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer}

    async def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()

    async def _ask(self, name: str, line: str, seconds: float = ANSWER_S) -> bytes | None:
        """Return the answer of one API server. Return b"" for an absent API server: no process listens, or
        the process ends meanwhile. Return None for a silent API server, after ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_unix_connection(self._path(name))
                try:
                    writer.write(line.encode() + b"\n")
                    return await reader.read(-1)
                finally:
                    writer.close()
        except TimeoutError:  # a subclass of OSError
            return None
        except OSError:
            return b""

    def _path(self, name: str) -> Path:
        return self._folder / f"front-{name}"


async def _while_open(reader: asyncio.StreamReader, work: Awaitable[bytes]) -> bytes:
    """Return the result of ``work``; b"" after the end of the connection, which cancels ``work``."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else b""
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
