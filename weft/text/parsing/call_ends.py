"""Recognition of the end of a call, even if a part of the end is missing."""

from __future__ import annotations

from weft.text.parsing.tape import Reading, Tape


class CallEnds:
    """Recognizes the end of one call."""

    def __init__(self, tape: Tape, closings: tuple[str, ...], openings: tuple[str, ...]) -> None:
        """``closings``: texts at the end of a call, the call's own end first. ``openings``: texts at the
        start of another call.
        """
        self._tape = tape
        self.closings = closings
        self.openings = openings

    def here(self, *, closed: bool) -> Reading[bool | None]:
        """Decide if the call ends at the cursor. The cursor does not move.

        Return True if closing texts stand here and the output ends or another call begins behind these
        closing texts. Return None if other text follows the closing texts. Return False without a closing
        text. ``closed=True`` needs no closing text.
        """
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
