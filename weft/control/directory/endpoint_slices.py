"""The addresses of a headless Service of Kubernetes, from the events of a watch over EndpointSlices. Pure.

Source: the API reference of Kubernetes, discovery.k8s.io/v1, and "Efficient detection of changes".
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

MOST_LINE = 8 << 20
"""Maximum bytes of one event."""


class Endpoint(NamedTuple):
    """A pod of the service."""

    address: str
    port: int


class SliceEvent(msgspec.Struct):
    """One line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: Any


class SliceList(msgspec.Struct):
    """The answer to a list."""

    metadata: dict[str, Any]
    items: list[dict[str, Any]]


class Expired(Exception):
    """The watch is too old: list again."""


class EndpointSlices:
    """All EndpointSlices of one service."""

    def __init__(self, port: str) -> None:
        """``port``: name of the port whose number counts."""
        self._port = port
        self._slices: dict[str, list[Endpoint]] = {}
        self.version = ""
        """Resource version from which the next watch begins; "" before the first list."""
        self._rest = b""
        """The beginning of an event whose end has not come yet."""

    @property
    def endpoints(self) -> list[Endpoint]:
        """All pods, in order, each once. A pod that is not ready is included: the record of the group says
        what the group does."""
        return sorted({one for found in self._slices.values() for one in found})

    def relist(self, data: bytes) -> None:
        """Replace everything by a list. Raise ValueError for an answer that is no list."""
        found = msgspec.json.decode(data, type=SliceList)
        self._slices = {str(one["metadata"]["name"]): self._read(one) for one in found.items}
        self.version = str(found.metadata.get("resourceVersion", ""))
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Apply the next bytes of a watch; events may be cut anywhere.

        Raise Expired if the server cannot go on from this version. Raise ValueError for invalid events.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_LINE:
            raise ValueError("an event is too large")
        for line in lines:
            if line.strip():
                self._apply(msgspec.json.decode(line, type=SliceEvent))

    def reconnect(self) -> None:
        """Forget a half event: a new watch begins at ``version``."""
        self._rest = b""

    def _apply(self, event: SliceEvent) -> None:
        if event.type == "ERROR":
            code = event.object.get("code") if isinstance(event.object, dict) else None
            if code == 410:
                raise Expired
            raise ValueError(f"the watch failed: {event.object}")
        metadata = event.object["metadata"]
        if event.type == "DELETED":
            self._slices.pop(str(metadata["name"]), None)
        elif event.type != "BOOKMARK":
            self._slices[str(metadata["name"])] = self._read(event.object)
        self.version = str(metadata["resourceVersion"])

    def _read(self, one: dict[str, Any]) -> list[Endpoint]:
        """Return the pods of a slice. A slice without the port has none."""
        numbers = [port["port"] for port in one.get("ports") or () if port.get("name") == self._port]
        if not numbers or numbers[0] is None:
            return []
        found = []
        for endpoint in one.get("endpoints") or ():
            addresses = endpoint.get("addresses") or ()
            found += [Endpoint(str(address), int(numbers[0])) for address in addresses[:1]]
        return found
