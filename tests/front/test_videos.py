"""Videos in requests as lists of frames, from HTTP to the engine; hostile videos too."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.front.test_images import END, START, WORKER, Files, Start, ask, files, got, log, refused, text
from tests.support.pictures import FACTS, PLACEHOLDER, data_url, image_file, image_part, video_part
from tests.support.servers import Running
from weft.config.sections.media_section import MediaSection
from weft.media.decode import group_pixels, key_of
from weft.media.headers import read_header
from weft.media.pictures import Frame, Pictures

__all__ = ["files", "got", "log"]

VIDEO = PLACEHOLDER + 3
HEAD = [256, *b"user\n", *b"ab", START]
FRAMES = [image_file((70, 50), "JPEG", seed=n) for n in range(5)]
IMAGE = image_file((64, 48), seed=9)


@pytest.fixture(scope="module")
def server(start_fake: Start, log: Path, files: Files) -> Running:
    return start_fake(
        vision=True,
        media_log=str(log),
        max_request_bytes=16 << 20,
        max_image_bytes=1 << 20,
        max_image_pixels=1 << 20,
        limit_mm_per_prompt=4,
        media_timeout=5.0,
        allowed_media_domains=[f"127.0.0.1:{files.port}", "localhost", "169.254.169.254"],
        constants={"weft.media.service.COMMAND": WORKER},
    )


def groups(frames: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the expected items of a video at the engine, without ``start``."""
    given = [Frame(where="x", header=read_header(file), data=memoryview(file)) for file in frames]
    made = []
    for one in Pictures(FACTS, MediaSection()).groups(given, "x"):
        (pixels,) = group_pixels([(frame.data, frame.header) for frame in one.frames], [one.target])
        made.append(
            {
                "key": key_of(pixels, one.target).hex(),
                "count": one.count,
                "grid": list(one.grid),
                "bytes": len(pixels),
                "pixels": hashlib.sha256(pixels).hexdigest(),
            }
        )
    return made


