"""Images in requests of all three APIs, from HTTP to the engine; hostile images over real sockets."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.pictures import FACTS, PLACEHOLDER, data_url, image_file, image_part
from tests.support.servers import Running
from tests.support.slowness import deadline
from weft.config.sections.media_section import MediaSection
from weft.media.decode import key_of, pixels_of
from weft.media.headers import read_header
from weft.media.pictures import Frame, Pictures

Start = Callable[..., Running]
START, END = 259, 260
WORKER = [sys.executable, "-m", "tests.support.open_media_worker"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images") / "media.jsonl"


class Files:
    """A file server on loopback. Unknown paths hang."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._door.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(link,), daemon=True).start()

    def _handle(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            path = link.recv(65536).split()[1].decode()
            self.asked.append(path)
            if path in self.answers:
                link.sendall(self.answers[path])
            else:
                link.recv(1)

    def put(self, path: str, file: bytes) -> str:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(file)}\r\n\r\n"
        self.answers[path] = head.encode() + file
        return f"http://127.0.0.1:{self.port}{path}"

    def close(self) -> None:
        self._door.close()


@pytest.fixture(scope="module")
def files() -> Iterator[Files]:
    made = Files()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(start_fake: Start, log: Path, files: Files) -> Running:
    return start_fake(
        vision=True,
        media_log=str(log),
        max_request_bytes=16 << 20,
        max_image_bytes=4 << 20,
        max_image_pixels=4 << 20,
        limit_mm_per_prompt=4,
        media_timeout=5.0,
        allowed_media_domains=[f"127.0.0.1:{files.port}", "*.invalid", "localhost", "169.254.169.254"],
        constants={"weft.media.service.COMMAND": WORKER},
    )


