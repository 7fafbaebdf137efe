"""Send the traffic of careless and hostile clients to a server on this machine, for ``bench.canary``.

python -m bench.hostile NAME http://127.0.0.1:8000 --seconds 10 [--scale 0.1]

Every attack stops by itself. ``--scale`` reduces the size of an attack. Only loopback addresses are accepted.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import itertools
import json
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WORDS = "Tom has 12 apples and buys 7 more. "


@dataclass(frozen=True)
class Target:
    """Hold the address of the attacked server, and the duration and size of the attack."""

    host: str
    port: int
    model: str
    seconds: float
    scale: float = 1.0
    key: str = ""
    """API key of the attacker."""
    streams: int = 64
    """Number of streams that are never read: the number of the server's sequence slots."""

    @property
    def until(self) -> float:
        return time.monotonic() + self.seconds

    def times(self, count: int) -> int:
        """``count`` scaled."""
        return max(1, int(count * self.scale))


def post(target: Target, path: str, body: bytes) -> int:
    """Send one request. Return its status, or 0 if the connection ended without an answer."""
    link = http.client.HTTPConnection(target.host, target.port, timeout=120)
    with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
        link.request("POST", path, body, {"content-type": "application/json", **key_header(target)})
        answer = link.getresponse()
        while answer.read(1 << 20):
            pass
        return answer.status
    return 0


def key_header(target: Target) -> dict[str, str]:
    return {"authorization": f"Bearer {target.key}"} if target.key else {}


def at_once(target: Target, clients: int, send: Callable[[int], int]) -> list[int]:
    """Call ``send`` in ``clients`` threads until the time is over, with a new number each. Return the
    statuses."""
    numbers = itertools.count()
    with ThreadPoolExecutor(clients) as pool:
        found = pool.map(lambda _: repeatedly(target, lambda: send(next(numbers))), range(clients))
        return [status for statuses in found for status in statuses]


def repeatedly(target: Target, send: Callable[[], int]) -> list[int]:
    """Call ``send`` until the time is over. Return the statuses."""
    until, found = target.until, []
    while not found or time.monotonic() < until:
        found.append(send())
    return found


def encoded(target: Target, **fields: Any) -> bytes:
    return json.dumps({"model": target.model, **fields}).encode()


def bad_words(target: Target) -> list[int]:
    """A valid megabyte of bad words, for 256 prompts."""
    words = [f"{number:04d}" + "many words " * 90 for number in range(target.times(1024))]
    body = encoded(target, prompt=["a"] * 256, bad_words=words, max_tokens=1)
    return repeatedly(target, lambda: post(target, COMPLETIONS, body))


def stops(target: Target) -> list[int]:
    """16 long stop strings for 8 prompts of 128 choices."""
    texts = ["a" * 1000 + chr(ord("a") + number) for number in range(16)]
    fields = {"max_tokens": 16, "ignore_eos": True, "temperature": 1}
    body = encoded(target, prompt=[WORDS] * 8, n=target.times(128), stop=texts, **fields)
    return repeatedly(target, lambda: post(target, COMPLETIONS, body))


