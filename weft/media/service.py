"""The media workers of an API server: separate processes fetch and decode files."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from weft.common.errors import DeadlineExceeded, WeftError
from weft.common.workers import CpuSpent, WorkerDied, WorkerPool, most_of_client
from weft.config.sections.media_section import MediaSection
from weft.media.decode import can_decode, missing
from weft.media.headers import ImageHeader
from weft.media.media_errors import TOO_LARGE, UNREACHABLE, BadMedia
from weft.media.media_items import items_of
from weft.media.media_memory import MediaLease, MediaMemory
from weft.media.media_messages import Decode, DecodeFile, Fetch, MediaDone, WorkerRules, packed, result_of
from weft.media.pictures import FileToFetch, Picture, runs_of, work_of
from weft.media.video_header import VideoHeader, of_video
from weft.media.video_service import VideoService
from weft.types.media_item import MediaItem

T = TypeVar("T")

COMMAND: Sequence[str] = (sys.executable, "-m", "weft.media.media_worker")
FETCHERS = 8
"""Maximum fetch processes. Each process waits for one remote server at a time."""
SLACK = 512 << 20
"""Bytes a worker may map in addition to the memory for its image."""
BYTES_A_PIXEL = 24
"""Decoding memory per pixel, for the worst case (a transparent, turned image), file included."""
MOST_FRAMES = 2
"""Maximum frames decoded together: the frame group of video models."""
CPU_S = 10.0
"""CPU seconds of one task for images of up to ``CPU_PIXELS``; larger limits scale in proportion. The slowest
file of ``CPU_PIXELS`` took 2.0 s on a busy Zen 4 core.
"""
CPU_PIXELS = 64 << 20
LATE_S = 5.0
"""Seconds after a worker's own deadline before the pool ends the worker."""


