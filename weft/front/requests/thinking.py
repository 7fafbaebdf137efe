"""``thinking_token_budget``: reasoning beyond its budget is ended with the model's own end marker.

Tokens are counted one by one, whatever the number of tokens in an event. So the reasoning ends at the same
token whatever the topology and the drafter. The tokens of the end marker count as output like any other.
The sequence is ended in the engine process. Another sequence continues from all tokens so far, and finds
the cache of the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from weft.text.parsing.events import OutputEvent
from weft.types.messages import Submit, TokenEvent, ids_to_bytes


class ReasoningReader(Protocol):
    """The part of ``OutputEngine`` used here."""

    def feed(self, text: str) -> list[OutputEvent]: ...

    @property
    def thinking(self) -> bool:
        """True if the text so far ends inside reasoning."""


class ReasoningBudget:
    """Counts one choice's tokens inside reasoning, without the tags."""

    def __init__(self, tokens: int, reader: ReasoningReader) -> None:
        self._left = tokens
        self._reader = reader

    @property
    def spent(self) -> bool:
        """True if the output is inside reasoning with an exhausted budget."""
        return self._reader.thinking and self._left <= 0

    def take(self, text: str) -> None:
        """Count one more token. ``text``: new text of the token, which is fed to the reader; may be empty.
        Only a token with reasoning before and after uses up budget."""
        before = self._reader.thinking
        if text:
            self._reader.feed(text)
        self._left -= before and self._reader.thinking


def single(event: TokenEvent) -> Iterable[TokenEvent]:
    """Yield ``event``, which has no output logprobs, as events of one token each. Prompt logprobs go to the
    first, the end to the last; the first tokens take the accepted drafts. An event without tokens is
    yielded unchanged."""
    if len(event.token_ids) < 2:
        yield event
        return
    *others, last = event.token_ids
    # The accepted drafts of an event are its first tokens.
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
    """Return the Submit that continues ``submit`` after ``output``, all token ids so far, under new ids.
    The continuation requests no prompt logprobs and no cache explanation."""
    return msgspec.structs.replace(
        submit,
        sequence=sequence,
        request=request,
        emitted_ids=ids_to_bytes(output),
        explain=False,
        params=msgspec.structs.replace(submit.params, prompt_logprobs=-1),
    )