@pytest.fixture
def got(log: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads the images of the engine's last sequence since the test began."""
    before = log.read_text().count("\n") if log.exists() else 0

    def read() -> list[dict[str, Any]]:
        lines = log.read_text().splitlines()[before:] if log.exists() else []
        found: list[dict[str, Any]] = json.loads(lines[-1]) if lines else []
        return found

    return read


def expected(file: bytes, start: int) -> dict[str, Any]:
    (one,) = Pictures(FACTS, MediaSection()).fitted(Frame(where="x", header=read_header(file)))
    pixels = pixels_of(file, one.frames[0].header, one.target)
    return {
        "key": key_of(pixels, one.target).hex(),
        "start": start,
        "count": one.count,
        "grid": list(one.grid),
        "bytes": len(pixels),
        "pixels": hashlib.sha256(pixels).hexdigest(),
    }


def count(file: bytes) -> int:
    return FACTS.grid_of(*read_header(file).shown).tokens


def ask(server: Running, *parts: Any, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "max_tokens": 4, "messages": [{"role": "user", "content": list(parts)}]}
    return server.http.post("/v1/chat/completions", json={**body, **fields})


def refused(answer: httpx.Response, param: str = "messages[0].content[1]") -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    return error


def text(one: str) -> dict[str, str]:
    return {"type": "text", "text": one}


A, B = image_file((64, 48), seed=1), image_file((150, 97), "JPEG", seed=2)


def test_images_of_a_chat_reach_the_head(server: Running, got: Any) -> None:
    answer = ask(server, text("ab"), image_part(A), text("cd"), image_part(B), return_token_ids=True)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["prompt_token_ids"]
    head = [256, *b"user\n", *b"ab"]
    after = [*head, START, *[PLACEHOLDER] * count(A), END, *b"cd", START]
    assert ids[: len(after) + count(B)] == [*after, *[PLACEHOLDER] * count(B)]
    assert ids.count(PLACEHOLDER) == count(A) + count(B)
    assert got() == [expected(A, len(head) + 1), expected(B, len(after))]
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    parts = [text("ab"), image_part(A), text("cd"), image_part(B)]
    tokenized = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": parts}]})
    assert tokenized.json()["tokens"] == ids


def test_choices_and_streams_have_them_too(server: Running, log: Path, sse: Any) -> None:
    before = log.read_text().count("\n") if log.exists() else 0
    body = {
        "model": server.model,
        "n": 3,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": [text("a"), image_part(A)]}],
    }
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = list(sse(answer))
    assert chunks[-2]["usage"]["completion_tokens"] == 9
    lines = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert len(lines) == 3
    assert lines[0] == lines[1] == lines[2]


def test_large_bodies_are_read_elsewhere_with_the_same_result(server: Running, got: Any) -> None:
    large = image_file((900, 800), seed=3)
    assert len(large) > 1 << 20
    answer = ask(server, text("a"), image_part(large), return_token_ids=True)
    assert answer.status_code == 200, answer.text
    assert got() == [expected(large, len([256, *b"user\n", *b"a"]) + 1)]
    answer = ask(server, text("a" * 100_000), image_part(A))
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_images_of_responses(server: Running, got: Any) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data_url(A)}]
    body = {"model": server.model, "max_output_tokens": 3, "input": [{"role": "user", "content": parts}]}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    (item,) = got()
    assert item == expected(A, item["start"])
    given = {"model": server.model, "input": body["input"]}
    counted = server.http.post("/v1/responses/input_tokens", json=given)
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    # The next turn has the image again, out of the store.
    follow = {**body, "input": "b", "previous_response_id": answer.json()["id"]}
    next_turn = server.http.post("/v1/responses", json=follow)
    assert next_turn.status_code == 200, next_turn.text
    assert got() == [item]
    parts[1]["image_url"] = data_url(A[:90])
    refused(server.http.post("/v1/responses", json=body), "input[0].content[1]")
    parts[1]["detail"] = "much"
    refused(server.http.post("/v1/responses", json=body), "input[0].content[1]")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": data_url(A), "detail": "original"},
        {"type": "image_url", "image_url": {"url": data_url(A), "detail": "original"}},
        {"type": "image_url", "image_url": {"url": data_url(A), "detail": None}},
        {"type": "input_image", "image_url": {"url": data_url(A)}, "file_id": None},
    ],
)
def test_chat_and_responses_take_each_others_images(server: Running, got: Any, part: dict[str, Any]) -> None:
    assert ask(server, text("a"), part).status_code == 200
    (item,) = got()
    body = {"model": server.model, "max_output_tokens": 3, "store": False}
    answer = server.http.post(
        "/v1/responses", json={**body, "input": [{"role": "user", "content": [text("a"), part]}]}
    )
    assert answer.status_code == 200, answer.text
    assert got() == [item]
    assert item == expected(A, item["start"])


@pytest.mark.parametrize("declared", ["image/jpg", "image/jpeg", "application/octet-stream"])
def test_a_declared_type_of_messages_has_no_effect(server: Running, got: Any, declared: str) -> None:
    source = {"type": "base64", "media_type": declared, "data": base64.b64encode(A).decode()}
    content = [{"type": "image", "source": source}, text("a")]
    body = {"model": server.model, "max_tokens": 3, "messages": [{"role": "user", "content": content}]}
    answer = server.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert got() == [expected(A, len([256, *b"user\n"]) + 1)]


def test_images_of_messages(server: Running, got: Any) -> None:
    data = base64.b64encode(A).decode()
    source: dict[str, Any] = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, text("a")]
    body = {"model": server.model, "messages": [{"role": "user", "content": content}]}
    answer = server.http.post("/v1/messages", json={**body, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    (item,) = got()
    assert item == expected(A, len([256, *b"user\n"]) + 1)
    counted = server.http.post("/v1/messages/count_tokens", json=body)
    usage = answer.json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    source["data"] = "AAAA"
    wrong = server.http.post("/v1/messages", json={**body, "max_tokens": 3})
    assert wrong.status_code == 400
    assert "messages[0].content[0]" in wrong.json()["error"]["message"]


def test_files_are_fetched_where_that_is_allowed(server: Running, files: Files, got: Any) -> None:
    url = files.put("/b.jpg", B)
    answer = ask(server, text("a"), {"type": "image_url", "image_url": {"url": url}}, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    assert got() == [expected(B, len([256, *b"user\n", *b"a"]) + 1)]
    assert answer.json()["prompt_token_ids"].count(PLACEHOLDER) == count(B)
    asked = len(files.asked)
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}] * 2}]}
    counted = server.http.post("/tokenize", json=body)
    assert counted.json()["tokens"].count(PLACEHOLDER) == 2 * count(B)
    assert len(files.asked) == asked + 1
    named = {"type": "image_url", "image_url": {"url": url}}
    answer = ask(server, text("a" * 70_000), named)
    assert answer.json()["error"]["code"] == "context_length_exceeded"  # known before anything is fetched
    assert len(files.asked) == asked + 1
    large = image_file((900, 800), seed=3)
    assert ask(server, named, image_part(large), named).status_code == 200
    wanted = [expected(file, 0)["key"] for file in (B, large, B)]
    assert [item["key"] for item in got()] == wanted
    assert len(files.asked) == asked + 2


