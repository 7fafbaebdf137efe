"""Video files in requests, from HTTP to the engine; hostile files too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.front.test_images import WORKER, Files, Start, ask, files, got, log, refused, text
from tests.front.test_videos import prompt_of
from tests.support.films import film, pictures, sound_file
from tests.support.pictures import FACTS, data_url, image_file, image_part
from tests.support.servers import Running
from weft.config.sections.media_section import MediaSection
from weft.media.decode import key_of
from weft.media.pictures import Frame, Pictures
from weft.media.video import groups_of, header_of

__all__ = ["files", "got", "log"]

PLACE = "messages[0].content[1]"
RATE = 6
MOST = 1 << 20
FILE = film(30, rate=RATE)
"""5 seconds: 10 frames at the model's 2 frames per second, but at most 8 of this server."""


@pytest.fixture(scope="module")
def server(start_fake: Start, log: Path, files: Files) -> Running:
    return start_fake(
        vision=True,
        media_log=str(log),
        max_request_bytes=16 << 20,
        max_image_pixels=MOST,
        max_video_bytes=1 << 20,
        max_video_seconds=60.0,
        video_timeout=20.0,
        limit_mm_per_prompt=4,
        media_timeout=5.0,
        allowed_media_domains=[f"127.0.0.1:{files.port}", "localhost", "169.254.169.254"],
        constants={"weft.media.service.COMMAND": WORKER},
    )


def part(file: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(file, "video/mp4")}, **more}


def expected(file: bytes, numbers: list[int]) -> list[dict[str, Any]]:
    """Return the expected keys and sizes of the frame groups at the engine."""
    header = header_of(file, MOST)
    frames = [Frame(where="x", header=header, url="video", number=number) for number in numbers]
    found = Pictures(FACTS, MediaSection()).groups(frames, "x")
    chosen = [[frame.number for frame in group.frames] for group in found]
    target = found[0].target
    made = []
    for group, pixels in zip(found, groups_of(file, header, chosen, target, MOST), strict=True):
        key = key_of(pixels, target).hex()
        made.append({"key": key, "count": group.count, "grid": list(group.grid), "bytes": len(pixels)})
    return made


def seen(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: item[name] for name in ("key", "count", "grid", "bytes")} for item in items]


def numbers_of(total: int, count: int) -> list[int]:
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


@pytest.mark.slow
def test_a_file_reaches_the_head(server: Running, got: Callable[[], Any]) -> None:
    """The engine gets the chosen frames in groups of two, with their times in the file."""
    answer = ask(server, text("ab"), part(FILE), return_token_ids=True)
    assert answer.status_code == 200, answer.text
    numbers = numbers_of(30, 8)
    due = expected(FILE, numbers)
    times = [(numbers[at] + numbers[at + 1]) / 2 / RATE for at in range(0, 8, 2)]
    wanted, starts = prompt_of([f"{time:.1f}" for time in times], [one["count"] for one in due])
    ids = answer.json()["prompt_token_ids"]
    assert ids[: len(wanted)] == wanted
    items = got()
    assert seen(items) == due
    assert [item["start"] for item in items] == starts
    body = {"messages": [{"role": "user", "content": [text("ab"), part(FILE)]}]}
    assert server.http.post("/tokenize", json=body).json()["tokens"] == ids


@pytest.mark.parametrize(
    ("more", "count"), [({"num_frames": 5}, 5), ({"fps": 1}, 5), ({"fps": 0.1}, 4), ({"fps": 30}, 8)]
)
def test_options_choose_the_frames(server: Running, got: Any, more: dict[str, Any], count: int) -> None:
    answer = ask(server, text("ab"), part(FILE, **more))
    assert answer.status_code == 200, answer.text
    assert seen(got()) == expected(FILE, numbers_of(30, count))


def test_files_and_images_share_the_limit(server: Running, got: Any) -> None:
    """Two files beside an image have room for one group each."""
    other = film(12, "vp9", rate=RATE)
    answer = ask(server, image_part(image_file()), part(FILE), part(other), part(FILE))
    assert answer.status_code == 200, answer.text
    items = got()
    # Equal frames of a file have equal keys: caches know both parts as one.
    due = [*expected(FILE, [0, 29]), *expected(other, [0, 11]), *expected(FILE, [0, 29])]
    assert seen(items[1:]) == due
    assert ask(server, text("a"), part(FILE, num_frames=9)).json()["error"]["code"] == "too_many_images"