def prompt_of(times: Sequence[str], counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (prompt ids with "ab" and a video, starts of the frame groups)."""
    ids, starts = list(HEAD), []
    for time, count in zip(times, counts, strict=True):
        ids += [*f"<{time} seconds>".encode(), START]
        starts.append(len(ids))
        ids += [VIDEO] * count + [END]
    return [*ids, END], starts


def test_videos_of_a_chat_reach_the_head(server: Running, got: Callable[[], Any]) -> None:
    """The engine gets frames in groups of two, the last frame alone, with their times."""
    parts = [text("ab"), video_part(FRAMES), image_part(IMAGE)]
    answer = ask(server, *parts, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["prompt_token_ids"]
    expected = groups(FRAMES)
    assert [len(one["grid"]) for one in expected] == [3] * 3
    assert [one["bytes"] for one in expected[1:]] == [expected[0]["bytes"], expected[0]["bytes"] // 2]
    wanted, starts = prompt_of(["0.2", "1.2", "2.0"], [one["count"] for one in expected])
    assert ids[: len(wanted)] == wanted
    items = got()
    assert len(items) == 4
    assert items[:3] == [one | {"start": at} for one, at in zip(expected, starts, strict=True)]
    assert ids[items[3]["start"]] == PLACEHOLDER
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    body = {"messages": [{"role": "user", "content": parts}]}
    assert server.http.post("/tokenize", json=body).json()["tokens"] == ids
    # The same frames as one URL with JPEGs.
    joined = ",".join(base64.b64encode(file).decode() for file in FRAMES)
    url = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{joined}"}}
    again = ask(server, text("ab"), url, image_part(IMAGE), return_token_ids=True)
    assert again.json()["prompt_token_ids"] == ids
    assert got() == items


def test_frames_have_their_times(server: Running) -> None:
    count = groups(FRAMES[:4])[0]["count"]
    for more, times in (
        ({"fps": 10}, ["0.1", "0.2"]),
        ({"timestamps": [3, 4, 60, 61.5]}, ["3.5", "60.8"]),
    ):
        answer = ask(server, text("ab"), video_part(FRAMES[:4], **more), return_token_ids=True)
        assert answer.status_code == 200, answer.text
        wanted, _ = prompt_of(times, [count, count])
        assert answer.json()["prompt_token_ids"][: len(wanted)] == wanted


def test_large_bodies_are_read_elsewhere_with_the_same_result(server: Running, got: Any) -> None:
    frames = [image_file((500, 300), "BMP", seed=n) for n in range(4)]
    answer = ask(server, text("ab"), video_part(frames))
    assert answer.status_code == 200, answer.text
    expected = groups(frames)
    wanted, starts = prompt_of(["0.2", "1.2"], [one["count"] for one in expected])
    assert got() == [one | {"start": at} for one, at in zip(expected, starts, strict=True)]
    assert answer.json()["usage"]["prompt_tokens"] > len(wanted)


def test_frames_are_fetched_where_that_is_allowed(server: Running, files: Files, got: Any) -> None:
    urls = [files.put(f"/{n}.jpg", file) for n, file in enumerate(FRAMES[:3])]
    before = len(files.asked)
    answer = ask(server, text("ab"), {"type": "video", "video": [*urls, urls[0]]})
    assert answer.status_code == 200, answer.text
    assert [item["key"] for item in got()] == [one["key"] for one in groups([*FRAMES[:3], FRAMES[0]])]
    assert len(files.asked) == before + 3
    long = ask(server, text("a" * 600), {"type": "video", "video": urls})
    assert long.json()["error"]["code"] == "context_length_exceeded"  # known before anything is fetched
    assert len(files.asked) == before + 3


PLACE = "messages[0].content[1]"


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "http://localhost/", "file:///etc/passwd", "/etc/passwd", ""]
)
def test_urls_that_are_refused(server: Running, url: str) -> None:
    parts = [data_url(FRAMES[0]), url]
    error = refused(ask(server, text("a"), {"type": "video", "video": parts}), f"{PLACE}.video[1]")
    assert error["code"] in ("image_url_refused", "image_fetch_failed")


def test_frames_that_are_refused(server: Running, got: Any) -> None:
    broken = FRAMES[1][: len(FRAMES[1]) // 2]
    other = image_file((72, 50), "JPEG")
    cases = [
        ([FRAMES[0], broken], 1, "damaged or cut off"),
        ([FRAMES[0], FRAMES[1], FRAMES[2], broken], 3, "damaged or cut off"),
        ([FRAMES[0], FRAMES[1], other], 2, "the same size"),
        ([FRAMES[0], b"%PDF"], 1, "unsupported format"),
        ([FRAMES[0], b""], 1, "no bytes"),
        ([image_file((1200, 1200), "JPEG")] * 2, 0, "pixels"),
        ([FRAMES[0], bytes(2 << 20)], 1, "bytes"),
    ]
    for frames, number, words in cases:
        error = refused(ask(server, text("a"), video_part(frames)), f"{PLACE}.video[{number}]")
        assert words in error["message"]
    error = refused(ask(server, text("a"), video_part([image_file((1000, 2))] * 2)))
    assert "too long" in error["message"]
    error = refused(ask(server, text("a"), video_part(FRAMES * 2)))
    assert error["code"] == "too_many_images"
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    assert refused(ask(server, text("a"), film))["code"] == "invalid_video"
    assert got() == []
    assert ask(server, text("a"), video_part(FRAMES[:2])).status_code == 200


def test_other_apis_name_the_part(server: Running) -> None:
    """The other APIs have no form for a video, and the error names the part."""
    for kind in ("input_video", "video", "video_url"):
        part = {"type": kind, kind: [data_url(FRAMES[0])] * 2}
        body = {"model": server.model, "input": [{"role": "user", "content": [part]}]}
        error = refused(server.http.post("/v1/responses", json=body), "input[0].content[0]")
        assert kind in error["message"]
        message = {"role": "user", "content": [part]}
        asked = {"model": server.model, "max_tokens": 3, "messages": [message]}
        answer = server.http.post("/v1/messages", json=asked)
        assert answer.status_code == 400
        assert f"messages[0].content[0]: blocks of type {kind}" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_models_without_videos_name_the_part(start_fake: Start) -> None:
    for vision, words in (({"frames": None}, "no videos"), (False, "only text")):
        blind = start_fake(vision=vision)
        error = refused(ask(blind, text("a"), video_part(FRAMES)), PLACE if vision else "messages[0].content")
        assert words in error["message"]
