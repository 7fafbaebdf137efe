"""The pause of a whole server, as the fleet sees the pause: which sequences wait for ``Released``.

    Held(running=False)   new sequences wait; begun sequences run to their ends
    Held(running=True)    all sequences wait, away from all instances
    Released              waiting sequences are placed again

A waiting sequence stays parked, with all tokens so far, and continues without a change of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.control.fleet.ledger import LedgerEntry


class ServerPause:
    """Marks the open sequences that wait for the end of the pause (``LedgerEntry.waits``)."""

    def __init__(self, entries: dict[int, LedgerEntry]) -> None:
        """``entries``: all open sequences, read only."""
        self._entries = entries
        self._held = self._whole = False

    @property
    def held(self) -> bool:
        """True from ``Held`` until ``Released``."""
        return self._held

    @property
    def running(self) -> int:
        """Number of open sequences that do not wait for the end of the pause."""
        return sum(not entry.waits for entry in self._entries.values())

    def hold(self, running: bool, unread: Iterable[int]) -> list[int]:
        """Begin or extend the pause. Return the sequences at instances that must leave the instances.

        With ``running``, begun sequences wait, too. ``unread``: sequences of slow clients. The sequences are
        at no instance, and wait.
        """
        self._held, self._whole = True, self._whole or running
        for sequence in unread:
            self.opened(sequence, begun=False)
        if not self._whole:
            return []
        for sequence in self._entries:
            self.opened(sequence, begun=False)
        return [one for one, entry in self._entries.items() if entry.waits and entry.places]

    def release(self) -> None:
        """End the pause."""
        self._held = self._whole = False
        for entry in self._entries.values():
            entry.waits = False

    def opened(self, sequence: int, begun: bool) -> None:
        """Let a new sequence wait during a pause. ``begun``: the request ran before the sequence.

        Sequences that prove readiness never wait: the sequences are pinned to one instance.
        """
        entry = self._entries[sequence]
        if self._held and entry.pinned is None and (self._whole or not begun):
            entry.waits = True

    def admitted(self, ready: list[int]) -> list[int]:
        """Return the members of ``ready`` that an instance may get."""
        return [one for one in ready if not self._entries[one].waits] if self._held else ready
