"""``thinking_token_budget``: a thought that has had its tokens is ended by what the model would end it with.

Tokens are counted one by one, however many an event brings, so that the thought ends at the same token
whatever the topology and whoever drafts. The ids of the closing tag then count as output like any other: the
sequence ends at its head, and another one goes on from all tokens so far, which finds their cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from weft.text.parsing.events import OutputEvent
from weft.types.messages import Submit, TokenEvent, ids_to_bytes


class ThoughtReader(Protocol):
    """What is needed of ``OutputEngine``."""

    def feed(self, text: str) -> list[OutputEvent]: ...

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""


class ThoughtBudget:
    """Counts one choice's tokens inside thoughts, tags left out."""

    def __init__(self, tokens: int, reader: ThoughtReader) -> None:
        self._left = tokens
        self._reader = reader

    @property
    def spent(self) -> bool:
        """Whether the output is inside a thought that must not go on."""
        return self._reader.thinking and self._left <= 0

    def take(self, text: str) -> None:
        """Notes the text that one more token made; it may be none."""
        before = self._reader.thinking
        if text:
            self._reader.feed(text)
        self._left -= before and self._reader.thinking


def single(event: TokenEvent) -> Iterable[TokenEvent]:
    """``event``, which has no logprobs of output, as events of one token each."""
    if len(event.token_ids) < 2:
        yield event
        return
    *others, last = event.token_ids
    left = event.accepted
    for number, token in enumerate(others):
        draft = min(left, 1)
        left -= draft
        yield TokenEvent(
            sequence=event.sequence,
            token_ids=(token,),
            num_cached=event.num_cached,
            prompt_logprobs=None if number else event.prompt_logprobs,
            accepted=draft,
        )
    yield msgspec.structs.replace(event, token_ids=(last,), prompt_logprobs=None, accepted=left)


def after(submit: Submit, output: list[int], *, sequence: int, request: int) -> Submit:
    """The Submit that goes on from ``output`` in the place of ``submit``, under fresh ids."""
    return msgspec.structs.replace(
        submit,
        sequence=sequence,
        request=request,
        emitted_ids=ids_to_bytes(output),
        params=msgspec.structs.replace(submit.params, prompt_logprobs=-1),
    )
