"""The memory that images of live requests take, bounded, and the descriptors by which others open it."""

from __future__ import annotations

from types import TracebackType

from weft.common.errors import InvalidRequest, Overloaded
from weft.common.log import get_logger
from weft.common.shared_bytes import SharedBytes, most_descriptors

log = get_logger(__name__)


class MediaMemory:
    """Memory of the images of one front. Used from its event loop."""

    def __init__(self, most: int, *, apart: bool = False) -> None:
        """``most``: bytes. ``apart``: clients are told apart, and share them."""
        self.most = most
        self.used = 0
        self._apart = apart
        self._used_by: dict[int, int] = {}
        """Bytes of each client that has some."""
        self.descriptors = 0
        """Open ones of shared memory."""
        self._scarce = False

    @property
    def most_of_client(self) -> int:
        """Bytes that one client may take where nobody else has any."""
        return self.most // 2 if self._apart else self.most

    def lease(self, client: int = 0) -> Lease:
        """What one request of a client will take: nothing so far."""
        return Lease(self, client)

    def has_room(self, client: int, size: int) -> bool:
        """True where ``client`` may take ``size`` bytes more.

        A client has at most as many bytes as stay free: one client alone gets a half, two get a third each.
        So there is always room for one more client, and nobody has to say how many clients there are.
        """
        free = self.most - self.used - size
        return free >= (self._used_by.get(client, 0) + size if self._apart else 0)

    def add(self, client: int, size: int) -> None:
        """Count ``size`` bytes, which may be negative, as the client's."""
        self.used += size
        left = self._used_by.get(client, 0) + size
        self._used_by[client] = left
        if not left:
            del self._used_by[client]

    def share(self, size: int) -> SharedBytes | None:
        """Shared memory, which counts as a descriptor; None where there is none to spare."""
        try:
            made = SharedBytes(size) if self.descriptors < most_descriptors() else None
        except OSError:
            made = None
        self.descriptors += made is not None
        if made is None and not self._scarce:
            log.warning("images are sent to engines, not shown: descriptors are scarce (ulimit -n)")
        self._scarce = made is None
        return made


class Lease:
    """The part of one request, until it is closed."""

    def __init__(self, memory: MediaMemory, client: int) -> None:
        self._memory = memory
        self._client = client
        self.size = 0
        self._shared: list[SharedBytes] = []

    def take(self, size: int) -> None:
        """``size`` bytes more. Raises Overloaded when there is no room now, InvalidRequest when never."""
        memory = self._memory
        if self.size + size > memory.most_of_client:
            raise InvalidRequest(
                f"the request's images take more than {memory.most_of_client} bytes (--media-memory); send "
                "fewer or smaller ones",
                code="image_too_large",
            )
        if not memory.has_room(self._client, size):
            raise Overloaded("the server has no memory left for this request's images; try again later")
        memory.add(self._client, size)
        self.size += size

    def give(self, size: int) -> None:
        """``size`` bytes of what was taken are free again."""
        self._memory.add(self._client, -size)
        self.size -= size

    def share(self, size: int) -> SharedBytes | None:
        """For ``size`` bytes of what was taken: shared memory, closed with the lease. None: descriptors are
        scarce, and these bytes are to be kept otherwise."""
        made = self._memory.share(size)
        if made is not None:
            self._shared.append(made)
        return made

    def close(self) -> None:
        """All of it is; what was shared can be opened no more. Idempotent."""
        self.give(self.size)
        self._memory.descriptors -= len(self._shared)
        for one in self._shared:
            one.close()
        self._shared.clear()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
