"""The message that removes stored blocks from a KV tier."""

from __future__ import annotations

import msgspec


class FlushTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine: empty the prefix cache, and remove records from the KV tier. There is no answer.

    Both fields None: all records of the folder. Otherwise only records with the given salt, or session.
    """

    salt: str | None = None
    """``Submit.salt`` of the records."""
    session: str | None = None
    """``Submit.session`` of the records."""