@pytest.mark.requirement("F21", "F22")
@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost/",
        "http://metadata.invalid/x",
        "http://2852039166/",
        "http://0xa9fea9fe/",
        "http://[::ffff:169.254.169.254]/",
        "http://169.254.169.254\\@127.0.0.1/",
        "http://a:b@169.254.169.254/",
        "https://example.org/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "../../etc/passwd",
        "ftp://127.0.0.1/a.png",
        "",
    ],
)
def test_urls_that_are_refused(server: Running, url: str) -> None:
    error = refused(ask(server, text("a"), {"type": "image_url", "image_url": {"url": url}}))
    assert error["code"] in ("image_url_refused", "image_fetch_failed")
    assert "127." not in error["message"]
    assert "root" not in error["message"]


@pytest.mark.requirement("F21")
def test_redirects_to_private_addresses_are_refused(server: Running, files: Files) -> None:
    head = f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.2:{files.port}/secret\r\n\r\n"
    files.answers["/redirect"] = head.encode()
    url = f"http://127.0.0.1:{files.port}/redirect"
    error = refused(ask(server, text("a"), {"type": "image_url", "image_url": {"url": url}}))
    assert error["code"] == "image_url_refused"
    assert "/secret" not in files.asked


@pytest.mark.slow
@pytest.mark.requirement("F23")
def test_slow_and_endless_files_end_in_time(server: Running, files: Files) -> None:
    files.answers["/large"] = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5 << 20)
    files.answers["/text"] = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 5\r\n\r\nhello"
    for path, words in (
        ("/hang", "longer than 5 seconds"),
        ("/large", "bytes"),
        ("/text", "unsupported format"),
    ):
        url = f"http://127.0.0.1:{files.port}{path}"
        began = time.monotonic()
        error = refused(ask(server, text("a"), {"type": "image_url", "image_url": {"url": url}}))
        assert words in error["message"]
        assert time.monotonic() - began < deadline(30)
    assert server.chat(max_tokens=3).status_code == 200


def _hostile() -> dict[str, tuple[bytes, str]]:
    import io
    import struct
    import zlib

    from PIL import Image

    animation = io.BytesIO()
    frames = [Image.new("RGB", (40, 40), color) for color in ("red", "blue")]
    frames[0].save(animation, "GIF", save_all=True, append_images=frames[1:])
    tiff = io.BytesIO()
    frames[0].save(tiff, "TIFF")
    bomb = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")):
        bomb += struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
    jpeg = image_file((200, 200), "JPEG")
    return {
        "a huge PNG": (bomb, "50000 x 50000"),
        "a truncated JPEG": (jpeg[: len(jpeg) // 2], "damaged or cut off"),
        "an animation": (animation.getvalue(), "several frames"),
        "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n", "unsupported format"),
        "TIFF": (tiff.getvalue(), "unsupported format"),
        "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported format"),
        "a pickle": (b"\x80\x04\x95\x10\x00", "unsupported format"),
        "a long strip": (image_file((2000, 4)), "too long"),
    }


HOSTILE = _hostile()


@pytest.mark.requirement("F23")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(server: Running, name: str) -> None:
    file, words = HOSTILE[name]
    error = refused(ask(server, text("a"), image_part(file)))
    assert words in error["message"]


