"""The message that empties the prefix cache, and removes stored blocks from a KV tier."""

from __future__ import annotations

import msgspec


class FlushTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine: empty the prefix cache, and remove records from the KV tier, if there is a tier.

    The next heartbeat has the count ``EngineStats.forgotten_blocks``. ``salt`` and ``session`` None: all
    records of the folder. Otherwise only records with the given salt, or session.
    """

    salt: str | None = None
    """``Submit.salt`` of the records."""
    session: str | None = None
    """``Submit.session`` of the records."""
    disk: bool = True
    """False: keep all records of the tier."""
