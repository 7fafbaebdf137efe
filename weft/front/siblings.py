"""The fronts of one server ask each other: for their own metrics, so that whichever is scraped answers for
all, and to abort a request, whichever has it.

Each listens on a socket in the server's private folder. Who connects says one line, and gets an answer and
its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

ANSWER_S = 1.0
"""Seconds in which the other fronts must answer; a front that does not is left out of the page."""
FOUND = b"found"


class Siblings:
    """The other fronts of the server. Used from one event loop."""

    def __init__(self, name: str, folder: Path, others: Callable[[], Iterable[str]]) -> None:
        """``others``: the names of all fronts that run, now."""
        self.name = name
        self._folder = folder
        self._others = others
        self._server: asyncio.Server | None = None

    async def start(self, page: Callable[[], bytes], abort: Callable[[str], bool]) -> None:
        """Answers from now on, in the place of an earlier front of that name: with ``page()``, and whether
        ``abort(id)`` found a request."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    what, _, rid = (await reader.readline()).decode().strip().partition(" ")
                if what == "abort":
                    writer.write(FOUND if abort(rid) else b"")
                else:
                    writer.write(page())
                await writer.drain()
            writer.close()

        path = self._path(self.name)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(answer, path)

    async def pages(self) -> dict[str, bytes]:
        """The pages of the others, of those that answer, by their names."""
        return await self._ask_all("metrics")

    async def abort(self, rid: str) -> bool:
        """Whether another front had a request of this id, which is ended now."""
        return FOUND in (await self._ask_all(f"abort {rid}")).values()

    async def _ask_all(self, line: str) -> dict[str, bytes]:
        names = [name for name in self._others() if name != self.name]
        answers = await asyncio.gather(*(self._ask(name, line) for name in names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    async def close(self) -> None:
        """Answers no more."""
        if self._server is not None:
            self._server.close()

    async def _ask(self, name: str, line: str) -> bytes | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(name))
                try:
                    writer.write(line.encode() + b"\n")
                    return await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None

    def _path(self, name: str) -> Path:
        return self._folder / f"front-{name}"
