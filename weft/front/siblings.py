"""The fronts of one server tell each other their own metrics, so that whichever is scraped answers for all.

Each listens on a socket in the server's private folder; who connects gets its page, and the end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

ANSWER_S = 1.0
"""Seconds in which the other fronts must answer; a front that does not is left out of the page."""


class Siblings:
    """Used from one event loop."""

    def __init__(self, name: str, folder: Path, others: Callable[[], Iterable[str]]) -> None:
        """``others``: the names of all fronts that run, now."""
        self.name = name
        self._folder = folder
        self._others = others
        self._server: asyncio.Server | None = None

    async def start(self, page: Callable[[], bytes]) -> None:
        """Answers with ``page()`` from now on, in the place of an earlier front of that name."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(page())
                await writer.drain()
            writer.close()

        path = self._path(self.name)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(answer, path)

    async def pages(self) -> dict[str, bytes]:
        """The pages of the others, of those that answer, by their names."""
        names = [name for name in self._others() if name != self.name]
        pages = await asyncio.gather(*map(self._ask, names))
        return {name: page for name, page in zip(names, pages, strict=True) if page is not None}

    async def close(self) -> None:
        """Answers no more."""
        if self._server is not None:
            self._server.close()

    async def _ask(self, name: str) -> bytes | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(name))
                try:
                    return await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None

    def _path(self, name: str) -> Path:
        return self._folder / f"front-{name}"