def long_prompts(target: Target) -> list[int]:
    """Ten clients with prompts of 7.7 MB."""
    text = WORDS * (target.times(7_700_000) // len(WORDS))
    body = encoded(target, prompt=text, max_tokens=1)
    return at_once(target, 10, lambda _: post(target, COMPLETIONS, body))


def nested(target: Target) -> list[int]:
    """A body nested a million deep, and one of millions of empty lists."""
    depth = target.times(1_000_000)
    deep = b'{"model":"x","messages":' + b"[" * depth + b"]" * depth + b"}"
    wide = b'{"model":"x","messages":[' + b"[]," * (2 * depth) + b"1]}"
    keys = b'{"model":"x",' + b",".join(b'"%d":[[]]' % number for number in range(depth // 2)) + b"}"
    return repeatedly(target, lambda: max(post(target, CHAT, body) for body in (deep, wide, keys)))


def chunks(target: Target) -> list[int]:
    """A body in a million chunks of one byte."""
    head = engine_of(target, "transfer-encoding: chunked")
    piece = b"1\r\n \r\n" * 10_000

    def send() -> int:
        with contextlib.suppress(OSError), connect(target) as link:
            link.sendall(head)
            for _ in range(target.times(100)):
                link.sendall(piece)
            link.sendall(b"0\r\n\r\n")
            return status_of(link)
        return 0

    return repeatedly(target, send)


def idle_uploads(target: Target) -> list[int]:
    """Open 2,000 connections that send headers and one byte of a body."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    head = engine_of(target, "content-length: 1000000") + b"{"
    with contextlib.ExitStack() as held:
        for _ in range(target.times(2000)):
            with contextlib.suppress(OSError):
                link = held.enter_context(connect(target))
                link.sendall(head)
        time.sleep(target.seconds)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return []


def never_read(target: Target) -> list[int]:
    """Open long streams for all slots of the server, and read none of them."""
    body = encoded(
        target,
        messages=[{"role": "user", "content": "Tell me all."}],
        stream=True,
        ignore_eos=True,
        temperature=1,
        logprobs=True,
        top_logprobs=5,
    )
    head = engine_of(target, f"content-length: {len(body)}")
    with contextlib.ExitStack() as held:
        for _ in range(target.streams):
            link = held.enter_context(connect(target))
            link.sendall(head + body)
        time.sleep(target.seconds)
    return []


def echo_logprobs(target: Target) -> list[int]:
    """Send 400 KB of 256 prompts with an answer of half a gigabyte, complete and streamed."""
    text = WORDS * (target.times(1500) // len(WORDS))
    fields = {"echo": True, "logprobs": 20, "max_tokens": 1, "n": 4}

    def send() -> int:
        whole = post(target, COMPLETIONS, encoded(target, prompt=[text] * 256, **fields))
        one = encoded(target, prompt=[text] * target.times(64), stream=True, **{**fields, "n": 1})
        return max(whole, post(target, COMPLETIONS, one))

    return repeatedly(target, send)


# ---- grammars: sizes are not scaled, because the size is the attack


def grammar(target: Target, **fields: Any) -> bytes:
    """Return a request under a grammar, for one token or as ``fields`` set."""
    messages = [{"role": "user", "content": "Hi"}]
    return encoded(target, **{"messages": messages, "max_tokens": 1, **fields})


def schema(value: Any) -> dict[str, Any]:
    """Return the request field for an answer under a JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


def endless_grammars(target: Target) -> list[int]:
    """Run eight clients with distinct schemas of 59 patterns, each with an endless compile."""

    def send(number: int) -> int:
        pattern = "^(a|b)*a(a|b){%d}c{%d}$"
        parts = [{"type": "string", "pattern": pattern % (17 + n % 3, 3 + n)} for n in range(59)]
        return post(target, CHAT, grammar(target, **schema({"allOf": parts, "title": str(number)})))

    return at_once(target, 8, send)


def large_grammars(target: Target) -> list[int]:
    """Run eight clients with distinct ``multipleOf`` schemas: the largest accepted divisors, and larger
    divisors."""

    def send(number: int) -> int:
        divisor = 98_993 - number if number % 2 else 29_989 - number
        return post(target, CHAT, grammar(target, **schema({"type": "integer", "multipleOf": divisor})))

    return at_once(target, 8, send)


SHARED_PATTERN = "([a-z]|[a-z][a-z])*a[a-z]{40}c{3}"
"""A grammar that the canary uses, too."""


def spent_grammars(target: Target) -> list[int]:
    """Run eight clients whose random outputs fill a lexer that other requests share."""

    def send(number: int) -> int:
        fields = {"guided_regex": SHARED_PATTERN, "max_tokens": 400, "temperature": 2, "seed": number}
        return post(target, CHAT, grammar(target, **fields))

    return at_once(target, 8, send)


def exclusive_grammars(target: Target) -> list[int]:
    """Run eight clients with distinct ``oneOf`` of 199 lists of values, in small and large bodies."""

    def send(number: int) -> int:
        count = 12 if number % 2 else 60
        parts = [{"enum": [f"{number}-{n}-{k}" for k in range(count)]} for n in range(199)]
        return post(target, CHAT, grammar(target, **schema({"oneOf": parts})))

    return at_once(target, 8, send)


# ---- stored responses


def respond(target: Target, items: list[dict[str, Any]], **fields: Any) -> tuple[int, str | None]:
    """Store a response made from ``items``. Return its status and id, or (0, None) if the connection
    ended.
    """
    asked = {"type": "message", "role": "user", "content": "Hi"}
    body = encoded(target, input=[*items, asked], max_output_tokens=1, store=True, **fields)
    link = http.client.HTTPConnection(target.host, target.port, timeout=120)
    with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
        link.request("POST", RESPONSES, body, {"content-type": "application/json", **key_header(target)})
        answer = link.getresponse()
        return answer.status, json.loads(answer.read()).get("id")
    return 0, None


def chained_responses(target: Target) -> list[int]:
    """Run eight clients with chains of stored responses. The items have megabytes that no prompt contains."""
    size = target.times(2 << 20)
    unseen = {"type": "message", "role": "user", "content": "Hi", "phase": "x" * size}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x" * size}
    last: dict[int, str | None] = {}

    def send(number: int) -> int:
        chain = number % 8
        previous = last.get(chain)
        fields = {} if previous is None else {"previous_response_id": previous}
        status, last[chain] = respond(target, [unseen, sealed], **fields)
        return status

    return at_once(target, 8, send)


def full_store(target: Target) -> list[int]:
    """Run eight clients that fill the store of responses. Sizes are not scaled."""
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x" * (4 << 20)}
    return at_once(target, 8, lambda _: respond(target, [sealed])[0])


# ---- images


def image_request(target: Target, files: list[bytes], kind: str) -> bytes:
    """A request for one token about images."""
    urls = [f"data:image/{kind};base64,{base64.b64encode(file).decode()}" for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return encoded(target, messages=[{"role": "user", "content": parts}], max_tokens=1)


def image_file(side: int, mode: str, kind: str, **options: Any) -> bytes:
    """Return the bytes of an image file with a black square, which compresses well."""
    file = io.BytesIO()
    Image.new(mode, (side, side)).save(file, kind, **options)
    return file.getvalue()


def png_flood(target: Target) -> list[int]:
    """64 clients with four images of 8191 x 8191 at one bit, in requests of 44 KB."""
    body = image_request(target, [image_file(8191, "1", "PNG")] * 4, "png")
    return at_once(target, target.times(64), lambda _: post(target, CHAT, body))


def jpeg_scans(target: Target) -> list[int]:
    """Run eight clients with a JPEG of the maximum number of scans, and a JPEG of thousands of scans."""
    file = image_file(2048, "RGB", "JPEG", progressive=True)
    scan = file[file.rindex(b"\xff\xda") : -2]
    bodies = [image_request(target, [file[:-2] + n * scan + file[-2:]], "jpeg") for n in (90, 3000)]
    return at_once(target, 8, lambda number: post(target, CHAT, bodies[number % 2]))


def film(side: int, frames: int) -> bytes:
    """Return an MP4 file with black frames: few bytes, and long to decode. Needs PyAV."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=30)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for _ in range(frames):
            output.mux(stream.encode(av.VideoFrame(side, side, "yuv420p")))
        output.mux(stream.encode())
    return file.getvalue()


def video_flood(target: Target) -> list[int]:
    """16 clients with videos of 120 frames of 2048 x 2048. Models without videos refuse the requests at
    once."""
    url = f"data:video/mp4;base64,{base64.b64encode(film(2048, 120)).decode()}"
    content = [{"type": "video_url", "video_url": {"url": url}}]
    body = encoded(target, messages=[{"role": "user", "content": content}], max_tokens=1)
    return at_once(target, target.times(16), lambda _: post(target, CHAT, body))


IMAGE_ATTACKS = {"png_flood": png_flood, "jpeg_scans": jpeg_scans, "video_flood": video_flood}
"""Attacks on a model with image input. Other models refuse the requests at once."""
ATTACKS: dict[str, Callable[[Target], list[int]]] = {
    "bad_words": bad_words,
    "stops": stops,
    "long_prompts": long_prompts,
    "nested": nested,
    "chunks": chunks,
    "idle_uploads": idle_uploads,
    "never_read": never_read,
    "echo_logprobs": echo_logprobs,
    "endless_grammars": endless_grammars,
    "large_grammars": large_grammars,
    "spent_grammars": spent_grammars,
    "exclusive_grammars": exclusive_grammars,
    "chained_responses": chained_responses,
    "full_store": full_store,
    **IMAGE_ATTACKS,
}


def engine_of(target: Target, length: str) -> bytes:
    """Return the head of a chat request. ``length`` is the header with the length of the body."""
    lines = [f"POST {CHAT} HTTP/1.1", "host: localhost", "content-type: application/json", length]
    lines += [f"{name}: {value}" for name, value in key_header(target).items()]
    return "\r\n".join([*lines, "", ""]).encode()


def connect(target: Target) -> socket.socket:
    return socket.create_connection((target.host, target.port), timeout=60)


def status_of(link: socket.socket) -> int:
    """Return the status of the answer on ``link``, or 0 without a status line."""
    line = link.makefile("rb").readline().split()
    return int(line[1]) if len(line) > 1 else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("url")
    parser.add_argument("--model", default="spool-text")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--key", default="", help="API key of the attacker")
    args = parser.parse_args()
    url = urlsplit(args.url)
    if url.hostname not in ("127.0.0.1", "localhost", "::1") or url.port is None:
        parser.error("only a server on a loopback address can be attacked")
    target = Target(url.hostname, url.port, args.model, args.seconds, args.scale, args.key, args.streams)
    found = ATTACKS[args.attack](target)
    print(json.dumps({str(status): found.count(status) for status in sorted(set(found))}))


if __name__ == "__main__":
    main()
