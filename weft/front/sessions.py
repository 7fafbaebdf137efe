"""Which conversation a request is a turn of: agents say so in a header, other clients in the body."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")
"""The first of them that is there counts."""
LONGEST = 1024
"""Characters that count of a name."""


def session_of(headers: Mapping[str, str], label: str = "") -> str:
    """A hash of the session's name and of the key that the client sent with it, so that nobody takes part in
    a session of another key; "" where the request names none. ``label``: of the body, where no header does.
    """
    name = next((headers[header] for header in HEADERS if headers.get(header)), label)
    if not name:
        return ""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    data = f"{len(key)}:{key}{name[:LONGEST]}".encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16).hexdigest()
