"""The memory that images of live requests take, bounded."""

from __future__ import annotations

from types import TracebackType

from weft.common.errors import InvalidRequest, Overloaded


class MediaMemory:
    """Of one front. Used from its event loop."""

    def __init__(self, most: int) -> None:
        """``most``: bytes."""
        self.most = most
        self.used = 0

    def lease(self) -> Lease:
        """What one request will take: nothing so far."""
        return Lease(self)


class Lease:
    """The part of one request, until it is closed."""

    def __init__(self, memory: MediaMemory) -> None:
        self._memory = memory
        self.size = 0

    def take(self, size: int) -> None:
        """``size`` bytes more. Raises Overloaded when there is no room now, InvalidRequest when never."""
        memory = self._memory
        if self.size + size > memory.most:
            raise InvalidRequest(
                f"the request's images take more than {memory.most} bytes (--media-memory); send fewer or "
                "smaller ones",
                code="image_too_large",
            )
        if memory.used + size > memory.most:
            raise Overloaded("the server has no memory left for this request's images; try again later")
        memory.used += size
        self.size += size

    def give(self, size: int) -> None:
        """``size`` bytes of what was taken are free again."""
        self._memory.used -= size
        self.size -= size

    def close(self) -> None:
        """All of it is. Idempotent."""
        self.give(self.size)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
