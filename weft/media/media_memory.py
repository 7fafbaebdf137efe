"""Bounded memory for the images of live requests, and the descriptors of shared memory."""

from __future__ import annotations

from types import TracebackType

from weft.common.errors import InvalidRequest, Overloaded
from weft.common.log import get_logger
from weft.common.shared_bytes import SharedBytes, most_descriptors

log = get_logger(__name__)


class MediaMemory:
    """Memory of the images of one API server. Used from its event loop."""

    def __init__(self, most: int, *, per_client: bool = False) -> None:
        """``most``: limit in bytes. ``per_client``: also limit each client, see ``has_room``."""
        self.most = most
        self.used = 0
        self._per_client = per_client
        self._used_by: dict[int, int] = {}
        """Bytes by client, for clients with any."""
        self.descriptors = 0
        """Number of open descriptors of shared memory."""
        self._scarce = False

    @property
    def most_of_client(self) -> int:
        """Maximum bytes of one client if no other client uses any."""
        return self.most // 2 if self._per_client else self.most

    def lease(self, client: int = 0) -> MediaLease:
        """Return an empty lease for one request of a client."""
        return MediaLease(self, client)

    def has_room(self, client: int, size: int) -> bool:
        """Return True if ``client`` may take ``size`` more bytes.

        With ``per_client``, the use of a client never exceeds the free bytes. A single client gets at most a
        half, and two clients at most a third each. Another client therefore always finds free memory.
        """
        free = self.most - self.used - size
        return free >= (self._used_by.get(client, 0) + size if self._per_client else 0)

    def add(self, client: int, size: int) -> None:
        """Add ``size`` bytes (may be negative) to the client's use, without a check of the limit."""
        self.used += size
        left = self._used_by.get(client, 0) + size
        self._used_by[client] = left
        if not left:
            del self._used_by[client]

    def share(self, size: int) -> SharedBytes | None:
        """Return shared memory of ``size`` bytes, and count its descriptor; None if descriptors or shared
        memory are scarce. Logs one warning per shortage. The caller closes the memory and reduces
        ``descriptors``."""
        try:
            made = SharedBytes(size) if self.descriptors < most_descriptors() else None
        except OSError:
            made = None
        self.descriptors += made is not None
        # Warn once per shortage.
        if made is None and not self._scarce:
            log.warning(
                "images are copied to engines, not shared, because file descriptors are scarce (ulimit -n)"
            )
        self._scarce = made is None
        return made


class MediaLease:
    """The memory of one request, until ``close``."""

    def __init__(self, memory: MediaMemory, client: int) -> None:
        self._memory = memory
        self._client = client
        self.size = 0
        self._shared: list[SharedBytes] = []

    def take(self, size: int) -> None:
        """Take ``size`` more bytes. Raises Overloaded if the memory is in use, and InvalidRequest if the
        request exceeds the limit. After an error, nothing is taken."""
        memory = self._memory
        if self.size + size > memory.most_of_client:
            raise InvalidRequest(
                f"the request's images need more than {memory.most_of_client} bytes (--media-memory); send "
                "fewer or smaller images",
                code="image_too_large",
            )
        if not memory.has_room(self._client, size):
            raise Overloaded("the server has no free memory for this request's images; try again later")
        memory.add(self._client, size)
        self.size += size

    def give(self, size: int) -> None:
        """Return ``size`` taken bytes."""
        self._memory.add(self._client, -size)
        self.size -= size

    def share(self, size: int) -> SharedBytes | None:
        """Return shared memory for ``size`` bytes already taken; the lease closes the memory. Return None if
        descriptors are scarce.
        """
        made = self._memory.share(size)
        if made is not None:
            self._shared.append(made)
        return made

    def close(self) -> None:
        """Return all bytes and close the shared memory. Engines cannot open it afterwards. Idempotent."""
        self.give(self.size)
        self._memory.descriptors -= len(self._shared)
        for one in self._shared:
            one.close()
        self._shared.clear()

    def __enter__(self) -> MediaLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
