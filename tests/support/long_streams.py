"""Streams that run at any moment of a block, also on a machine that is fast or slow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.servers import Running
from tests.support.slowness import deadline


@dataclass
class Stream:
    """One stream of ``TOKENS`` tokens."""

    ids: list[int] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """The fields of all chunks; the last chunk wins."""

    @property
    def change(self) -> int:
        """Number of tokens of the first version of the weights; 0 with one version."""
        versions = self.last.get("weight_versions", [])
        return int(versions[1][0]) if len(versions) == 2 else 0


TOKENS = 1500


@contextmanager
def streams(server: Running, prompt: str) -> Iterator[list[Stream]]:
    """Run two streams, half a length apart, again and again. The list has all streams after the block."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True}
    made, ended = list[Stream](), threading.Event()
    begun = [threading.Event(), threading.Event()]

    def read(number: int) -> None:
        if number and not begun[0].wait(deadline(30)):
            return
        while not ended.is_set():
            made.append(one := Stream())
            url = server.url + "/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=deadline(90)) as stream:
                for line in stream.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    one.last.update(json.loads(line[6:])["choices"][0])
                    one.ids.extend(one.last.pop("token_ids", None) or [])
                    if len(one.ids) > (20 if number else TOKENS // 2):
                        begun[number].set()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert begun[1].wait(deadline(60))
        yield made
    finally:
        ended.set()
        for thread in threads:
            thread.join(deadline(90))
