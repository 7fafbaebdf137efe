"""Session of a request: agents name the session in a header, other clients in the body."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")
"""Headers in order of priority."""
LONGEST = 1024
"""Maximum characters of a name that count."""


def session_of(headers: Mapping[str, str], label: str = "") -> str:
    """Return a hash of the session's name and the client's key; "" without a name. The key prevents access
    to sessions of other keys. ``label``: name from the body, used if no header names a session."""
    name = next((headers[header] for header in HEADERS if headers.get(header)), label)
    if not name:
        return ""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    # The length separates key and name: different pairs never give the same bytes.
    data = f"{len(key)}:{key}{name[:LONGEST]}".encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16).hexdigest()
