"""One streaming request to an OpenAI-compatible server, and the queries needed before a run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from weft.bench.records import RequestRecord, read_stream
from weft.bench.schedule import Planned
from weft.bench.workloads import random_ids, safe_range
from weft.common.client_tls import client_options, key_headers
from weft.common.errors import WeftError

Endpoint = Literal["completions", "chat"]
PromptKind = Literal["ids", "text"]

_PROBE_WORDS = 64


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A server, and the form of requests. ``words_per_token`` sizes text prompts."""

    base_url: str
    model: str
    endpoint: Endpoint
    prompts: PromptKind
    vocab_size: int
    key: str | None = None
    words_per_token: float = 1.0
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional fields of every request body."""

    @property
    def url(self) -> str:
        path = "completions" if self.endpoint == "completions" else "chat/completions"
        return f"{self.base_url}/{path}"

    def body(self, planned: Planned, key: str) -> bytes:
        """Return the request as JSON bytes. ``key`` seeds the tokens of a prompt given only by its length."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": planned.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        prompt: str | list[int] | None = planned.text if planned.text is not None else planned.ids
        if prompt is None and self.prompts == "ids":
            prompt = random_ids(key, planned.input_len, self.vocab_size)
        elif prompt is None:
            prompt = random_words(key, max(round(planned.input_len * self.words_per_token), 1))
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return json.dumps({**body, **self.extra}).encode()


def http_client(
    url: str, key: str | None, connections: int | None, *, keep_alive: bool = True
) -> httpx.AsyncClient:
    """Return a client without own time-outs (each request has a deadline), and without a proxy for loopback.

    Without ``keep_alive`` every request uses a connection of its own.
    """
    kept = connections if keep_alive else 0
    return httpx.AsyncClient(
        timeout=None,
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=kept),
        headers=key_headers(key),
        **client_options(url),
    )


def random_words(key: str, count: int) -> str:
    """Return ``count`` words of three letters, determined by ``key``."""
    letters = random_ids(key, 3 * count, 32)
    return " ".join(
        "".join(chr(ord("a") + letter % 26) for letter in letters[at : at + 3])
        for at in range(0, 3 * count, 3)
    )


async def send(
    client: httpx.AsyncClient, target: ServerTarget, body: bytes, record: RequestRecord, timeout: float
) -> None:
    """Send a request, read the stream to the end, and fill ``record``. Failures are recorded, not raised.

    Lines are stored with their arrival times and decoded after the last line, so decoding delays no time
    stamp. If the caller cancels, the record stays unfinished.
    """
    lines: list[tuple[float, bytes]] = []
    record.sent = time.monotonic()
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(timeout),
            client.stream("POST", target.url, content=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                record.outcome = f"http_{response.status_code}"
                record.message = (await response.aread())[:300].decode(errors="replace")
            else:
                await _read_lines(response, lines)
    except TimeoutError:
        record.outcome, record.message = "timeout", f"no complete answer within {timeout:g} s"
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        record.outcome, record.message = "connect", type(error).__name__
    except (httpx.HTTPError, httpx.StreamError) as error:
        record.outcome, record.message = "broken", type(error).__name__
    else:
        if record.outcome == "unfinished":
            read_stream(record, lines)
            return
    finally:
        record.ended = time.monotonic()
    # Decode the lines before the failure; the failure stays the outcome.
    outcome, message = record.outcome, record.message
    read_stream(record, lines)
    record.outcome, record.message = outcome, message


async def _read_lines(response: httpx.Response, lines: list[tuple[float, bytes]]) -> None:
    """Append (arrival time, line) of each non-blank line of the stream to ``lines``."""
    rest = b""
    async for data in response.aiter_bytes():
        now = time.monotonic()
        *whole, rest = (rest + data).split(b"\n")
        # All lines of one network read have the same arrival time.
        lines += [(now, line) for line in whole if line.strip()]
    if rest.strip():
        lines.append((time.monotonic(), rest))


async def prepare(
    client: httpx.AsyncClient,
    base: str,
    model: str | None,
    endpoint: Endpoint,
    prompts: Literal["auto", "ids", "text"],
    vocab_size: int,
    timeout: float,
) -> tuple[str, PromptKind, float]:
    """Return (model, kind of prompts, words per token) suitable for the server.

    A short request tests if the server takes token ids, up to the largest id to be sent. If not, a request of
    words measures the words per token. Raise WeftError if the server can't be queried, or refuses required
    token ids.
    """
    if model is None:
        found = await _call(client, "GET", f"{base}/models", None, timeout)
        try:
            model = str(found.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise WeftError(f"/v1/models has an unexpected response (status {found.status_code})") from error
    if endpoint == "completions" and prompts != "text":
        # Two tokens of the largest id of a plan. A server with a smaller vocabulary refuses: then send text.
        body = {"model": model, "prompt": [safe_range(vocab_size)[-1]] * 2, "max_tokens": 1}
        answer = await _call(client, "POST", f"{base}/completions", body, timeout)
        if answer.status_code == 200:
            return model, "ids", 1.0
        if prompts == "ids":
            raise WeftError(f"the server refuses token ids ({answer.status_code}): {answer.text[:300]}")
    words = random_words("probe", _PROBE_WORDS)
    chat = {"messages": [{"role": "user", "content": words}]}
    asked: dict[str, Any] = {"prompt": words} if endpoint == "completions" else chat
    path = "completions" if endpoint == "completions" else "chat/completions"
    answer = await _call(
        client, "POST", f"{base}/{path}", {"model": model, "max_tokens": 1, **asked}, timeout
    )
    if answer.status_code != 200:
        raise WeftError(f"the server answered {answer.status_code}: {answer.text[:300]}")
    return model, "text", _PROBE_WORDS / _prompt_tokens(answer)


def _prompt_tokens(answer: httpx.Response) -> int:
    try:
        return max(int(answer.json()["usage"]["prompt_tokens"]), 1)
    except (ValueError, LookupError, TypeError):
        return _PROBE_WORDS


async def _call(
    client: httpx.AsyncClient, method: str, url: str, body: Any, timeout: float
) -> httpx.Response:
    """Return the response of any status. Raise WeftError without a response within ``timeout`` seconds."""
    try:
        async with asyncio.timeout(timeout):
            return await client.request(method, url, json=body)
    except (httpx.HTTPError, TimeoutError) as error:
        raise WeftError(f"no answer from the server at --base-url ({type(error).__name__})") from error


def failures(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Return kind of failure -> count, the most frequent first."""
    counts: dict[str, int] = {}
    for record in records:
        if record.outcome not in ("ok", "unfinished"):
            counts[record.outcome] = counts.get(record.outcome, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
