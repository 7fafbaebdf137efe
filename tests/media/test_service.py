"""Media workers are real processes with bounded memory and a deadline; a failure names a single image."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.pictures import FACTS, image_file
from tests.support.slowness import deadline
from weft.common import workers
from weft.common.errors import InvalidRequest, Overloaded, WeftError
from weft.common.shared_bytes import SharedBytes, reaches
from weft.config.sections.media_section import MediaSection
from weft.media import decode, media_memory, service
from weft.media.headers import ImageHeader, read_header
from weft.media.pictures import FileToFetch, Frame, Picture, Pictures
from weft.media.service import MediaService
from weft.types.media_item import MediaItem

WHERE = "messages[0].content[1]"


def run(work: Callable[[MediaService], Coroutine[Any, Any, None]], **fields: Any) -> None:
    async def main() -> None:
        made = MediaService(MediaSection(**fields))
        try:
            await work(made)
        finally:
            await made.close()

    asyncio.run(asyncio.wait_for(main(), deadline(120)))


def picture(file: bytes, where: str = WHERE, **fields: Any) -> Picture:
    return Pictures(FACTS, MediaSection(**fields)).fitted(frame(file, where))[0]


def frame(file: bytes, where: str = WHERE, url: str = "") -> Frame:
    return Frame(where=where, header=read_header(file), url=url, data=memoryview(b"" if url else file))


def by_hand(one: Picture) -> MediaItem:
    (pixels,) = decode.group_pixels([(frame.data, frame.header) for frame in one.frames], [one.target])
    key = decode.key_of(pixels, one.target)
    return MediaItem(key=key, start=one.start, count=one.count, grid=one.grid, pixels=pixels)


def test_workers_make_what_is_made_by_hand() -> None:
    files = [image_file((64 + 9 * n, 200 - n), ("PNG", "JPEG", "WEBP")[n % 3], n) for n in range(9)]

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            pictures = [picture(file) for file in files]
            items = await media.decode(pictures, {}, lease)
            for one, item in zip(pictures, items, strict=True):
                assert bytes(item.pixels) == by_hand(one).pixels
                assert item.key == by_hand(one).key
                assert item.grid == one.grid
            assert media.memory.used == lease.size == sum(len(item.pixels) for item in items)
            assert media.processes == 2
        assert media.memory.used == 0

    run(work)


def test_many_images_of_few_requests_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting limit counts requests: here three, with eight images each."""
    monkeypatch.setattr(workers, "MAX_WAITING", 6)
    files = [image_file((64, 48), "PNG", n) for n in range(8)]

    async def work(media: MediaService) -> None:
        async def one() -> int:
            with media.memory.lease() as lease:
                return len(await media.decode([picture(file) for file in files], {}, lease))

        assert await asyncio.gather(one(), one(), one()) == [8, 8, 8]

    run(work)


def test_a_group_of_frames_is_one_task() -> None:
    """A group has one key for both frames; an error names the frame."""
    files = [image_file((90, 70), "JPEG", n) for n in range(3)]
    pictures = Pictures(FACTS, MediaSection())

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            frames = [frame(file, f"{WHERE}.video[{n}]") for n, file in enumerate(files)]
            whole, rest = pictures.groups(frames, WHERE)
            items = await media.decode([whole, rest], {}, lease)
            for one, item in zip((whole, rest), items, strict=True):
                assert bytes(item.pixels) == by_hand(one).pixels
                assert (item.key, item.grid) == (by_hand(one).key, one.grid)
            assert len(items[0].pixels) == 2 * len(items[1].pixels)
            swapped, _ = pictures.groups([frames[1], frames[0], frames[2]], WHERE)
            (other,) = await media.decode([swapped], {}, lease)
            assert other.key != items[0].key
            broken = msgspec.structs.replace(frames[1], data=frames[1].data[:500])
            with pytest.raises(InvalidRequest, match="damaged") as caught:
                await media.decode(pictures.groups([frames[0], broken], WHERE), {}, lease)
            assert caught.value.param == f"{WHERE}.video[1]"

    run(work)


