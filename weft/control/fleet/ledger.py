"""The request and the output of an open sequence: enough for another instance to continue the sequence.

The Submit made by ``next_attempt`` carries every received token. So penalties, limits and stops count these
tokens, and the next token is drawn at the next position. A later attempt may compute prompt logprobs again,
because prompt logprobs come before the first token. The ledger drops the repetition, so a reader gets each
logprob once.

A sequence may be at two instances at once, a *pair*. One instance computes the prompt and reports the first
token. The other instance decodes, and reports the first token, too. Each sending, to one instance or a pair,
is an *attempt* with a number of its own. Events carry the attempt number, so late events of an earlier
attempt are recognized. Events carry the position of their tokens, so a token reported twice is delivered
once. Encode instances belong to the attempt until all their embeddings have left, and report no token.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from weft.common.errors import EndedElsewhere, ImageFailed, NoCommonTransport, NotGreeted
from weft.control.fleet.policy import PromptHashes
from weft.types.messages import Submit, TokenEvent, ids_to_bytes


class LedgerEntry:
    """One open sequence, with the output so far."""

    __slots__ = (
        "attempt",
        "cached",
        "computed",
        "continued",
        "encoders",
        "hashes",
        "held",
        "losses",
        "orphaned",
        "pair",
        "pinned",
        "places",
        "prompt_logprobs",
        "received",
        "refused",
        "routed",
        "skip",
        "submit",
        "tokens",
        "waits",
    )

    def __init__(self, submit: Submit, hashes: PromptHashes | None = None, pinned: str | None = None) -> None:
        """For ``submit``, ``hashes`` and ``pinned`` see the fields of the same names."""
        self.submit = submit
        """The client's request for the sequence, without the changes of an attempt."""
        self.hashes = hashes
        """Block hashes of the prompt; None if not known."""
        self.pinned = pinned
        """The only instance allowed to compute the sequence; None for any."""
        self.tokens: array[int] = array("i")
        """Output tokens received so far."""
        self.places: dict[str, int] = {}
        """Instance -> attempt, for each instance at work on the sequence."""
        self.pair: tuple[str, str] | None = None
        """(instance that computes the prompt, instance that decodes) of the present attempt. None if one
        instance does both."""
        self.encoders: dict[str, None] = {}
        """Ordered set of the instances that still encode images in the present attempt. A subset of
        ``places``."""
        self.computed = False
        """True once a token came in the present attempt. The prompt, with all images, is computed by then."""
        self.held: list[TokenEvent] = []
        """Events of the decode instance, held back until the prefill instance has sent all its events."""
        self.received = False
        """True once the decode instance reported a token in the present attempt. By then the cache has
        arrived."""
        self.orphaned = False
        """True if the prefill instance of the present attempt was lost before ``received`` was set."""
        self.attempt = -1
        """Number of the latest attempt; -1 before the first."""
        self.refused: dict[str, int] = {}
        """Instance -> number of refusals and returns since the last token. These instances come last."""
        self.losses = 0
        """Number of instances lost while at work on the sequence."""
        self.prompt_logprobs = 0
        """Positions of prompt logprobs received."""
        self.skip = 0
        """Positions of prompt logprobs still to be dropped from the present attempt as repetitions."""
        self.routed = submit.routes
        """First position whose routes have not arrived; -1 without routes."""
        self.cached = 0
        """Prompt tokens found in the prefix cache of the first instance."""
        self.continued = False
        """True if the present attempt continues after tokens of an earlier attempt."""
        self.waits = False
        """True if the sequence waits for the end of a pause of the server."""

    @property
    def position(self) -> int:
        """Number of output tokens so far, including output tokens sent with the request."""
        return len(self.submit.emitted_ids) // 4 + len(self.tokens)

    @property
    def sender(self) -> str | None:
        """The prefill instance of a pair, until the last event of the instance; else None."""
        return self.pair[0] if self.pair is not None and self.pair[0] in self.places else None

    def partner(self, name: str) -> str | None:
        """Return the other instance that produces tokens of the sequence beside ``name``, or None.

        For an encode instance, return the instance that computes the prompt.
        """
        # An encode instance sends to the prefill instance only.
        if name in self.encoders and self.pair is not None:
            return self.sender
        return next((other for other in self.places if other != name and other not in self.encoders), None)

    def peer(self, name: str) -> str | None:
        """Return the instance meant by ``name`` in a report that the process of the peer has ended.

        None without a peer, or with several possible peers. A prefill instance keeps the cache until the
        transfer is received, and so remains the peer after the handoff.
        """
        if self.pair is not None and self.receives(name):
            return self.pair[0]
        return None if self.encoders and name not in self.encoders else self.partner(name)

    def ends_elsewhere(self, name: str, why: str) -> bool:
        """Return True if ``name`` returns the sequence with code ``why`` because its partner reached the end.

        The partner's final event comes over another link, and is still on its way.
        """
        return why == EndedElsewhere.code and self.partner(name) is not None

    def receives(self, name: str) -> bool:
        """Return True if ``name`` decodes a prompt computed by another instance."""
        return self.pair is not None and self.pair[1] == name

    @property
    def needs_sender(self) -> bool:
        """True if the prefill instance alone can report some of the output still to come."""
        # Until the decode instance has a token, the cache may still be missing there.
        if not any(event.token_ids for event in self.held):
            return True
        # Prompt logprobs come only from the prefill instance, and only for choice 0.
        params, prompt = self.submit.params, len(self.submit.prompt_ids) // 4
        wants_prompt = params.prompt_logprobs >= 0 and self.submit.choice == 0 and not self.position
        # The routes of the prompt also come only from the prefill instance.
        if 0 <= self.routed < prompt:
            return True
        return wants_prompt and self.prompt_logprobs < prompt - 1

    def refuse(self, name: str, why: str = "") -> int:
        """Count a refusal or return by ``name``, with code ``why``. Return the count since the last token.

        Without a common transport, either side of the pair may be the cause. So the next attempt also avoids
        the peer, but no refusal of the peer counts.
        """
        if (
            why == NoCommonTransport.code
            and name not in self.encoders
            and (peer := self.peer(name)) is not None
        ):
            self.refused.setdefault(peer, 0)
        self.refused[name] = self.refused.get(name, 0) + 1
        return self.refused[name]

    def left(self) -> None:
        """Record the removal of the sequence from all instances."""
        self.places.clear()
        self.encoders.clear()
        self.held.clear()
        self.pair = None
        self.received = self.computed = self.orphaned = False

    def next_attempt(self) -> Submit:
        """Begin the next attempt: advance ``attempt`` and ``skip``.

        Return the Submit, which continues after all tokens so far.
        """
        self.attempt += 1
        self.skip = self.prompt_logprobs
        if not self.tokens:
            return msgspec.structs.replace(self.submit, attempt=self.attempt, routes=self.routed)
        self.continued = True
        emitted = self.submit.emitted_ids + ids_to_bytes(np.asarray(self.tokens, np.int32))
        return msgspec.structs.replace(
            self.submit, attempt=self.attempt, emitted_ids=emitted, routes=self.routed
        )

    def in_order(self, name: str, event: TokenEvent) -> TokenEvent | None:
        """Return the event to apply for ``event`` of ``name``; None if held in ``held`` until the prefill
        instance is done.

        If earlier tokens are missing and no instance can still report these tokens, return an event without
        tokens: ``name`` then counts as having returned the sequence ("evicted").
        """
        is_output = event.finish in (None, "stop", "length")
        if self.sender not in (None, name):
            # Hold output until the prefill instance is done. A failure or return passes at once.
            if is_output:
                self.held.append(event)
                return None
        elif event.position <= self.position:
            return event
        finish = "evicted" if is_output else event.finish
        return msgspec.structs.replace(event, token_ids=(), logprobs=None, routes=None, finish=finish)

    def take(self, event: TokenEvent, receives: bool = False) -> TokenEvent | None:
        """Record an event of the present attempt: tokens, cache hits and prompt logprobs.

        Return the new part; None if nothing is new.

        ``receives``: the event comes from the decode instance of a pair. New tokens clear ``refused``.
        """
        has_prompt_logprobs = event.prompt_logprobs is not None
        # Only the first instance explains a cache miss: later instances have other caches.
        if event.cache_miss is not None:
            self.submit = msgspec.structs.replace(self.submit, explain=False)
        self.received = self.received or (receives and bool(event.token_ids))
        # Drop tokens received before: both instances of a pair report the first token.
        known = min(self.position - event.position, len(event.token_ids)) if event.position >= 0 else 0
        if known > 0:
            event = _after(event, known)
        if event.token_ids:
            self.tokens.extend(event.token_ids)
            self.refused.clear()
        # Clients see the cache hits from before the first token only.
        if not self.continued and not receives:
            self.cached = max(self.cached, event.num_cached)
        elif event.num_cached != self.cached:
            event = msgspec.structs.replace(event, num_cached=self.cached)
        if has_prompt_logprobs:
            event = self._fresh_prompt(event, receives)
        if event.routes is not None:
            fresh = event.routes.part(self.routed, event.routes.end)
            self.routed = max(self.routed, event.routes.end)
            event = msgspec.structs.replace(event, routes=fresh)
        empty = not event.token_ids and event.finish is None and event.prompt_logprobs is None
        empty = empty and event.routes is None
        # An event that was empty from the start still counts, for example as a proof of progress.
        return None if empty and (known > 0 or has_prompt_logprobs) else event

    def _fresh_prompt(self, event: TokenEvent, receives: bool) -> TokenEvent:
        """Return ``event`` without prompt logprobs already received, and count the rest in
        ``prompt_logprobs``. With ``receives``, all prompt logprobs are dropped: the prefill instance reports
        these.
        """
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
        fresh = columns.without(dropped) if dropped < count else None
        return msgspec.structs.replace(event, prompt_logprobs=fresh)


