"""Where a call ends, also where a part of its end is missing."""

from __future__ import annotations

from weft.text.parsing.tape import Reading, Tape


class CallEnds:
    """Recognizes the end of one call."""

    def __init__(self, tape: Tape, closings: tuple[str, ...], openings: tuple[str, ...]) -> None:
        """``closings``: texts that end a call, its own end first. ``openings``: texts that begin another."""
        self._tape = tape
        self.closings = closings
        self.openings = openings

    def here(self, *, closed: bool) -> Reading[bool | None]:
        """True where the call ends at the cursor: texts that close a call stand here, and behind them the
        output ends or another call begins. None where other text follows them. ``closed``: no text that
        closes the call is needed. The cursor stays."""
        tape = self._tape
        start = tape.at
        found = closed
        while (yield from tape.blank()) and (yield from tape.literal(*self.closings)) is not None:
            found = True
        follows = yield from self._follows()
        tape.at = start
        if not found:
            return False
        return True if follows else None

    def _follows(self) -> Reading[bool]:
        tape = self._tape
        if not (yield from tape.peek()):
            return True
        return (yield from tape.literal(*self.openings)) is not None if self.openings else False