@pytest.mark.requirement("F23", "F24")
def test_too_many_and_malformed_parts(server: Running) -> None:
    error = refused(ask(server, *[image_part(A)] * 5), "messages[0].content[4]")
    assert error["code"] == "too_many_images"
    error = refused(ask(server, *[image_part(b"x")] * 10_000), "messages[0].content[4]")
    for part in (
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": data_url(A), "hash": "0" * 32}},
        {"type": "image_url", "image_url": {"url": data_url(A)}, "uuid": "mine"},
        {"type": "image_url", "image_url": {"url": data_url(A), "detail": "most"}},
        {"type": "image_url", "image_url": {"url": data_url(A), "detail": 3}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": {"url": "data:image/png,abc"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}},
        {"type": "image", "image": data_url(A)},
        {"type": "image", "image": {"key": "x"}},
    ):
        refused(ask(server, text("a"), part))
    assert ask(server, text("a"), image_part(A, detail="low")).status_code == 200
    other = {"role": "assistant", "content": [text("a"), image_part(A)]}
    body = {"model": server.model, "messages": [other, {"role": "user", "content": "b"}]}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 400


def test_typed_placeholders_are_text(server: Running, got: Any) -> None:
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    for content in (typed, [text(typed)]):
        body = {"messages": [{"role": "user", "content": content}]}
        ids = server.http.post("/tokenize", json=body).json()["tokens"]
        assert not {PLACEHOLDER, START, END} & set(ids)
        assert bytes(typed, "ascii") in bytes(i for i in ids if i < 256)
    answer = ask(server, text("<|image_pad|>" * 3), image_part(A), return_token_ids=True)
    assert answer.json()["prompt_token_ids"].count(PLACEHOLDER) == count(A)
    assert len(got()) == 1


def test_an_image_longer_than_the_context(start_fake: Start, server: Running) -> None:
    answer = ask(server, text("a" * 440), image_part(image_file((256, 256), "JPEG")), image_part(A))
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_model_without_vision_names_the_part(start_fake: Start) -> None:
    blind = start_fake()
    answer = ask(blind, text("a"), image_part(A))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "messages[0].content[1]" in error["message"]
    assert "image_url" in error["message"]
    image = {"type": "input_image", "image_url": data_url(A)}
    body = {"model": blind.model, "input": [{"role": "user", "content": [image]}]}
    refused(blind.http.post("/v1/responses", json=body), "input[0].content[0]")
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    asked = {"model": blind.model, "max_tokens": 3, "messages": [message]}
    answer = blind.http.post("/v1/messages", json=asked)
    assert answer.status_code == 400
    assert "messages[0].content[0]" in answer.json()["error"]["message"]


@pytest.mark.requirement("F22")
def test_without_domains_nothing_is_fetched(start_fake: Start, files: Files) -> None:
    closed = start_fake(vision=True)
    url = files.put("/closed.png", A)
    error = refused(ask(closed, text("a"), {"type": "image_url", "image_url": {"url": url}}))
    assert error["code"] == "image_url_refused"
    assert "/closed.png" not in files.asked


def _workers(server: Running) -> list[int]:
    """Media workers of a server."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and b"media_worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def test_workers_that_die_fail_their_images_alone(server: Running) -> None:
    assert ask(server, text("a"), image_part(A)).status_code == 200
    stop = threading.Event()

    def kill() -> None:
        while not stop.is_set():
            for pid in _workers(server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        answer = ask(server, text("a"), image_part(image_file((1000, 1000), "BMP")))
    finally:
        stop.set()
        killing.join()
    assert answer.status_code == 500, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[1]"
    assert ask(server, text("a"), image_part(A)).status_code == 200


def test_memory_of_images_is_given_back(start_fake: Start) -> None:
    pixels = expected(A, 0)["bytes"]
    small = start_fake(vision=True, media_memory=max(1 << 20, pixels), constants={})
    for _ in range(3):
        for _ in range(4):
            assert ask(small, text("a"), image_part(A)).status_code == 200
        refused(ask(small, text("a"), image_part(A[: len(A) // 2])))
    assert msgspec.json.decode(small.http.get("/health").content) == {"status": "alive"}
