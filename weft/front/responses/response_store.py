"""Responses for use in later requests, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from weft.common.errors import NotFound
from weft.front.protocol.parse import printable
from weft.front.protocol.responses.conversion import History

OVERHEAD = 512
"""Approximate bytes of a response beside its texts."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A response and its input."""

    id: str
    key: int
    """Number of the API key of the request. Requests with other keys cannot find the response."""
    answer: bytes
    """JSON of the answer, as sent."""
    input: bytes
    """JSON of the request's own input items, without the items of previous responses."""
    output: bytes
    """JSON of the output items in stored form, for later prompts."""
    output_ids: tuple[str, ...]
    previous: str | None = None
    """Id of the previous response, if any."""

    @property
    def size(self) -> int:
        """Bytes that count against the store's limit."""
        return len(self.answer) + self.shown + OVERHEAD

    @property
    def shown(self) -> int:
        """Bytes of all items, as used by a later request."""
        return len(self.input) + len(self.output)

    def items(self) -> list[dict[str, Any]]:
        """Return the items of input and output."""
        return [*msgspec.json.decode(self.input), *msgspec.json.decode(self.output)]


class ResponseStore:
    """Store of responses with a bounded size. A full store drops a response of the key with the most bytes,
    so no key can push another key below an equal share. Within a key, the least recently used response goes
    first. A use of a response also counts as a use of all previous responses, so a response is never
    dropped before its continuations.

    Thread-safe: long answers are encoded, and so stored, in threads.
    """

    def __init__(self, limit: int, where: str = "") -> None:
        """``limit``: bytes. ``where``: added to an error, about other possible places of a response."""
        self.limit = limit
        self.used = 0
        self._where = where
        self._lock = threading.RLock()
        self._kept: dict[str, Stored] = {}
        self._by_key: dict[int, OrderedDict[str, Stored]] = {}
        """Responses of each key, least recently used first. No entry is empty."""
        self._used: dict[int, int] = {}
        """Bytes of each key."""
        self._owner: dict[str, str] = {}
        """Output item id -> response id."""

    def add(self, stored: Stored) -> None:
        """Store a response, as the most recently used. Other responses are dropped until the store fits. No
        effect if the response alone exceeds the limit."""
        if stored.size > self.limit:
            return
        with self._lock:
            self._kept[stored.id] = stored
            self._by_key.setdefault(stored.key, OrderedDict())[stored.id] = stored
            self._used[stored.key] = self._used.get(stored.key, 0) + stored.size
            self._owner.update((item, stored.id) for item in stored.output_ids)
            self.used += stored.size
            self._touch(stored)
            while self.used > self.limit:
                most = max(self._used, key=self._used.__getitem__)
                self._forget(next(iter(self._by_key[most].values())))

    def get(self, id: str, key: int) -> Stored:
        """Return the response of this id and ``key``, and mark the response as used. Raises NotFound, also
        for a response of another key."""
        with self._lock:
            stored = self._find(id, key, "response_id", "response_not_found")
            self._touch(stored)
            return stored

    def remove(self, id: str, key: int) -> None:
        """Remove the response of this id and ``key``. Responses that continue the response stay, but their
        chain is broken. Raises NotFound."""
        with self._lock:
            self._forget(self._find(id, key, "response_id", "response_not_found"))

    def chain(self, id: str, key: int) -> list[Stored]:
        """Return the response and all previous responses, oldest first, and mark all as used. Raises
        NotFound if a response of the chain is not stored."""
        links: list[Stored] = []
        at: str | None = id
        with self._lock:
            while at is not None:
                links.append(self._find(at, key, "previous_response_id", "previous_response_not_found"))
                at = links[-1].previous
            self._touch(links[0])
        return links[::-1]

    def owners(self, items: Iterable[str], key: int) -> list[Stored]:
        """Return the responses with the given output items, in no fixed order. Items that are unknown,
        dropped or of other keys are skipped. The responses do not count as used."""
        with self._lock:
            found = {self._owner.get(item) for item in items}
            kept = (self._kept[owner] for owner in found if owner is not None)
            return [stored for stored in kept if stored.key == key]

    def _forget(self, stored: Stored) -> None:
        """Remove a stored response from all tables. Call with the lock held."""
        del self._kept[stored.id]
        del self._by_key[stored.key][stored.id]
        self._used[stored.key] -= stored.size
        if not self._by_key[stored.key]:
            del self._by_key[stored.key], self._used[stored.key]
        for item in stored.output_ids:
            self._owner.pop(item, None)
        self.used -= stored.size

    def _find(self, id: str, key: int, param: str, code: str) -> Stored:
        """Return the response. Raises NotFound with ``param`` and ``code`` if the response is not stored or
        has another key."""
        stored = self._kept.get(id)
        if stored is None or stored.key != key:
            raise NotFound(
                f"the response {printable(id, 64)} is not stored: it had store: false, was deleted, or was "
                f"evicted for newer responses (--responses-store-bytes){self._where}",
                param=param,
                code=code,
            )
        return stored

    def _touch(self, stored: Stored) -> None:
        """Mark the response and all previous responses as used. The previous responses are marked later, so
        these stay longer."""
        at: Stored | None = stored
        while at is not None and at.id in self._kept:
            self._by_key[at.key].move_to_end(at.id)
            at = None if at.previous is None else self._kept.get(at.previous)


def history(chain: Iterable[Stored], owners: Iterable[Stored], wanted: Iterable[str]) -> History:
    """Return the stored items for a request: all items of ``chain``, and the ``wanted`` items of
    ``owners``."""
    names = set(wanted)
    found = {item["id"]: item for stored in owners for item in stored.items() if item.get("id") in names}
    return History(items=[item for stored in chain for item in stored.items()], referenced=found)