class MediaService:
    """Fetches and decodes images in worker processes. Used from one event loop. The owner must call
    ``close``.

    Processes start on demand.
    """

    def __init__(self, section: MediaSection, *, per_client: bool = False) -> None:
        """``per_client``: limit each client, so that no client takes all processes or all memory."""
        self._section = section
        self._per_client = per_client
        self.memory = MediaMemory(section.media_memory, per_client=per_client)
        files = MOST_FRAMES * section.max_image_bytes
        pixels = SLACK + BYTES_A_PIXEL * section.max_image_pixels + 2 * files
        self._decoders = self._pool(section.media_workers, pixels, section.media_timeout, self._cpu_seconds)
        largest = max(section.max_image_bytes, section.max_video_bytes)
        fetching = SLACK + 4 * largest
        self._fetchers = self._pool(FETCHERS, fetching, section.media_timeout, self._cpu_seconds)
        frames = SLACK + BYTES_A_PIXEL * section.max_image_pixels + 2 * section.max_video_bytes
        seconds = section.video_timeout
        self._video_decoders = self._pool(section.media_workers, frames, seconds, seconds, videos=True)
        self.videos = VideoService(section, self._video_decoders)

    def _pool(
        self, most: int, memory: int, seconds: float, cpu_seconds: float, *, videos: bool = False
    ) -> WorkerPool:
        """Return a pool of at most ``most`` processes, each with ``memory`` bytes, ``seconds`` and
        ``cpu_seconds`` for a task. No process is started yet. ``videos``: the processes decode videos."""
        section = self._section
        rules = WorkerRules(
            most_bytes=section.max_image_bytes,
            memory=memory,
            seconds=section.media_timeout,
            allowed=section.allowed_media_domains,
            videos=videos,
            most_pixels=section.max_image_pixels,
        )
        command = (*COMMAND, str(cpu_seconds))
        each = most_of_client(most) if self._per_client else 0
        return WorkerPool(command, msgspec.msgpack.encode(rules), most, seconds + LATE_S, each)

    @property
    def _cpu_seconds(self) -> float:
        """CPU seconds of one task."""
        return max(CPU_S * self._section.max_image_pixels / CPU_PIXELS, CPU_S)

    async def fetch(
        self, wanted: Sequence[FileToFetch], lease: MediaLease, client: int = 0
    ) -> dict[str, memoryview]:
        """Fetch files and return URL -> file. The files count in ``lease``.

        Each running fetch reserves the maximum file size. To bound this memory, at most ``FETCHERS``
        fetches of one request run at a time. ``client``: clients share the processes equally, counted in
        files. Raises InvalidRequest with the part for a file that cannot be fetched, Overloaded without
        memory or processes, or another WeftError; all other fetches are then cancelled.
        """
        limit = asyncio.Semaphore(FETCHERS)
        files = await _all(self._fetch(one, lease, limit, client) for one in wanted)
        return {one.url: file for one, file in zip(wanted, files, strict=True)}

    async def _fetch(
        self, wanted: FileToFetch, lease: MediaLease, limit: asyncio.Semaphore, client: int
    ) -> memoryview:
        """Fetch one file. Take the maximum size from ``lease`` first, and return the unused part
        afterwards. After an error, the whole size stays taken until the lease closes."""
        if wanted.is_video and not wanted.address:
            lease.take(len(wanted.data))
            return wanted.data
        section, video = self._section, wanted.is_video
        most = section.max_video_bytes if video else section.max_image_bytes
        async with limit:
            lease.take(most)
            task = packed(Fetch(url=wanted.address or wanted.url, video=video, most_bytes=most))
            _, file = await self._call(self._fetchers, [wanted.where], task, client=client, video=video)
            lease.give(most - len(file))
        return file

    async def decode(
        self,
        pictures: Sequence[Picture],
        files: Mapping[str, memoryview],
        lease: MediaLease,
        client: int = 0,
    ) -> tuple[MediaItem, ...]:
        """Decode ``pictures`` to media items. The pixels count in ``lease``.

        If possible, the pixels are in shared memory, which engines of this host can open until the lease
        closes. A request has at most ``media_workers`` images in the pool's queue, so that the queue bounds
        requests, not images. ``client``: clients share the processes equally, counted in pixels, scans
        and bytes. Raises WeftError with the part of the request.
        """
        if not can_decode():
            raise missing().at(pictures[0].where)
        lease.take(sum(picture.nbytes for picture in pictures))
        limit = asyncio.Semaphore(self._section.media_workers)

        async def one(run: list[Picture]) -> list[MediaItem]:
            """Decode all items of an image or of a video file."""
            first = run[0].frames[0]
            async with limit:
                if isinstance(first.header, VideoHeader):
                    return await self.videos.decode(run, files[first.url], lease, client)
                return await self._decode(run, files, lease, client)

        return tuple(itertools.chain.from_iterable(await _all(map(one, runs_of(pictures)))))

    async def _decode(
        self, run: Sequence[Picture], files: Mapping[str, memoryview], lease: MediaLease, client: int
    ) -> list[MediaItem]:
        """Decode the items of one image in a worker, in order. Pixels are in shared memory where possible,
        else in the items. Raises WeftError with the part of the request."""
        shared = [lease.share(picture.nbytes) for picture in run]
        frames = run[0].frames
        data = [files[frame.url] if frame.url else frame.data for frame in frames]
        each = zip(frames, data, strict=True)
        sizes = tuple(
            DecodeFile(header=cast(ImageHeader, frame.header), size=len(file)) for frame, file in each
        )
        task = Decode(
            files=sizes,
            targets=tuple(picture.target for picture in run),
            into=tuple(None if one is None else one.name for one in shared),
        )
        places = [frame.where for frame in frames]
        cost = float(work_of(run) + sum(map(len, data)))
        done, rest = await self._call(self._decoders, places, packed(task), *data, client=client, cost=cost)
        try:
            return items_of(run, shared, done, rest)
        except (OSError, ValueError):
            raise _failed(run[0].where) from None

    async def _call(
        self,
        pool: WorkerPool,
        places: Sequence[str],
        *payload: bytes | memoryview,
        client: int = -1,
        cost: float = 1.0,
        video: bool = False,
    ) -> tuple[MediaDone, memoryview]:
        """Run one task in ``pool`` and return (reply, bytes behind the reply). ``places``: the place of each
        frame in the request, for errors. ``cost``: the client's use of the pool. ``video``: the file is a
        video.

        Raises InvalidRequest with the place for an error of the image, WeftError with the place if the
        worker dies, and the pool's own errors, such as Overloaded.
        """
        try:
            return result_of(await pool.call(*payload, client=client, cost=cost))
        except BadMedia as error:
            error = of_video(error) if video else error
            raise error.at(places[error.frame if error.frame < len(places) else 0]) from None
        except CpuSpent:
            spent = BadMedia(
                f"takes more than {self._cpu_seconds:g} seconds of CPU time to read; send a smaller image, "
                "or save the image as a plain PNG or JPEG",
                TOO_LARGE,
            )
            raise spent.at(places[0]) from None
        except DeadlineExceeded:
            late = BadMedia(f"took longer than {self._section.media_timeout:g} seconds", UNREACHABLE)
            raise (of_video(late) if video else late).at(places[0]) from None
        # A reply that cannot be decoded is a server error, not an error of the image.
        except (WorkerDied, ValueError, msgspec.DecodeError):
            raise _failed(places[0]) from None

    @property
    def processes(self) -> int:
        """Number of live processes."""
        return self._decoders.processes + self._fetchers.processes + self._video_decoders.processes

    async def close(self) -> None:
        """End every process. Waiting callers get Unavailable."""
        await asyncio.gather(self._decoders.close(), self._fetchers.close(), self._video_decoders.close())


def _failed(where: str) -> WeftError:
    """Return the error of a failure inside the server."""
    return WeftError(f"{where}: the server failed on this image", param=where, code="image_failed")


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. After the first error, all other tasks are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
