"""Clients that stream answers without end, retry after broken connections, and measure the gaps."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import httpx

from bench.pictures import messages, noise
from tests.support.slowness import deadline

PROMPT = "Tom has 12 apples and buys 7 more. How many apples does he have?"
PICTURES = 4
RETRY_S = 0.2
"""Seconds until a client repeats a request after a broken connection."""


class Stream(NamedTuple):
    """One answer, as a client has seen the answer."""

    sent: float
    arrivals: tuple[float, ...]
    """Times of the events with text."""
    tries: int

    @property
    def gap(self) -> float:
        """The longest time between two events, in seconds."""
        return max((b - a for a, b in itertools.pairwise(self.arrivals)), default=0.0)

    @property
    def wait(self) -> float:
        """Seconds from the first try to the first event."""
        return self.arrivals[0] - self.sent


class Clients:
    """Threads that stream one answer after the other within the context, and compare each text."""

    def __init__(self, base: str, count: int = 3, tokens: int = 600, images: bool = False) -> None:
        """Learn the undisturbed answers. ``images``: each request has one of ``PICTURES`` images per client,
        more than the server's caches have room for."""
        self._base, self._count, self._tokens, self._images = base, count, tokens, images
        self.due: dict[int, str] = {}
        """Number of the prompt -> text of the undisturbed answer."""
        self.streams: list[Stream] = []
        self.lost: list[str] = []
        """Reasons of requests without an answer."""
        self.different = 0
        self.events: dict[int, int] = {}
        """Client -> events of the present stream so far."""
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        for number in range(count * (PICTURES if images else 1)):
            self.due[number] = self._stream(number, Stream(time.monotonic(), (), 1))[0]

    def __enter__(self) -> Self:
        self._over.clear()
        self.streams, self.lost, self.different = [], [], 0
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self._count)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(deadline(180))

    def prompt(self, number: int) -> str:
        """Return the text of a prompt."""
        return f"{PROMPT} ({number})"

    def _run(self, client: int) -> None:
        for number in itertools.cycle(range(client, len(self.due), self._count)):
            if self._over.is_set():
                return
            sent = time.monotonic()
            for tries in itertools.count(1):
                try:
                    text, stream = self._stream(number, Stream(sent, (), tries))
                except httpx.TransportError:
                    time.sleep(RETRY_S)
                    if time.monotonic() - sent < deadline(120):
                        continue
                    self.lost.append("no API server")
                    return
                except Exception as error:
                    self.lost.append(f"{type(error).__name__}: {error}"[:300])
                    return
                self.different += text != self.due[number]
                self.streams.append(stream)
                break

    def _stream(self, number: int, stream: Stream) -> tuple[str, Stream]:
        """Return the text and the times of an answer. Raise TransportError for a broken connection, and
        RuntimeError for a refused or failed request."""
        text, arrivals = "", list[float]()
        self.events[number % self._count] = 0
        prompt = self.prompt(number)
        path, asked = "completions", dict[str, Any](prompt=prompt)
        if self._images:
            path, asked = "chat/completions", {"messages": messages([noise(number)], prompt)}
        body = {"max_tokens": self._tokens, "temperature": 0, "ignore_eos": True, "stream": True, **asked}
        limit = httpx.Timeout(deadline(150), connect=5.0)
        with httpx.stream("POST", f"{self._base}/v1/{path}", json=body, timeout=limit) as answer:
            if answer.status_code == 503 and stream.tries > 1:  # the next API server is starting
                raise httpx.ConnectError("not ready")
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return text, stream._replace(arrivals=tuple(arrivals))
                if line.startswith("data: "):
                    event: Mapping[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(f"error event: {event['error']}")
                    for choice in event["choices"]:
                        piece = choice["delta"].get("content") if self._images else choice["text"]
                        if piece:
                            arrivals.append(time.monotonic())
                            self.events[number % self._count] += 1
                            text += piece
        raise httpx.RemoteProtocolError("the stream ended without its last event")