@pytest.mark.requirement("D6")
@pytest.mark.parametrize("why", ["shown", "scarce"])
def test_pixels_are_in_memory_that_engines_can_open(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written there by the worker; as bytes where descriptors are scarce."""
    files = [image_file((64, 48), "PNG", n) for n in range(3)]
    if why == "scarce":
        monkeypatch.setattr(media_memory, "most_descriptors", lambda: 1)

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            pictures = [picture(file) for file in files]
            items = await media.decode(pictures, {}, lease)
            assert [bytes(item.pixels) for item in items] == [by_hand(one).pixels for one in pictures]
            shown = [item.shared for item in items if item.shared is not None]
            assert len(shown) == media.memory.descriptors == {"shown": 3, "scarce": 1}[why]
            for name in shown:
                assert reaches(name)
        assert media.memory.descriptors == 0
        assert not any(map(reaches, shown))
        assert bytes(items[0].pixels) == by_hand(pictures[0]).pixels

    run(work)


def test_a_worker_that_cannot_open_memory_answers_with_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(SharedBytes):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.name = msgspec.structs.replace(self.name, pid=1 << 30)

    monkeypatch.setattr(media_memory, "SharedBytes", Gone)

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            one = picture(image_file((64, 48), "PNG", 1))
            (item,) = await media.decode([one], {}, lease)
            assert bytes(item.pixels) == by_hand(one).pixels
            assert item.shared is None

    run(work)


def test_a_damaged_image_fails_alone() -> None:
    good, bad = image_file(seed=1), image_file(seed=2)

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            broken = picture(bad[: len(bad) // 2])
            found = await asyncio.gather(
                media.decode([broken], {}, lease),
                media.decode([picture(good)], {}, lease),
                return_exceptions=True,
            )
        assert isinstance(found[0], InvalidRequest)
        assert found[0].param == WHERE
        assert "damaged" in found[0].message
        assert not isinstance(found[1], BaseException)

    run(work)


@pytest.mark.slow
@pytest.mark.requirement("F23")
def test_a_process_that_dies_fails_one_image() -> None:
    huge = image_file((3000, 3000))

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            await media.decode([picture(image_file())], {}, lease)
            before = _children()
            dying = asyncio.create_task(media.decode([picture(huge)], {}, lease))
            await asyncio.sleep(0.05)
            for child in before:
                os.kill(child, signal.SIGKILL)
            with pytest.raises(WeftError) as caught:
                await dying
            assert caught.value.http_status == 500
            assert caught.value.param == WHERE
            assert WHERE in caught.value.message
            (item,) = await media.decode([picture(image_file())], {}, lease)
            assert item.pixels

    run(work, media_workers=1)


def _children() -> list[int]:
    """Return the media workers that this process started."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
            if int(fields[1]) == os.getpid() and b"media.media_worker" in command:
                found.append(int(folder.name))
    return found


@pytest.mark.requirement("F23")
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header hides a decompression bomb, but the worker has only the memory for the header's pixels."""
    monkeypatch.setattr(service, "SLACK", 32 << 20)
    monkeypatch.setattr(service, "BYTES_A_PIXEL", 0)
    file = image_file((4000, 4000), "BMP")

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            with pytest.raises(WeftError) as caught:
                await media.decode([picture(file, max_image_bytes=64 << 20)], {}, lease)
            assert caught.value.param == WHERE
            (item,) = await media.decode([picture(image_file())], {}, lease)
            assert item.pixels

    run(work, max_image_bytes=1 << 20)


def test_a_worker_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = (sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr(service, "COMMAND", hang)
    monkeypatch.setattr(service, "LATE_S", 0.0)

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            with pytest.raises(InvalidRequest, match=r"took longer than 0\.5 seconds") as caught:
                await media.decode([picture(image_file())], {}, lease)
            assert caught.value.param == WHERE
        assert media.processes == 0

    run(work, media_timeout=0.5)


def test_an_answer_that_is_none_is_the_servers_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import socket, sys; link = socket.socket(fileno=int(sys.argv[-1])); link.recv(4096);"
        "link.sendall(b'\\x03\\0\\0\\0abc'); link.recv(1 << 20); link.recv(1 << 20)"
    )
    monkeypatch.setattr(service, "COMMAND", (sys.executable, "-c", program))

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease, pytest.raises(WeftError) as caught:
            await media.decode([picture(image_file())], {}, lease)
        assert caught.value.http_status == 500
        assert caught.value.param == WHERE

    run(work)


def test_memory_of_live_requests_is_bounded() -> None:
    async def work(media: MediaService) -> None:
        one = picture(image_file((200, 200)))
        with media.memory.lease() as first, media.memory.lease() as second:
            first.take((1 << 20) - 10)
            with pytest.raises(Overloaded):
                await media.decode([one], {}, second)
            assert second.size == 0
        with media.memory.lease() as third:
            with pytest.raises(InvalidRequest, match="media-memory"):
                await media.decode([one] * 99, {}, third)
            await media.decode([one], {}, third)
        assert media.memory.used == 0

    run(work, media_memory=1 << 20)


def test_without_pillow_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "can_decode", lambda: False)

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease, pytest.raises(InvalidRequest, match=r"weft\[vision\]"):
            await media.decode([picture(image_file())], {}, lease)
        assert media.processes == 0

    run(work)