class Unreceived:
    """Sequences whose prefill instance was lost or left after the handoff, before a token of the decode
    instance.

    The decode instance may have the whole cache already, or may still read memory that outlives the sender.
    The decode instance detects a failed transfer only if the decode instance detects the end of the sender.
    The end of a sender on another host may stay undetected, so the wait has a deadline.
    """

    def __init__(self) -> None:
        self._due: deque[tuple[float, LedgerEntry, int]] = deque()
        """(deadline, sequence, attempt), in order of deadline."""

    def add(self, sender: str, entries: Iterable[LedgerEntry], due: float) -> None:
        """Add the affected ``entries`` of ``sender``, an instance that was lost or has left. ``due`` never
        decreases between calls."""
        for entry in entries:
            if entry.pair is not None and entry.pair[0] == sender and not entry.received:
                entry.orphaned = True
                self._due.append((due, entry, entry.attempt))

    def deadline(self) -> float:
        """Return the earliest time at which ``late`` may return a sequence; inf for never."""
        return self._due[0][0] if self._due else math.inf

    def stall(self, seconds: float) -> None:
        """Extend all deadlines by ``seconds``, because the API server was suspended and may have unread
        events."""
        self._due = deque((due + seconds, entry, attempt) for due, entry, attempt in self._due)

    def late(self, now: float) -> list[LedgerEntry]:
        """Remove and return the sequences past the deadline that are still in the same attempt without a
        token."""
        late = []
        while self._due and self._due[0][0] <= now:
            _, entry, attempt = self._due.popleft()
            if entry.attempt == attempt and entry.pair is not None and not entry.received:
                late.append(entry)
        return late


