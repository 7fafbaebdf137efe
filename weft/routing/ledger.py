"""What each open sequence was asked and has given: enough for another instance to go on with it.

The Submit made by ``again`` carries every token that came, so penalties, limits and stops count them, and
the next token is drawn at the next position. What is computed twice (prompt logprobs that came before the
first token) is dropped here, so whoever reads the events sees each thing once.

A sequence may be at several instances at once. Each time that it is sent anywhere is an *attempt* of its own,
which the events of it carry: so those of an earlier attempt, which may still be on their way, are told apart.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from weft.routing.policy import PromptHashes
from weft.types.messages import LogprobColumns, Submit, TokenEvent, ids_to_bytes


class LedgerEntry:
    """One open sequence."""

    __slots__ = (
        "attempt",
        "cached",
        "continued",
        "hashes",
        "losses",
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
        """What was asked."""
        self.hashes = hashes
        """Of its prompt, if they are known."""
        self.pinned = pinned
        """The only instance that may compute it."""
        self.tokens: array[int] = array("i")
        """What came."""
        self.places: dict[str, int] = {}
        """Instances that work on it -> their attempt."""
        self.attempt = -1
        """The latest."""
        self.refused: dict[str, int] = {}
        """Instances that refused it, or gave it back, since a token came, and how often."""
        self.losses = 0
        """Instances that were lost while they worked on it."""
        self.prompt_logprobs = 0
        """Prompt logprobs that came: positions."""
        self.skip = 0
        """Of those that the present attempt will send, the first ones came before."""
        self.cached = 0
        """Prompt tokens that its first instance found in its cache."""
        self.continued = False
        """Whether the present attempt goes on behind tokens of an earlier one."""

    def again(self) -> Submit:
        """The Submit of its next attempt: it goes on behind everything that came."""
        self.attempt += 1
        self.skip = self.prompt_logprobs
        if not self.tokens:
            return msgspec.structs.replace(self.submit, attempt=self.attempt)
        self.continued = True
        emitted = self.submit.emitted_ids + ids_to_bytes(np.asarray(self.tokens, np.int32))
        return msgspec.structs.replace(self.submit, attempt=self.attempt, emitted_ids=emitted)

    def take(self, event: TokenEvent) -> TokenEvent | None:
        """Notes an event of its present attempt. Returns what is new of it; None when nothing is."""
        self.tokens.extend(event.token_ids)
        if event.token_ids:
            self.refused.clear()
        if not self.continued:
            self.cached = max(self.cached, event.num_cached)
        elif event.num_cached != self.cached:
            event = msgspec.structs.replace(event, num_cached=self.cached)
        columns = event.prompt_logprobs
        if columns is None:
            return event
        count = columns.positions
        dropped = min(self.skip, count)
        self.skip -= dropped
        self.prompt_logprobs += count - dropped
        if not dropped:
            return event
        fresh = _without_first(columns, dropped) if dropped < count else None
        event = msgspec.structs.replace(event, prompt_logprobs=fresh)
        if fresh is None and not event.token_ids and event.finish is None:
            return None
        return event


def _without_first(columns: LogprobColumns, count: int) -> LogprobColumns:
    wide = 4 * columns.width * count
    return LogprobColumns(
        width=columns.width,
        ids=columns.ids[wide:],
        values=columns.values[wide:],
        rank=columns.rank[4 * count :],
    )