@pytest.fixture
def files() -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield (port, answers by path) of a loopback server. Other paths hang."""
    answers: dict[str, bytes] = {}
    door = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                link, _ = door.accept()
            except OSError:
                return
            threading.Thread(target=handle, args=(link,), daemon=True).start()

    def handle(link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            path = link.recv(65536).split()[1].decode()
            if path in answers:
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answers[path])}\r\n\r\n".encode()
                link.sendall(head + answers[path])
            else:
                link.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    yield door.getsockname()[1], answers
    door.close()


def test_files_are_fetched_by_processes(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    port, answers = files
    answers["/a.png"], answers["/b.jpg"] = image_file(seed=1), image_file((90, 70), "JPEG", seed=2)
    monkeypatch.setattr(service, "COMMAND", (sys.executable, "-m", "tests.support.open_media_worker"))
    pictures = Pictures(FACTS, MediaSection(allowed_media_domains=("*",)))

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            wanted = [FileToFetch(f"http://127.0.0.1:{port}{path}", WHERE) for path in answers]
            found = await media.fetch(wanted, lease)
            assert [bytes(file) for file in found.values()] == list(answers.values())
            assert lease.size == sum(map(len, answers.values()))
            made = [pictures.fitted(frame(bytes(file), url=url))[0] for url, file in found.items()]
            items = await media.decode(made, found, lease)
            here = [pictures.fitted(frame(file))[0] for file in answers.values()]
            assert [item.key for item in items] == [by_hand(one).key for one in here]

    run(work, allowed_media_domains=(f"127.0.0.1:{port}",))


def test_many_small_files_do_not_count_as_many_large_ones(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, answers = files
    answers.update({f"/{n}": image_file(seed=n) for n in range(20)})
    monkeypatch.setattr(service, "COMMAND", (sys.executable, "-m", "tests.support.open_media_worker"))

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            wanted = [FileToFetch(f"http://127.0.0.1:{port}/{n}", WHERE) for n in range(20)]
            found = await media.fetch(wanted, lease)
            assert [bytes(file) for file in found.values()] == [answers[f"/{n}"] for n in range(20)]
            assert lease.size == sum(map(len, answers.values()))

    most = (service.FETCHERS + 2) << 20
    run(work, allowed_media_domains=(f"127.0.0.1:{port}",), max_image_bytes=1 << 20, media_memory=most)


@pytest.mark.slow
def test_a_server_that_hangs_holds_up_nobody(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    port, answers = files
    answers["/a.png"] = image_file()
    monkeypatch.setattr(service, "COMMAND", (sys.executable, "-m", "tests.support.open_media_worker"))

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease:
            hanging = FileToFetch(f"http://127.0.0.1:{port}/hang", WHERE)
            slow = asyncio.create_task(media.fetch([hanging], lease))
            await media.fetch([FileToFetch(f"http://127.0.0.1:{port}/a.png", WHERE)], lease)
            assert not slow.done()
            with pytest.raises(InvalidRequest) as caught:
                await slow
            assert caught.value.error_code == "image_fetch_failed"
            assert caught.value.param == WHERE

    run(work, allowed_media_domains=(f"127.0.0.1:{port}",), media_timeout=deadline(3.0))


def test_addresses_that_are_not_public_are_refused_by_the_real_worker(files: Any) -> None:
    port, answers = files
    answers["/a.png"] = image_file()

    async def work(media: MediaService) -> None:
        with media.memory.lease() as lease, pytest.raises(InvalidRequest, match="public") as caught:
            await media.fetch([FileToFetch(f"http://127.0.0.1:{port}/a.png", WHERE)], lease)
        assert caught.value.error_code == "image_url_refused"

    run(work, allowed_media_domains=(f"127.0.0.1:{port}",))


def test_pixels_have_the_shape_of_their_grid() -> None:
    header = ImageHeader(format="PNG", width=100, height=50, orientation=8)
    (found,) = Pictures(FACTS, MediaSection()).fitted(Frame(where=WHERE, header=header))
    _, rows, columns = found.grid
    assert found.target.canvas == (rows * FACTS.patch, columns * FACTS.patch)
    assert rows > columns
    assert np.prod(found.grid) == found.count * FACTS.merge**2