def by_request(
    sequences: Iterable[int], entries: Mapping[int, LedgerEntry], images: bool = True
) -> dict[int, list[int]]:
    """Return ``sequences`` grouped by prompt (request id -> sequences), in order.

    Without ``images``, leave out sequences with images, except pinned sequences.
    """
    groups: dict[int, list[int]] = {}
    for sequence in sequences:
        entry = entries[sequence]
        if images or not entry.submit.media or entry.pinned is not None:
            groups.setdefault(entry.submit.request, []).append(sequence)
    return groups


def with_final_error(event: TokenEvent) -> TokenEvent:
    """Return ``event``, but with finish "error" if the reason is an image that cannot be encoded.

    Another instance would fail on the same image. The encode instance reports the same error, possibly later.
    """
    if event.error is None or event.error.code != ImageFailed.code:
        return event
    return msgspec.structs.replace(event, finish="error")


def is_refusal(event: TokenEvent) -> bool:
    """Return True if the event refuses the sequence for lack of room, and another instance may have room."""
    error = event.error
    return event.finish == "error" and error is not None and error.blame == "capacity" and error.retryable


def was_not_greeted(event: TokenEvent) -> bool:
    """Return True if an engine refuses a sequence because the engine does not know the connection."""
    return event.error is not None and event.error.code == NotGreeted.code


def _after(event: TokenEvent, count: int) -> TokenEvent:
    """Return the event without the first ``count`` tokens."""
    left = event.token_ids[count:]
    columns = event.logprobs
    if columns is not None:
        columns = columns.without(count) if count < columns.positions else None
    return msgspec.structs.replace(
        event,
        token_ids=left,
        logprobs=columns,
        position=event.position + count,
        accepted=min(event.accepted, len(left)),
    )
