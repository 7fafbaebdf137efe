"""The handshake between releases: the identity of an engine process, and the texts of refusals. See
docs/adr/0036-releases-that-meet.md."""

from __future__ import annotations

import msgspec

from weft import __version__

IDENTITY_SINCE = 2
"""First version of the messages with ``Hello.engine`` and ``Welcome.engine``."""


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one engine process. Unknown fields are ignored, as in Hello and Welcome."""

    name: str
    """Name of the engine in the server: ``decode0``."""
    model: str
    """Name of the served model."""
    start: int
    """Number of the start, set by the owner of the process. For an engine in a directory: the incarnation of
    the record. 0 if unknown."""

    def is_same(self, other: EngineIdentity) -> bool:
        """Return True if both identities may be of one process."""
        starts = 0 in (self.start, other.start) or self.start == other.start
        return starts and (self.name, self.model) == (other.name, other.model)

    def __str__(self) -> str:
        return f"engine {self.name} of model {self.model} (process {self.start:x})"


def wrong_engine_text(wanted: EngineIdentity, found: EngineIdentity) -> str:
    """Return the error text of a connection to ``found`` instead of ``wanted``."""
    return f"another engine answers at the address: {found} instead of {wanted}"


def no_common_version_text(engine: tuple[int, int], server: tuple[int, int], here: str) -> str:
    """Return the error text for an engine and an API server without a common version.

    ``engine``, ``server``: [oldest, newest] version of each. ``here``: "engine" or "API server", the side of
    this process.
    """
    sides = {"engine": engine, "API server": server}
    other = "engine" if here == "API server" else "API server"
    older = min(sides, key=lambda side: sides[side][1])
    return (
        f"the {other} speaks versions {sides[other][0]} to {sides[other][1]} of the messages, this {here} "
        f"(Weft {__version__}) versions {sides[here][0]} to {sides[here][1]}: upgrade the {older}"
    )
