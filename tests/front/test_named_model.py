"""The model that a body names, found before the body is read as a whole."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from weft.common.errors import InvalidRequest
from weft.front.protocol.keep_alive import LONGEST_S
from weft.front.requests.models.named_model import SMALL_BODY, NamedModel, named_in
from weft.front.requests.text_threads import TextThreads


def found(*pieces: bytes) -> NamedModel:
    async def run() -> NamedModel:
        threads = TextThreads()
        try:
            return await named_in(pieces, threads)
        finally:
            threads.close()

    return asyncio.run(run())


def test_small_bodies_are_parsed() -> None:
    assert found(b'{"a": {"model": "x"}, "mod', b'el": "m\\u0031", "keep_alive": "2m"}') == ("m1", 120.0)
    assert found(b'{"model": null, "keep_alive": -1}') == (None, math.inf)
    assert found(b"{}") == (None, None)


@pytest.mark.parametrize("given", [b"1e308", b"9" * 400, b'"999999999999999999999h"'])
def test_a_long_time_counts_as_the_longest(given: bytes) -> None:
    assert found(b'{"keep_alive": ' + given + b"}").keep == LONGEST_S


def test_large_bodies_that_begin_with_the_model_are_not_parsed() -> None:
    rest = b'"prompt": "' + b"x" * SMALL_BODY
    assert found(b' { "model" : "a\\"b" , ' + rest) == ('a"b', None)  # the body is no JSON, and nobody looks
    kept = b'{"model": "a", "prompt": "' + b"x" * SMALL_BODY + b'", "keep_al'
    assert found(kept, b'ive": 3}') == ("a", 3.0)
    whole = json.dumps({"prompt": "x" * SMALL_BODY, "model": "late", "keep_alive": 0}).encode()
    assert found(whole[:100], whole[100:]) == ("late", 0.0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"model": 3}',
        b'{"model": "a", "keep_alive": []}',
        b"\xff",
        b'{"model": "\\q"}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_wrong_bodies_are_refused(body: bytes, large: bool) -> None:
    pieces: tuple[Any, ...] = (body, b" " * SMALL_BODY, b" ") if large else (body,)
    with pytest.raises(InvalidRequest):
        found(*pieces)
