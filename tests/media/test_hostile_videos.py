"""Hostile video files end within limits and harm no other client."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.media.test_hostile_images import run
from tests.support.films import film, pictures
from tests.support.pictures import FACTS, image_file
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest, Overloaded, WeftError
from weft.config.sections.media_section import MediaSection
from weft.media.decode import key_of
from weft.media.headers import read_header
from weft.media.pictures import FileToFetch, Frame, Picture, Pictures
from weft.media.service import MediaService
from weft.media.video import groups_of, header_of
from weft.media.video_header import BadVideo

WHERE = "messages[0].content[1]"
MOST = 1 << 22


def wanted(file: bytes, name: str = "video 1") -> FileToFetch:
    return FileToFetch(url=name, where=WHERE, data=memoryview(file))


def groups(file: bytes, numbers: list[int], name: str = "video 1") -> list[Picture]:
    header = header_of(file, MOST)
    frames = [Frame(where=WHERE, header=header, url=name, number=number) for number in numbers]
    return Pictures(FACTS, MediaSection()).groups(frames, WHERE)


def picture() -> Picture:
    file = image_file()
    frame = Frame(where="image", header=read_header(file), data=memoryview(file))
    return Pictures(FACTS, MediaSection()).fitted(frame)[0]


@functools.cache
def long_film() -> bytes:
    """Return a file that takes about half a second of CPU time to decode."""
    noise = np.random.default_rng(1).integers(0, 256, (480, 640, 3), np.uint8)
    frames = [np.roll(noise, 9 * number, axis=1) for number in range(24)]
    return film(frames, rate=24, preset="ultrafast", g="1")


def test_groups_and_images_come_in_order_in_shared_memory() -> None:
    file, other = film(20), film(9, "vp9")

    async def work(media: MediaService) -> None:
        files = await _fetched(media, {"video 1": file, "video 2": other})
        chosen = [*groups(file, [0, 7, 19]), picture(), *groups(other, [1, 8], "video 2")]
        with media.memory.lease(1) as lease:
            items = await media.decode(chosen, files, lease, 1)
            target = chosen[0].target
            header = header_of(file, MOST)
            due = list(groups_of(file, header, [[0, 7], [19]], target, MOST))
            assert [bytes(item.pixels) for item in items[:2]] == due
            assert [item.key for item in items[:2]] == [key_of(pixels, target) for pixels in due]
            assert [item.count for item in items] == [one.count for one in chosen]
            assert all(item.shared is not None for item in items)
            assert media.memory.descriptors == 4
        assert (media.memory.used, media.memory.descriptors) == (0, 0)

    run(work)


async def _fetched(media: MediaService, files: dict[str, bytes]) -> dict[str, memoryview]:
    with media.memory.lease() as lease:
        return await media.fetch([wanted(file, name) for name, file in files.items()], lease)


def test_pixels_come_in_the_reply_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    file = film(20)

    async def work(media: MediaService) -> None:
        monkeypatch.setattr(media.memory, "share", lambda size: None)
        with media.memory.lease(1) as lease:
            items = await media.decode(groups(file, [0, 7, 19]), {"video 1": memoryview(file)}, lease, 1)
            chosen = groups(file, [0, 7, 19])
            due = groups_of(file, header_of(file, MOST), [[0, 7], [19]], chosen[0].target, MOST)
            assert [bytes(item.pixels) for item in items] == list(due)
            assert all(item.shared is None for item in items)

    run(work)


@pytest.mark.requirement("F23")
def test_a_decode_that_takes_too_much_cpu_time_is_that_videos_error() -> None:
    file = long_film()
    chosen = groups(file, [0, 23])

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            with pytest.raises(
                InvalidRequest, match=r"0\.02 seconds to decode \(--video-timeout\)"
            ) as caught:
                await media.decode(chosen, {"video 1": memoryview(file)}, lease)
            assert caught.value.param == WHERE
            assert caught.value.error_code == "video_too_large"
            items = await media.decode([picture()], {}, lease)
            assert items[0].pixels

    run(work, video_timeout=0.02)


@pytest.mark.requirement("F23")
def test_videos_leave_the_decoders_of_images_free() -> None:
    """While one client decodes videos, images of the same client and videos of another are decoded."""
    file, small = long_film(), film(4)

    async def work(media: MediaService) -> None:
        with media.memory.lease(0) as first, media.memory.lease(1) as second:
            flood = [
                asyncio.ensure_future(
                    media.decode(groups(file, [0, 23]), {"video 1": memoryview(file)}, first, 0)
                )
                for _ in range(8)
            ]
            await asyncio.sleep(0)
            await media.decode([picture()], {}, second, 0)
            await media.decode(groups(small, [0, 3]), {"video 1": memoryview(small)}, second, 1)
            assert not flood[-1].done()
            await asyncio.gather(*flood)

    run(work)


@pytest.mark.requirement("F23")
def test_the_death_of_a_process_fails_one_video() -> None:
    file, small = long_film(), film(4)

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            task = asyncio.ensure_future(
                media.decode(groups(file, [0, 23]), {"video 1": memoryview(file)}, lease)
            )
            until = time.monotonic() + deadline(20)
            while not (found := _children()) and time.monotonic() < until:
                await asyncio.sleep(0.01)
            os.kill(found[0], signal.SIGKILL)
            with pytest.raises(WeftError, match="the server failed on this video"):
                await task
            items = await media.decode(groups(small, [0, 3]), {"video 1": memoryview(small)}, lease)
            assert len(items) == 1

    run(work)


def _children() -> list[int]:
    """Return the media workers that this process started."""
    tasks = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    return [int(task) for task in tasks if b"media_worker" in Path(f"/proc/{task}/cmdline").read_bytes()]


@pytest.mark.requirement("F23")
def test_files_count_in_the_memory_of_the_client() -> None:
    file = film(20)

    async def work(media: MediaService) -> None:
        with media.memory.lease(1) as lease, media.memory.lease(2) as other:
            await media.fetch([wanted(file)], lease, 1)
            assert media.memory.used == len(file)
            with pytest.raises(InvalidRequest, match="media-memory"):
                await media.fetch([wanted(bytes(1 << 20))], lease, 1)
            lease.take(400_000)
            with pytest.raises(Overloaded), media.memory.lease(1) as more:
                await media.fetch([wanted(bytes(200_000))], more, 1)
            other.take(1 << 17)

    run(work, media_memory=1 << 20)


@pytest.mark.requirement("F23")
def test_a_decoder_refuses_large_frames_itself() -> None:
    file = film(pictures(3, (1100, 1000)), preset="ultrafast")
    chosen = groups(file, [0, 2])

    async def work(media: MediaService) -> None:
        with (
            media.memory.lease() as lease,
            pytest.raises(InvalidRequest, match="pixels; the limit") as caught,
        ):
            await media.decode(chosen, {"video 1": memoryview(file)}, lease)
        assert caught.value.param == WHERE

    run(work, max_image_pixels=1 << 20)


@pytest.mark.requirement("F23")
def test_no_frame_above_the_limit_is_decoded_while_a_file_is_opened() -> None:
    file = film(2, "gif")
    assert header_of(file, 64 * 48).frames == 2
    with pytest.raises(BadVideo, match=r"without a size, or of more than 3071 pixels") as caught:
        header_of(file, 64 * 48 - 1)
    assert caught.value.code == "video_too_large"


def test_headers_are_read_in_a_process() -> None:
    file = film(20, "vp9", turn=0)

    async def work(media: MediaService) -> None:
        found = await media.videos.headers(
            [wanted(file), FileToFetch("a", "b")], {"video 1": memoryview(file)}
        )
        assert found == {"video 1": header_of(file, MOST)}
        assert media.processes == 1
        bad = file[:100]
        with pytest.raises(InvalidRequest, match=r"content\[1\]: the video .*damaged or cut off") as caught:
            await media.videos.headers([wanted(bad)], {"video 1": memoryview(bad)})
        assert caught.value.error_code == "invalid_video"

    run(work)
