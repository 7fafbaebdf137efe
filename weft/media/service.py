"""A front's media workers: files are fetched and decoded in processes of their own, off the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from weft.common.errors import DeadlineExceeded, WeftError
from weft.common.workers import CpuSpent, WorkerDied, WorkerPool, most_of_client
from weft.config.media_section import MediaSection
from weft.media.decode import can_decode, missing
from weft.media.errors import TOO_LARGE, UNREACHABLE, BadMedia
from weft.media.memory import Lease, MediaMemory
from weft.media.messages import Decode, DecodeFile, Fetch, WorkerRules, packed, result_of
from weft.media.pictures import Picture, Wanted
from weft.types.media import MediaItem

T = TypeVar("T")

COMMAND: Sequence[str] = (sys.executable, "-m", "weft.media.worker")
FETCHERS = 8
"""Processes that fetch. Each waits for one server at a time, which may be slow."""
SLACK = 512 << 20
"""Bytes that a worker may map beside what its image takes."""
BYTES_A_PIXEL = 24
"""Of a transparent image: decoded, turned, on white, without its transparency; and the file."""
MOST_FRAMES = 2
"""That are decoded together: what models with videos take as a group."""
CPU_S = 10.0
"""Seconds of CPU time of one task, for images of up to ``CPU_PIXELS``; more in proportion. The dearest file
of that size took 2.0 s on a busy core of a Zen 4."""
CPU_PIXELS = 64 << 20
LATE_S = 5.0
"""Seconds after a worker's own deadline in which it must say so; then it is ended."""


class MediaService:
    """Fetches and decodes images in worker processes. Used from one event loop. ``close`` ends it. Processes
    start when there is work for them.
    """

    def __init__(self, section: MediaSection, *, apart: bool = False) -> None:
        """``apart``: clients are told apart. No client gets all processes, nor all memory."""
        self._section = section
        self._apart = apart
        self.memory = MediaMemory(section.media_memory, apart=apart)
        files = MOST_FRAMES * section.max_image_bytes
        pixels = SLACK + BYTES_A_PIXEL * section.max_image_pixels + 2 * files
        self._decoders = self._pool(section.media_workers, pixels)
        self._fetchers = self._pool(FETCHERS, SLACK + 4 * section.max_image_bytes)

    def _pool(self, most: int, memory: int) -> WorkerPool:
        section = self._section
        rules = WorkerRules(
            most_bytes=section.max_image_bytes,
            memory=memory,
            seconds=section.media_timeout,
            allowed=section.allowed_media_domains,
        )
        command = (*COMMAND, str(self._cpu_seconds))
        seconds = section.media_timeout + LATE_S
        each = most_of_client(most) if self._apart else 0
        return WorkerPool(command, msgspec.msgpack.encode(rules), most, seconds, each)

    @property
    def _cpu_seconds(self) -> float:
        """CPU time of one task."""
        return max(CPU_S * self._section.max_image_pixels / CPU_PIXELS, CPU_S)

    async def fetch(self, wanted: Sequence[Wanted], lease: Lease, client: int = 0) -> dict[str, memoryview]:
        """Files by their URLs, which count as ``lease``, each as the largest one until it is here: so there
        are no more at a time than processes. Raises WeftError, naming the part. ``client``: who asks; clients
        share the processes equally, counted in files."""
        few = asyncio.Semaphore(FETCHERS)
        files = await _all(self._fetch(one, lease, few, client) for one in wanted)
        return {one.url: file for one, file in zip(wanted, files, strict=True)}

    async def _fetch(self, wanted: Wanted, lease: Lease, few: asyncio.Semaphore, client: int) -> memoryview:
        async with few:
            lease.take(self._section.max_image_bytes)
            task = packed(Fetch(url=wanted.url))
            _, file = await self._call(self._fetchers, [wanted.where], task, client=client)
            lease.give(self._section.max_image_bytes - len(file))
        return file

    async def decode(
        self,
        pictures: Sequence[Picture],
        files: Mapping[str, memoryview],
        lease: Lease,
        client: int = 0,
    ) -> tuple[MediaItem, ...]:
        """The pixels, which count as ``lease``, in memory that engines of this host can open while it lasts.
        No more images wait for a process than there are processes: so what the pool may have waiting is a
        bound of requests, whatever images each has. ``client``: whose images these are; clients share the
        processes equally, counted in pixels, scans and bytes. Raises WeftError, naming the part."""
        if not can_decode():
            raise missing().at(pictures[0].where)
        lease.take(sum(picture.nbytes for picture in pictures))
        few = asyncio.Semaphore(self._section.media_workers)

        async def one(picture: Picture) -> MediaItem:
            async with few:
                return await self._decode(picture, files, lease, client)

        return tuple(await _all(map(one, pictures)))

    async def _decode(
        self, picture: Picture, files: Mapping[str, memoryview], lease: Lease, client: int
    ) -> MediaItem:
        shared = lease.share(picture.nbytes)
        into = None if shared is None else shared.name
        data = [files[frame.url] if frame.url else frame.data for frame in picture.frames]
        each = zip(picture.frames, data, strict=True)
        sizes = tuple(DecodeFile(header=frame.header, size=len(file)) for frame, file in each)
        task = packed(Decode(files=sizes, target=picture.target, into=into))
        places = [frame.where for frame in picture.frames]
        cost = float(sum(frame.header.work for frame in picture.frames) + sum(map(len, data)))
        key, pixels = await self._call(self._decoders, places, task, *data, client=client, cost=cost)
        if shared is not None and not len(pixels):
            try:
                pixels = shared.seal()
            except OSError:
                raise _failed(picture.where) from None
        else:
            into = None
        if len(pixels) != picture.nbytes:
            raise _failed(picture.where)
        return MediaItem(
            key=key,
            start=picture.start,
            count=picture.count,
            grid=picture.grid,
            pixels=cast(bytes, pixels),  # a copy of megabytes would hold the event loop up
            shared=into,
        )

    async def _call(
        self,
        pool: WorkerPool,
        places: Sequence[str],
        *payload: bytes | memoryview,
        client: int = -1,
        cost: float = 1.0,
    ) -> tuple[bytes, memoryview]:
        """``places``: of each frame, for errors."""
        try:
            return result_of(await pool.call(*payload, client=client, cost=cost))
        except BadMedia as error:
            raise error.at(places[error.frame if error.frame < len(places) else 0]) from None
        except CpuSpent:
            spent = BadMedia(
                f"takes more than {self._cpu_seconds:g} seconds of CPU time to read; send a smaller one, or "
                "save it as a plain PNG or JPEG",
                TOO_LARGE,
            )
            raise spent.at(places[0]) from None
        except DeadlineExceeded:
            late = BadMedia(f"took longer than {self._section.media_timeout:g} seconds", UNREACHABLE)
            raise late.at(places[0]) from None
        except (WorkerDied, ValueError, msgspec.DecodeError):
            raise _failed(places[0]) from None

    @property
    def processes(self) -> int:
        """How many live."""
        return self._decoders.processes + self._fetchers.processes

    async def close(self) -> None:
        """Ends every process; who waits gets Unavailable."""
        await asyncio.gather(self._decoders.close(), self._fetchers.close())


def _failed(where: str) -> WeftError:
    return WeftError(f"{where}: the server failed on this image", param=where, code="image_failed")


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