def test_large_files_are_read_elsewhere_with_the_same_result(server: Running, got: Any) -> None:
    noise = [np.random.default_rng(n).integers(0, 256, (120, 160, 3), np.uint8) for n in range(12)]
    file = film(noise, rate=RATE)
    assert len(file) > 100_000
    answer = ask(server, text("ab"), part(file))
    assert answer.status_code == 200, answer.text
    assert seen(got()) == expected(file, numbers_of(12, 4))


def test_files_are_fetched_where_that_is_allowed(server: Running, files: Files, got: Any) -> None:
    url = files.put("/a.webm", film(12, "vp8", rate=RATE))
    before = len(files.asked)
    for form in ({"type": "video_url", "video_url": {"url": url}}, {"type": "video", "video": url}):
        # The same address as an image is another file.
        answer = ask(server, text("ab"), form, form)
        assert answer.status_code == 200, answer.text
        assert seen(got()) == expected(film(12, "vp8", rate=RATE), numbers_of(12, 4)) * 2
    assert len(files.asked) == before + 2
    mixed = ask(server, text("ab"), form, {"type": "image_url", "image_url": {"url": url}})
    assert refused(mixed, "messages[0].content[2]")["code"] == "invalid_image"
    large = files.put("/large.mp4", b"\0\0\0\x18ftypisom" + bytes(2 << 20))
    error = refused(ask(server, text("a"), {"type": "video", "video": large}))
    assert error["code"] == "video_too_large"
    assert "--max-video-bytes" in error["message"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://169.254.169.254/latest", "video_url_refused"),
        ("http://localhost:1/a.mp4", "video_url_refused"),
        ("https://example.org/a.mp4", "video_url_refused"),
        ("file:///etc/passwd", "video_url_refused"),
        ("/etc/passwd", "video_url_refused"),
        ("", "video_url_refused"),
        ("data:video/mp4;base64,AAAA", "invalid_video"),
        ("data:video/mp4;base64,", "invalid_video"),
        ("data:video/mp4;base64,?", "invalid_video"),
        (data_url(b"#EXTM3U\nfile:///etc/passwd"), "invalid_video"),
    ],
)
def test_urls_that_are_refused(server: Running, got: Any, url: str, code: str) -> None:
    error = refused(ask(server, text("a"), {"type": "video_url", "video_url": {"url": url}}), PLACE)
    assert error["code"] == code
    assert f"{PLACE}: the video " in error["message"]
    assert got() == []


def test_files_that_are_refused(server: Running, got: Any) -> None:
    cases = [
        (sound_file(), "invalid_video", "no video stream"),
        (film(1), "invalid_video", "fewer than 2 frames"),
        (film(20)[:400], "invalid_video", ""),
        (film(62, rate=1), "video_too_large", "62.0 seconds; the limit is 60 (--max-video-seconds)"),
        (film(pictures(2, (1200, 1000))), "video_too_large", "1200 x 1000 pixels; the limit is 1048576"),
        (bytes(2 << 20), "video_too_large", "--max-video-bytes"),
    ]
    for file, code, words in cases:
        error = refused(ask(server, text("a"), part(file)), PLACE)
        assert error["code"] == code, error
        assert words in error["message"]
    error = refused(ask(server, text("a"), part(FILE, max_pixels=100)), PLACE)
    assert "max_pixels is not supported" in error["message"]
    assert got() == []
    answer = ask(server, text("a"), part(film(2)))
    assert answer.status_code == 200, answer.text


def test_a_name_of_a_file_is_no_image(server: Running) -> None:
    from weft.media.video_choice import name_of

    name = name_of(data_url(FILE, "video/mp4"))
    error = refused(
        ask(server, part(FILE), {"type": "image_url", "image_url": {"url": name}}), "messages[0].content[1]"
    )
    assert error["code"] == "image_url_refused"


def test_a_server_without_the_library_says_so(start_fake: Start) -> None:
    server = start_fake(vision=True, constants={"weft.media.video.LIBRARY": "no_such_library"})
    error = refused(ask(server, text("a"), part(FILE)), PLACE)
    assert error["code"] == "no_video"
    assert "install weft[video]" in error["message"]
    assert ask(server, text("a"), image_part(image_file())).status_code == 200
