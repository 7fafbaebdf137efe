"""Logprobs as JSON, encoded in slices, so that no single step holds Python's lock for long."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec

from weft.front.http import answers as r
from weft.text.logprobs import Logprobs, PositionLogprobs
from weft.text.tokenizer import Tokenizer

SLICE = 64
"""Number of positions encoded in one call."""


def bounded(logprob: float) -> float:
    """Return ``logprob``, or the replacement for minus infinity."""
    return max(logprob, r.MIN_LOGPROB)


class JsonArray:
    """JSON array that grows by slices of items."""

    def __init__(self) -> None:
        self._slices: list[bytes] = []

    def extend(self, items: Sequence[Any]) -> None:
        """Encode ``items`` and append the JSON to the array."""
        if items:
            self._slices.append(r.to_json(items)[1:-1])

    def raw(self) -> Any:
        """Return the array for use in a struct in place of a list. The bytes are written unchanged."""
        return msgspec.Raw(b"[" + b",".join(self._slices) + b"]")


def json_array(items: Iterable[Any]) -> Any:
    """Return ``items`` as a JSON array, see ``JsonArray.raw``. Uses up ``items``, ``SLICE`` at a time."""
    made = JsonArray()
    source = iter(items)
    while batch := list(itertools.islice(source, SLICE)):
        made.extend(batch)
    return made.raw()


def prompt_logprobs(positions: Logprobs | None) -> r.PromptLogprobs:
    """Return one entry per prompt token, with candidates by token id. The first entry is null. None for
    ``positions`` gives the first entry alone."""

    def entries() -> Iterator[dict[str, r.PromptLogprob] | None]:
        yield None
        for position in positions or ():
            yield {
                str(token): r.PromptLogprob(
                    logprob=bounded(found.logprob), rank=found.rank, decoded_token=found.decoded_token
                )
                for token, found in position.items()
            }

    return cast(r.PromptLogprobs, json_array(entries()))


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], positions: Iterable[PositionLogprobs], top: int
) -> r.ChatLogprobs:
    """Return the logprobs of output tokens, each with its ``top`` likeliest candidates in order of rank.
    ``ids`` and ``positions`` have equal length, and each position includes the output token. Uses up
    ``positions``."""

    def token(number: int, logprob: float) -> dict[str, Any]:
        """Return the JSON fields of one candidate: text, logprob and bytes."""
        data = tokenizer.token_bytes(number)
        return {"token": data.decode("utf-8", "replace"), "logprob": bounded(logprob), "bytes": list(data)}

    def entries() -> Iterator[r.TokenLogprob]:
        for number, found in zip(ids, positions, strict=True):
            ranked = sorted(found.items(), key=lambda item: item[1].rank)
            likeliest = [r.TopLogprob(**token(i, lp.logprob)) for i, lp in ranked if lp.rank <= top]
            yield r.TokenLogprob(**token(number, found[number].logprob), top_logprobs=likeliest)

    return r.ChatLogprobs(content=json_array(entries()))


def completion_logprobs(
    tokenizer: Tokenizer,
    entries: Iterable[tuple[int, PositionLogprobs | None, int]],
    top: int,
) -> r.CompletionLogprobs:
    """Return parallel arrays of ``entries``: (token, candidates or None, text offset). Uses up ``entries``.
    A token without candidates has null logprobs. ``top_logprobs`` is None if ``top`` is 0."""
    texts = JsonArray()
    own = JsonArray()
    tops = JsonArray()
    offsets = JsonArray()
    source = iter(entries)
    # Four arrays grow in step, a slice at a time.
    while batch := list(itertools.islice(source, SLICE)):
        texts.extend([tokenizer.token_text(token) for token, _, _ in batch])
        own.extend([None if found is None else bounded(found[token].logprob) for token, found, _ in batch])
        tops.extend([None if found is None else _top(found) for _, found, _ in batch])
        offsets.extend([offset for _, _, offset in batch])
    return r.CompletionLogprobs(
        tokens=texts.raw(),
        token_logprobs=own.raw(),
        top_logprobs=tops.raw() if top else None,
        text_offset=offsets.raw(),
    )


def _top(position: PositionLogprobs) -> dict[str, float]:
    """Return candidates by text. Of several candidates with the same text, keep the likeliest."""
    result: dict[str, float] = {}
    for found in position.values():
        result[found.decoded_token] = max(
            bounded(found.logprob), result.get(found.decoded_token, float("-inf"))
        )
    return result
