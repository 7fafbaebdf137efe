"""An open sequence's request and output so far: enough for another instance to continue it.

The Submit made by ``again`` carries every token that came, so penalties, limits and stops count them, and
the next token is drawn at the next position. Prompt logprobs that are computed twice (they came
before the first token) are dropped here, so a reader of the events gets each once.

A sequence may be at two instances at once, a *pair*: one computes its prompt, and tells the first token; the
other one goes on, and tells that token, too. Each sending, to one or to both, is an *attempt* with a number
of its own. Events carry the number, so late events of an earlier attempt are recognized, and the position of
their tokens, so that what both tell is taken once. Instances that encode its images for the one that computes
its prompt have a part in the attempt until they have sent the embeddings, and tell no token.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from weft.common.errors import EndedElsewhere, ImageFailed, NotGreeted
from weft.routing.policy import PromptHashes
from weft.types.messages import LogprobColumns, Submit, TokenEvent, ids_to_bytes


class LedgerEntry:
    """One open sequence, and what came of it so far."""

    __slots__ = (
        "attempt",
        "cached",
        "computed",
        "continued",
        "encoders",
        "hashes",
        "held",
        "landed",
        "losses",
        "orphaned",
        "pair",
        "pinned",
        "places",
        "prompt_logprobs",
        "refused",
        "skip",
        "submit",
        "tokens",
    )

    def __init__(self, submit: Submit, hashes: PromptHashes | None = None, pinned: str | None = None) -> None:
        self.submit = submit
        """The request."""
        self.hashes = hashes
        """Block hashes of the prompt; None while they are not known."""
        self.pinned = pinned
        """The only instance that may compute it."""
        self.tokens: array[int] = array("i")
        """Output tokens so far."""
        self.places: dict[str, int] = {}
        """Instance -> attempt, of the instances that work on the sequence."""
        self.pair: tuple[str, str] | None = None
        """(instance that computes the prompt, instance that decodes) of the present attempt; None where one
        instance does both."""
        self.encoders: dict[str, None] = {}
        """Instances that encode images of it in the present attempt and have not said that they are done; as
        an ordered set. They are among ``places``."""
        self.computed = False
        """Whether a token came in the present attempt: so its prompt is computed, with all images."""
        self.held: list[TokenEvent] = []
        """What the one that decodes has said while the other one was not done with the sequence."""
        self.landed = False
        """Whether the one that decodes has told a token in the present attempt: so it has the cache."""
        self.orphaned = False
        """Whether the one that computed its prompt in the present attempt was lost before that."""
        self.attempt = -1
        """Number of the latest attempt; -1 before the first."""
        self.refused: dict[str, int] = {}
        """Instance -> how often it refused the sequence or gave it back since the last token."""
        self.losses = 0
        """Instances that were lost while they worked on it."""
        self.prompt_logprobs = 0
        """Positions of prompt logprobs received."""
        self.skip = 0
        """Positions of prompt logprobs to drop from the present attempt: they came in an earlier one."""
        self.cached = 0
        """Prompt tokens that its first instance found in its cache."""
        self.continued = False
        """Whether the present attempt continues after tokens of an earlier one."""

    @property
    def position(self) -> int:
        """Output tokens so far, those that came with the request among them."""
        return len(self.submit.emitted_ids) // 4 + len(self.tokens)

    @property
    def sender(self) -> str | None:
        """The instance of a pair that computes the prompt, until it has said all that it has to say."""
        return self.pair[0] if self.pair is not None and self.pair[0] in self.places else None

    def partner(self, name: str) -> str | None:
        """The other instance that makes tokens of it beside ``name``; to one that encodes, the one that
        computes the prompt."""
        if name in self.encoders and self.pair is not None:
            return self.sender
        return next((other for other in self.places if other != name and other not in self.encoders), None)

    def peer(self, name: str) -> str | None:
        """Whose end ``name`` tells of when it says that its peer's process has ended; None where several may
        be meant. The sender of a pair keeps the cache until it has landed, also when it has moved."""
        if self.pair is not None and self.receives(name):
            return self.pair[0]
        return None if self.encoders and name not in self.encoders else self.partner(name)

    def ends_elsewhere(self, name: str, why: str) -> bool:
        """Return True if ``name`` gives the sequence back with the code ``why`` since its partner has reached
        the end. The partner's event with the end comes over another link, and is still on its way.
        """
        return why == EndedElsewhere.code and self.partner(name) is not None

    def receives(self, name: str) -> bool:
        """Whether ``name`` decodes what another instance has computed."""
        return self.pair is not None and self.pair[1] == name

    @property
    def needs_sender(self) -> bool:
        """Whether something that only the sender can tell is still to come."""
        if not any(event.token_ids for event in self.held):
            return True
        params, prompt = self.submit.params, len(self.submit.prompt_ids) // 4
        asked = params.prompt_logprobs >= 0 and self.submit.choice == 0 and not self.position
        return asked and self.prompt_logprobs < prompt - 1

    def refuse(self, name: str) -> int:
        """``name`` refused it, or gave it back. Returns how often it did so since the last token."""
        self.refused[name] = self.refused.get(name, 0) + 1
        return self.refused[name]

    def left(self) -> None:
        """No instance works on it now."""
        self.places.clear()
        self.encoders.clear()
        self.held.clear()
        self.pair = None
        self.landed = self.computed = self.orphaned = False

    def again(self) -> Submit:
        """The Submit of the next attempt, which continues after all tokens so far."""
        self.attempt += 1
        self.skip = self.prompt_logprobs
        if not self.tokens:
            return msgspec.structs.replace(self.submit, attempt=self.attempt)
        self.continued = True
        emitted = self.submit.emitted_ids + ids_to_bytes(np.asarray(self.tokens, np.int32))
        return msgspec.structs.replace(self.submit, attempt=self.attempt, emitted_ids=emitted)

    def in_turn(self, name: str, event: TokenEvent) -> TokenEvent | None:
        """What to take of an event that ``name`` sent; None when it is held until the sender is done.

        Where tokens before it are missing, and nobody is left to tell them, ``name`` has given the sequence
        back: that is the event returned.
        """
        goes_on = event.finish in (None, "stop", "length")
        if self.sender not in (None, name):
            if goes_on:
                self.held.append(event)
                return None
        elif event.position <= self.position:
            return event
        finish = "evicted" if goes_on else event.finish
        return msgspec.structs.replace(event, token_ids=(), logprobs=None, finish=finish)

    def take(self, event: TokenEvent, receives: bool = False) -> TokenEvent | None:
        """Notes an event of its present attempt. Returns what is new of it; None when nothing is.

        ``receives``: it is of the instance that decodes what another one has computed.
        """
        told = event.prompt_logprobs is not None
        if event.cache_miss is not None:  # of its first instance alone: others would tell of themselves
            self.submit = msgspec.structs.replace(self.submit, explain=False)
        self.landed = self.landed or (receives and bool(event.token_ids))
        known = min(self.position - event.position, len(event.token_ids)) if event.position >= 0 else 0
        if known > 0:
            event = _after(event, known)
        if event.token_ids:
            self.tokens.extend(event.token_ids)
            self.refused.clear()
        if not self.continued and not receives:
            self.cached = max(self.cached, event.num_cached)
        elif event.num_cached != self.cached:
            event = msgspec.structs.replace(event, num_cached=self.cached)
        if told:
            event = self._fresh_prompt(event, receives)
        nothing = not event.token_ids and event.finish is None and event.prompt_logprobs is None
        return None if nothing and (known > 0 or told) else event

    def _fresh_prompt(self, event: TokenEvent, receives: bool) -> TokenEvent:
        """The event without prompt logprobs that came already."""
        columns = event.prompt_logprobs
        if columns is None:
            return event
        count = columns.positions
        dropped = count if receives else min(self.skip, count)
        if not receives:
            self.skip -= dropped
            self.prompt_logprobs += count - dropped
        if not dropped:
            return event
        fresh = _without_first(columns, dropped) if dropped < count else None
        return msgspec.structs.replace(event, prompt_logprobs=fresh)


class Unlanded:
    """Sequences whose sender was lost when it had moved, and whose receiver has told no token yet.

    It may have all of the cache, or still get it from memory that outlives the sender. If not, it knows by
    itself where it sees that the sender has ended, or had heard of it; on another host it may know neither.
    """

    def __init__(self) -> None:
        self._due: deque[tuple[float, LedgerEntry, int]] = deque()
        """(when it is too late, sequence, attempt), in order of time."""

    def add(self, sender: str, entries: Iterable[LedgerEntry], due: float) -> None:
        """``sender`` is lost. ``due``: not before that of an earlier call."""
        for entry in entries:
            if entry.pair is not None and entry.pair[0] == sender and not entry.landed:
                entry.orphaned = True
                self._due.append((due, entry, entry.attempt))

    def deadline(self) -> float:
        """When ``late`` may have something; inf for never."""
        return self._due[0][0] if self._due else math.inf

    def stall(self, seconds: float) -> None:
        """The front stood still for ``seconds``: what receivers said meanwhile may be unread."""
        self._due = deque((due + seconds, entry, attempt) for due, entry, attempt in self._due)

    def late(self, now: float) -> list[LedgerEntry]:
        """Sequences that are still where they were, and have waited for too long."""
        found = []
        while self._due and self._due[0][0] <= now:
            _, entry, attempt = self._due.popleft()
            if entry.attempt == attempt and entry.pair is not None and not entry.landed:
                found.append(entry)
        return found


def by_request(
    sequences: Iterable[int], entries: Mapping[int, LedgerEntry], images: bool = True
) -> dict[int, list[int]]:
    """``sequences`` in groups of one prompt, in order. Without ``images`` none that has some, unless it is
    pinned.
    """
    made: dict[int, list[int]] = {}
    for sequence in sequences:
        entry = entries[sequence]
        if images or not entry.submit.media or entry.pinned is not None:
            made.setdefault(entry.submit.request, []).append(sequence)
    return made


def for_good(event: TokenEvent) -> TokenEvent:
    """``event``, or the sequence's end with an error where it gives the sequence back because an image
    cannot be encoded: that would fail again elsewhere. The encoding instance says the same, and may be heard
    later."""
    if event.error is None or event.error.code != ImageFailed.code:
        return event
    return msgspec.structs.replace(event, finish="error")


def is_refusal(event: TokenEvent) -> bool:
    """Whether an instance has no room for the sequence, and another one may have."""
    error = event.error
    return event.finish == "error" and error is not None and error.blame == "capacity" and error.retryable


def was_not_greeted(event: TokenEvent) -> bool:
    """Return True where a head refuses a sequence because it does not know the connection."""
    return event.error is not None and event.error.code == NotGreeted.code


def _after(event: TokenEvent, count: int) -> TokenEvent:
    """The event without its first ``count`` tokens."""
    left = event.token_ids[count:]
    columns = event.logprobs
    if columns is not None:
        columns = _without_first(columns, count) if count < columns.positions else None
    return msgspec.structs.replace(
        event,
        token_ids=left,
        logprobs=columns,
        position=event.position + count,
        accepted=min(event.accepted, len(left)),
    )


def _without_first(columns: LogprobColumns, count: int) -> LogprobColumns:
    wide = 4 * columns.width * count
    return LogprobColumns(
        width=columns.width,
        ids=columns.ids[wide:],
        values=columns.values[wide:],
        rank=columns.rank[4 * count :],
    )
