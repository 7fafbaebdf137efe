"""How each kind of body is read: the one table that a front's threads and read workers share."""

from __future__ import annotations

from collections.abc import Callable

from weft.front.reading import Job, Reader

KINDS: dict[str, Callable[[Reader, bytes], Job]] = {
    "chat": Reader.chat,
    "completions": Reader.completions,
    "embeddings": Reader.embeddings,
}
"""By the name that ``serving.handle`` is called with."""
