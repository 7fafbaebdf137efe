"""The video workers of an API server: separate from the image workers, so that images never wait for
videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from weft.common.errors import DeadlineExceeded, WeftError
from weft.common.workers import CpuSpent, WorkerDied, WorkerPool
from weft.config.sections.media_section import MediaSection
from weft.media.media_errors import BadMedia
from weft.media.media_items import items_of
from weft.media.media_memory import MediaLease
from weft.media.media_messages import DecodeVideo, MediaDone, ReadVideo, packed, video_result_of
from weft.media.pictures import FileToFetch, Picture, work_of
from weft.media.video_header import VIDEO_TOO_LARGE, BadVideo, VideoHeader
from weft.types.media_item import MediaItem


class VideoService:
    """Reads and decodes video files in worker processes. Used from one event loop. Clients share the
    processes equally, counted in decoded pixels and bytes."""

    def __init__(self, section: MediaSection, pool: WorkerPool) -> None:
        """``pool``: processes with ``section.video_timeout`` seconds for a task. The caller closes the
        pool."""
        self._section = section
        self._pool = pool

    async def headers(
        self, wanted: Sequence[FileToFetch], files: Mapping[str, memoryview], client: int = 0
    ) -> dict[str, VideoHeader]:
        """Return name -> header of each video file in ``wanted``. ``files``: name -> file. Raises
        InvalidRequest with the part for an unusable file, or another WeftError."""
        found = {}
        # One after another, so that a request with many files takes only one process.
        for one in wanted:
            if one.is_video:
                file = files[one.url]
                done, _ = await self._call(
                    one.where, packed(ReadVideo()), file, client=client, cost=len(file)
                )
                if done.header is None:
                    raise _failed(one.where)
                found[one.url] = done.header
        return found

    async def decode(
        self, groups: Sequence[Picture], file: memoryview, lease: MediaLease, client: int = 0
    ) -> list[MediaItem]:
        """Decode the frame groups of one video file to media items, in order. The pixels, already taken from
        ``lease``, are in shared memory where possible. Raises WeftError with the part of the request."""
        where = groups[0].where
        header = groups[0].frames[0].header
        assert isinstance(header, VideoHeader)
        numbers = tuple(tuple(frame.number for frame in group.frames) for group in groups)
        shared = [lease.share(group.nbytes) for group in groups]
        task = DecodeVideo(
            header=header,
            groups=numbers,
            target=groups[0].target,
            into=tuple(None if one is None else one.name for one in shared),
        )
        # Frames up to the last chosen frame are decoded. A small frame may be enlarged to the model's size.
        work = max(header.work * (numbers[-1][-1] + 1), sum(work_of([group]) for group in groups))
        cost = float(work + len(file))
        done, rest = await self._call(where, packed(task), file, client=client, cost=cost)
        try:
            return items_of(groups, shared, done, rest)
        except (OSError, ValueError):
            raise _failed(where) from None

    async def _call(
        self, where: str, *payload: bytes | memoryview, client: int, cost: float
    ) -> tuple[MediaDone, memoryview]:
        """Run one task and return (reply, bytes behind the reply). Raises InvalidRequest with the part for an
        error of the video, WeftError with the part if the worker dies, and the pool's own errors."""
        try:
            return video_result_of(await self._pool.call(*payload, client=client, cost=cost))
        except BadMedia as error:
            raise error.at(where) from None
        except (CpuSpent, DeadlineExceeded):
            late = BadVideo(
                f"takes more than {self._section.video_timeout:g} seconds to decode (--video-timeout); send "
                "a shorter or smaller video",
                VIDEO_TOO_LARGE,
            )
            raise late.at(where) from None
        # A reply that cannot be decoded is a server error, not an error of the video.
        except (WorkerDied, ValueError, msgspec.DecodeError):
            raise _failed(where) from None


def _failed(where: str) -> WeftError:
    """Return the error of a failure inside the server."""
    return WeftError(f"{where}: the server failed on this video", param=where, code="video_failed")
