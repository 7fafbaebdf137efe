"""Responses that later requests may name, in a bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from weft.common.errors import NotFound
from weft.front.protocol.parse import printable
from weft.front.responses.conversion import History

OVERHEAD = 512
"""Bytes of a response beside its texts, about."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A response and what it was made from."""

    id: str
    key: int
    """The number of the API key that it was made with: nobody else finds it."""
    answer: bytes
    """JSON, as it was given."""
    input: bytes
    """JSON: the items that its request brought, without those of earlier responses."""
    output: bytes
    """JSON: its output items, as far as a later prompt may show them."""
    output_ids: tuple[str, ...]
    previous: str | None = None
    """The response that it goes on from."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.answer) + self.shown + OVERHEAD

    @property
    def shown(self) -> int:
        """Bytes of its items: of all that a later request has of it."""
        return len(self.input) + len(self.output)

    def items(self) -> list[dict[str, Any]]:
        """The items of its input and its output."""
        return [*msgspec.json.decode(self.input), *msgspec.json.decode(self.output)]


class ResponseStore:
    """Where the store is full, the key that has most of it gives way, so no key pushes another one below its
    equal share. Of its responses, the one goes first that was not used for the longest time, and no response
    before those that go on from it unless they are used less.

    Thread-safe: long answers are put into JSON, and so kept, in threads.
    """

    def __init__(self, limit: int, where: str = "") -> None:
        """``limit``: bytes. ``where``: what an error adds about where else a response may be."""
        self.limit = limit
        self.used = 0
        self._where = where
        self._lock = threading.RLock()
        self._kept: dict[str, Stored] = {}
        self._by_key: dict[int, OrderedDict[str, Stored]] = {}
        """Responses of each key, those not used for the longest time first. No entry is empty."""
        self._used: dict[int, int] = {}
        """Bytes of each key."""
        self._owner: dict[str, str] = {}
        """The response of each output item."""

    def add(self, stored: Stored) -> None:
        """Keeps a response, if it fits at all."""
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
        """The response of this id, if it was made with ``key``. Raises NotFound."""
        with self._lock:
            stored = self._find(id, key, "response_id", "response_not_found")
            self._touch(stored)
            return stored

    def remove(self, id: str, key: int) -> None:
        """Removes the response of this id, if it was made with ``key``. Raises NotFound."""
        with self._lock:
            self._forget(self._find(id, key, "response_id", "response_not_found"))

    def chain(self, id: str, key: int) -> list[Stored]:
        """The response and all that it goes on from, oldest first. Raises NotFound where one is gone."""
        links: list[Stored] = []
        at: str | None = id
        with self._lock:
            while at is not None:
                links.append(self._find(at, key, "previous_response_id", "previous_response_not_found"))
                at = links[-1].previous
            self._touch(links[0])
        return links[::-1]

    def owners(self, items: Iterable[str], key: int) -> list[Stored]:
        """The responses that have these output items, as far as they are here and were made with ``key``."""
        with self._lock:
            found = {self._owner.get(item) for item in items}
            kept = (self._kept[owner] for owner in found if owner is not None)
            return [stored for stored in kept if stored.key == key]

    def _forget(self, stored: Stored) -> None:
        del self._kept[stored.id]
        del self._by_key[stored.key][stored.id]
        self._used[stored.key] -= stored.size
        if not self._by_key[stored.key]:
            del self._by_key[stored.key], self._used[stored.key]
        for item in stored.output_ids:
            self._owner.pop(item, None)
        self.used -= stored.size

    def _find(self, id: str, key: int, param: str, code: str) -> Stored:
        stored = self._kept.get(id)
        if stored is None or stored.key != key:
            raise NotFound(
                f"the response {printable(id, 64)} is not stored here: it never was (store: false), was "
                f"deleted, or made room for newer ones (--responses-store-bytes){self._where}",
                param=param,
                code=code,
            )
        return stored

    def _touch(self, stored: Stored) -> None:
        """It is used, and so is all that it goes on from, which is to stay longer."""
        at: Stored | None = stored
        while at is not None and at.id in self._kept:
            self._by_key[at.key].move_to_end(at.id)
            at = None if at.previous is None else self._kept.get(at.previous)


def history(chain: Iterable[Stored], owners: Iterable[Stored], wanted: Iterable[str]) -> History:
    """What a request refers to: the items of ``chain``, and the ``wanted`` ones of ``owners``."""
    names = set(wanted)
    found = {item["id"]: item for stored in owners for item in stored.items() if item.get("id") in names}
    return History(items=[item for stored in chain for item in stored.items()], referenced=found)
