"""What each open sequence was asked and has given: enough for another head to go on with it.

The Submit made by ``again`` carries every token that came, so penalties, limits and stops count them, and
the next token is drawn at the next position. What a head computes twice (prompt logprobs that came before the
first token) is dropped here, so whoever reads the events sees each thing once.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from weft.common.errors import EngineDead
from weft.types.messages import LogprobColumns, Submit, TokenEvent, ids_to_bytes

MOST_LOSSES = 3
"""Heads that a sequence may lose. One that is open whenever a head dies may be why it dies."""


class _Entry:
    __slots__ = ("again", "cached", "losses", "prompt_logprobs", "skip", "submit", "tokens", "waits")

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.tokens: array[int] = array("i")
        self.prompt_logprobs = 0
        """Prompt logprobs that came: positions."""
        self.skip = 0
        """Of those that the present head will send, the first ones came before."""
        self.losses = 0
        self.waits = False
        """Whether it has no head, and has lost none."""
        self.cached = 0
        """Prompt tokens that its first head found in its cache."""
        self.again = False
        """Whether the present head goes on with what another one, or the same earlier, has begun."""


class Ledger:
    """Open sequences by id."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    def open(self, submit: Submit) -> None:
        """A sequence starts."""
        self._entries[submit.sequence] = _Entry(submit)

    def wait(self, sequence: int) -> None:
        """It has no head now, and has lost none: the next ``again`` counts as no loss."""
        self._entries[sequence].waits = True

    def waits(self, sequence: int) -> bool:
        """Whether that is so."""
        return self._entries[sequence].waits

    def close(self, sequence: int) -> None:
        """It ended, or nobody wants it any more. Idempotent."""
        self._entries.pop(sequence, None)

    def take(self, event: TokenEvent) -> TokenEvent | None:
        """Notes an event of an open sequence. Returns what is new of it; None when nothing is."""
        entry = self._entries.get(event.sequence)
        if entry is None:
            return None
        entry.tokens.extend(event.token_ids)
        if not entry.again:
            entry.cached = max(entry.cached, event.num_cached)
        elif event.num_cached != entry.cached:
            event = msgspec.structs.replace(event, num_cached=entry.cached)
        columns = event.prompt_logprobs
        if columns is not None:
            count = len(columns.rank) // 4
            dropped = min(entry.skip, count)
            entry.skip -= dropped
            entry.prompt_logprobs += count - dropped
            if dropped:
                rest = _without_first(columns, dropped) if dropped < count else None
                event = msgspec.structs.replace(event, prompt_logprobs=rest)
                if rest is None and not event.token_ids and event.finish is None:
                    return None
        if event.finish is not None:
            self.close(event.sequence)
        return event

    def again(self, sequence: int) -> Submit:
        """The Submit with which a head goes on, since the last one was lost (but see ``wait``).

        Raises EngineDead when it has lost too many, and KeyError when it is not open.
        """
        entry = self._entries[sequence]
        entry.losses += not entry.waits
        entry.waits = False
        if entry.losses > MOST_LOSSES:
            raise EngineDead(f"the engine was lost {entry.losses} times while it worked on this request")
        entry.skip = entry.prompt_logprobs
        if not entry.tokens:
            return entry.submit
        entry.again = True
        emitted = entry.submit.emitted_ids + ids_to_bytes(np.asarray(entry.tokens, np.int32))
        return msgspec.structs.replace(entry.submit, emitted_ids=emitted)

    def computed(self, sequence: int) -> bool:
        """Whether its prompt has been computed, as far as events tell."""
        entry = self._entries.get(sequence)
        return entry is not None and len(entry.tokens) > 0


def _without_first(columns: LogprobColumns, count: int) -> LogprobColumns:
    wide = 4 * columns.width * count
    return LogprobColumns(
        width=columns.width,
        ids=columns.ids[wide:],
        values=columns.values[wide:],
        rank=columns.rank[4 * count :],
    )
