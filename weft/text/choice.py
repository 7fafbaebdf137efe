"""The text side of one sequence: token events in, text out, and exactly one end for the client.

Sans-IO: if a delta sets ``send_finish``, the caller sends ``Finish`` to the engine. The API server and
``LLM`` both use this class. Events after the end are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from weft.common.errors import ErrorInfo
from weft.text.detokenizer import Detokenizer, StopFinder, StopMatch, Stops
from weft.text.logprobs import Logprobs
from weft.text.parsing.scope import ContentScope
from weft.text.tokenizer import Tokenizer
from weft.types.messages import CacheMiss, LogprobColumns, TokenEvent
from weft.types.routes import Routes, RouteShape, joined
from weft.types.sampling import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The change of a choice by one event."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    """One entry per token of ``token_ids``, if requested."""
    finish_reason: FinishReason | None = None
    """Set only in the last delta."""
    stop_reason: str | int | None = None
    """The stop string, or the stop token of the request, which ended the choice."""
    error: ErrorInfo | None = None
    send_finish: bool = False
    """True if the engine still runs the sequence: send ``Finish(sequence)``."""


class Choice:
    """One sequence of a request. Not thread-safe.

    ``text``, ``token_ids`` and ``logprobs`` are cumulative. A stop string ends the choice at the first
    completing token, never before ``min_tokens``. The text then ends before the match, or behind the match
    with ``include_stop_str_in_output``. A token that ends the sequence counts in ``token_ids``. Such a token
    gives text only with ``include_stop_str_in_output``.

    With ``emitted_ids``, the client already has these tokens. The tokens count everywhere, no delta repeats
    the tokens, and no stop string ends inside. Without ``keep_logprobs``, each delta has its logprobs, and
    ``logprobs`` stays empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        sequence: int,
        index: int = 0,
        continues: bool = False,
        emitted_ids: Sequence[int] = (),
        stops: Stops | None = None,
        keep_logprobs: bool = True,
        visible: frozenset[int] = frozenset(),
        scope: ContentScope | None = None,
    ) -> None:
        """``continues``: the output continues the prompt's text (completions, not chat); see Detokenizer.

        ``stops``: automata for ``params.stop``, shared by all choices. ``visible``: special tokens shown for
        a parser even if special tokens are skipped. ``scope``: restricts the search for stop strings to
        content; None searches all text. ``emitted_ids`` are replayed at once and count in ``token_ids`` and
        ``text``.
        """
        self.sequence, self.index = sequence, index
        self.token_ids = list[int]()
        self._texts: list[str] = []
        self.logprobs: Logprobs | None = None if params.logprobs is None else Logprobs(tokenizer)
        self.prompt_logprobs: Logprobs | None = None
        """One entry per prompt token except the first; None before the first entry."""
        self.num_cached = 0
        """Prompt tokens found in the prefix cache."""
        self.accepted = 0
        """Accepted drafts among ``token_ids``."""
        self.rejected = 0
        """Drafts not used as tokens."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: ErrorInfo | None = None
        self.weights: list[tuple[int, int]] = []  # (position, version of the weights) of each change
        self.embedding = b""
        """Embedding of a pooling sequence: float32, little-endian, not normalized."""
        self.routes: list[Routes] = []  # of consecutive positions, if requested
        self.cache_miss: CacheMiss | None = None
        """The reason why the prompt was not cached further, if requested."""
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            continues=continues,
            visible=visible,
        )
        self._stops = StopFinder(params.stop if stops is None else stops)
        self._scope = scope if self._stops.active else None
        self._passes = not self._stops.active and self.logprobs is None  # see ``_pass``
        self._keep_logprobs = keep_logprobs
        self._decoded = 0
        """Characters received from the detokenizer."""
        self._searched = 0
        """Characters passed through the stop finder or around the stop finder."""
        self._exempt = 0
        """Characters made by tokens before ``min_tokens``, with held characters. No stop string ends here."""
        self._replay(emitted_ids)

    def _replay(self, token_ids: Sequence[int]) -> None:
        """Add tokens the client already has to ``token_ids`` and ``text``.

        No stop string matches during the replay.
        """
        self._replays = True
        fresh = _Fresh()
        for token in token_ids:
            self.token_ids.append(token)
            self._take_text(self._detokenizer.push(token), fresh)
        self._texts.append(fresh.text)
        self._replays = False

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0]

    @text.setter
    def text(self, text: str) -> None:
        self._texts = [text]

    @property
    def finished(self) -> bool:
        """True after the end of the choice."""
        return self.finish_reason is not None

    def on_event(self, event: TokenEvent) -> TextDelta | None:
        """Apply the engine's next event of this sequence to the public attributes, and return the change for
        the client.

        Return None if the client sees no change, or if the choice has already ended. A completed stop string
        ends the choice; ``send_finish`` of the delta is then True if the engine still runs the sequence.
        """
        if self.finished:
            return None
        self.num_cached = max(self.num_cached, event.num_cached)
        self.embedding = event.embedding or self.embedding
        self.cache_miss = self.cache_miss or event.cache_miss
        if event.routes is not None:
            self.routes.append(event.routes)
        if event.prompt_logprobs is not None:
            if self.prompt_logprobs is None:
                self.prompt_logprobs = Logprobs(self._tokenizer)
            self.prompt_logprobs.add(event.prompt_logprobs)
        if event.token_ids and (not self.weights or self.weights[-1][1] != event.weights):
            self.weights.append((len(self.token_ids), event.weights))
        if self._passes and event.finish is None:
            return self._pass(event)
        fresh = _Fresh()
        self._take_tokens(event, fresh)
        if self.logprobs is not None and event.logprobs is not None:
            fresh.logprobs = event.logprobs.first(len(fresh.token_ids))
        # Drafts behind a completed stop string count as rejected.
        accepted = min(event.accepted, len(fresh.token_ids))
        self.accepted += accepted
        self.rejected += event.rejected + event.accepted - accepted
        if fresh.match is None and event.finish is not None:
            self._take_rest(fresh)
        if fresh.match is not None:
            return self._end(fresh, "stop", stop_reason=fresh.match.stop, send_finish=event.finish is None)
        if event.finish is None:
            return self._delta(fresh) if fresh.token_ids or fresh.text else None
        if event.finish == "stop":
            own = event.stop_id if event.stop_id in self._params.stop_token_ids else None
            return self._end(fresh, "stop", stop_reason=own)
        if event.finish == "length":
            return self._end(fresh, "length")
        if event.finish == "abort":
            return self._end(fresh, "abort")
        return self._end(
            fresh, "error", error=event.error or ErrorInfo(code="internal_error", message="failed")
        )

    def abort(self, error: ErrorInfo | None = None) -> TextDelta | None:
        """End the choice from this side: the client left, or (with ``error``) the engine is lost.

        Return the last delta with all held-back text. Return None if the choice has already ended. The
        delta's ``send_finish`` is True only without an error, because a lost engine receives nothing.
        """
        if self.finished:
            return None
        fresh = _Fresh()
        self._take_rest(fresh)
        if error is None:
            return self._end(fresh, "abort", send_finish=True)
        return self._end(fresh, "error", error=error)

    def _pass(self, event: TokenEvent) -> TextDelta | None:
        """Return the change by an event without an end, for a choice without stop strings and logprobs. This
        is the frequent case, and ``_take_tokens`` gives the same result.
        """
        ids = event.token_ids
        push = self._detokenizer.push
        text = push(ids[0]) if len(ids) == 1 else "".join(map(push, ids))
        self.token_ids += ids
        accepted = min(event.accepted, len(ids))
        self.accepted += accepted
        self.rejected += event.rejected + event.accepted - accepted
        if not ids:
            return None
        self._texts.append(text)
        return TextDelta(index=self.index, text=text, token_ids=ids)

    def _take_tokens(self, event: TokenEvent, fresh: _Fresh) -> None:
        """Add an event's tokens and their text to ``token_ids`` and ``fresh``, up to the token that completes
        a stop string.
        """
        last = len(event.token_ids) - 1
        for at, token in enumerate(event.token_ids):
            self.token_ids.append(token)
            fresh.token_ids.append(token)
            # The stop token counts in ``token_ids`` but normally gives no text.
            ends = at == last and event.finish == "stop" and token == event.stop_id
            if ends and not self._params.include_stop_str_in_output:
                return
            self._take_text(self._detokenizer.push(token), fresh)
            self._look_ahead(fresh)
            if fresh.match is not None:
                return

    def _take_text(self, text: str, fresh: _Fresh) -> None:
        """Search newly certain text for stop strings and append the text to ``fresh``, except text held back.

        Text made before ``min_tokens`` completes no stop string, even if the text was held back until later.
        """
        self._decoded += len(text)
        if len(self.token_ids) < self._params.min_tokens:
            self._exempt = max(self._exempt, self._decoded)
        if self._scope is None:
            self._search(text, fresh)
        elif text:
            self._search_stretches(self._scope.push(text), fresh)

    def _search_stretches(self, stretches: Iterable[tuple[bool, str]], fresh: _Fresh) -> None:
        """Search the content stretches and append all other text to ``fresh`` unsearched.

        A stop string lies within one content stretch.
        """
        for content, text in stretches:
            if fresh.match is not None:
                return
            if content:
                self._search(text, fresh)
            else:
                # Other text ends the stretch: a stop string cannot continue behind it.
                fresh.text += self._stops.reset() + text
                self._searched += len(text)

    def _search(self, text: str, fresh: _Fresh) -> None:
        """Search ``text``, with the exempt part first, and append certain text to ``fresh``.

        Set ``fresh.match`` at a completed stop string.
        """
        # Split ``text`` at the end of the exempt part. The automata must see both parts.
        exempt = min(max(self._exempt - self._searched, 0), len(text))
        self._searched += len(text)
        for piece, ignore in ((text[:exempt], True), (text[exempt:], False)):
            if not piece:
                continue
            kept = self._stops.push(piece, ignore=ignore or self._replays)
            if isinstance(kept, StopMatch):
                fresh.match = kept
                stop = kept.stop if self._params.include_stop_str_in_output else ""
                fresh.text += kept.text + stop
                return
            fresh.text += kept

    def _look_ahead(self, fresh: _Fresh) -> None:
        """End the text if complete held-back characters already complete a stop string: set ``fresh.match``.

        No later token can then change the held characters. With a scope, the characters wait until their
        stretch is certain.
        """
        if fresh.match is not None or not self._stops.active:
            return
        # ``preview`` does not change the detokenizer; ``finish`` below does.
        held = self._detokenizer.preview()
        if len(self.token_ids) < self._params.min_tokens:
            self._exempt = max(self._exempt, self._decoded + len(held))
        elif self._scope is None and self._stops.would_match(
            held, skip=max(self._exempt - self._searched, 0)
        ):
            self._take_text(self._detokenizer.finish(), fresh)

    def _take_rest(self, fresh: _Fresh) -> None:
        """Append all held-back text to ``fresh`` at an end of the sequence. A stop string may still match."""
        self._take_text(self._detokenizer.finish(), fresh)
        if self._scope is not None and fresh.match is None:
            self._search_stretches(self._scope.finish(), fresh)
        if fresh.match is None:
            fresh.text += self._stops.finish()

    def _delta(self, fresh: _Fresh) -> TextDelta:
        """Append the changes of ``fresh`` to ``text`` and ``logprobs``, and return the changes as a delta."""
        self._texts.append(fresh.text)
        logprobs = None
        if self.logprobs is not None:
            logprobs = Logprobs(self._tokenizer)
            if fresh.logprobs is not None:
                logprobs.add(fresh.logprobs)
                if self._keep_logprobs:
                    self.logprobs.add(fresh.logprobs)
        return TextDelta(
            index=self.index,
            text=fresh.text,
            token_ids=tuple(fresh.token_ids),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            send_finish=fresh.send_finish,
        )

    def _end(
        self,
        fresh: _Fresh,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: ErrorInfo | None = None,
        send_finish: bool = False,
    ) -> TextDelta:
        """Set ``finish_reason``, ``stop_reason`` and ``error``, and return the last delta."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.error = error
        fresh.send_finish = send_finish
        return self._delta(fresh)


def routed_experts(first: Choice, own: Choice, num_prompt: int, shape: RouteShape) -> np.ndarray | None:
    """Return the experts of ``own``, uint8 or uint16 [tokens, layers, top_k]; None without routes.

    The tokens are prompt and output without the last token, which was never computed. ``first``: the first
    sample, which has the routes of the shared prompt.
    """
    made = joined(own.routes)
    if made is None:
        return None
    shared = joined(first.routes)
    pieces = [made]
    if shared is not None and shared.start < made.start and (part := shared.part(shared.start, made.start)):
        pieces.insert(0, part)
    whole = joined(pieces)
    assert whole is not None
    # Tokens behind a stop string do not count.
    cut = whole.part(whole.start, num_prompt + len(own.token_ids) - 1)
    return None if cut is None else cut.array().astype(shape.dtype)


class _Fresh:
    """The changes made by one event so far."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: LogprobColumns | None = None
        self.match: StopMatch | None = None
        self.send_finish = False
