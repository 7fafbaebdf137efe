"""An open sequence's request and output so far: enough for another instance to continue it.

The Submit made by ``again`` carries every token that came, so penalties, limits and stops count them, and
the next token is drawn at the next position. Prompt logprobs that are computed twice (they came
before the first token) are dropped here, so a reader of the events gets each once.

A sequence may be at several instances at once. Each sending is an *attempt* with a number of its
own. Events carry the number, so late events of an earlier attempt are recognized.
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
        """The request."""
        self.hashes = hashes
        """Block hashes of the prompt; None while they are not known."""
        self.pinned = pinned
        """The only instance that may compute it."""
        self.tokens: array[int] = array("i")
        """Output tokens so far."""
        self.places: dict[str, int] = {}
        """Instance -> attempt, of the instances that work on the sequence."""
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

    def again(self) -> Submit:
        """The Submit of the next attempt, which continues after all tokens so far."""
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
