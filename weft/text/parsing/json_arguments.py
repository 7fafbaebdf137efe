"""Read JSON objects as call arguments at a tape's cursor while the text streams."""

from __future__ import annotations

from typing import TypeAlias

from weft.text.parsing.call_ends import CallEnds
from weft.text.parsing.json_text import JsonObjectScanner, StringDecoder
from weft.text.parsing.tape import Reading, Tape, Texts

MAX_HELD = 8192
"""Maximum characters held back for arguments in front of the name of the call."""
_WINDOW = 512
"""Characters of arguments examined together."""
Span: TypeAlias = tuple[int, int]


class JsonReader:
    """Reads the arguments of begun calls. ``held`` reads arguments in front of a name, before the call has
    begun.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def read(self, ends: CallEnds) -> Reading[bool]:
        """Read an object and return True if the object is whole.

        The end of the call may replace the last brackets. The text goes to the tape's arguments piece by
        piece, also the text of a broken object. The cursor stands behind everything read.

        An unclosed string ends before a line with the end of the call. Otherwise the string would swallow the
        calls behind.
        """
        tape = self._tape
        scanner = JsonObjectScanner()
        marks = Texts("\n" + text for text in (*ends.closings, *ends.openings) if len(text) > 1)
        while not scanner.whole and not scanner.broken:
            text = tape.slice(tape.at, min(tape.end, tape.at + _WINDOW))
            match = marks.pattern.search(text)
            held = 0 if tape.ended else marks.held(text)
            # Keep back the text that may become the line with the end of the call.
            free = len(text) - held if match is None else match.start()
            if free:
                tape.at += self._take(scanner, text[:free])
                tape.arguments(scanner.written())
            elif match is not None:
                if scanner.in_string and (yield from ends.here(closed=False)):
                    break
                tape.at += self._take(scanner, "\n")
                tape.arguments(scanner.written())
            elif not (yield from tape.more()) and not held:
                break
        whole = scanner.whole or (yield from self._closes(scanner, ends))
        if not whole:
            scanner.give_up()
        tape.arguments(scanner.written(), tape.done)
        if whole and scanner.doubled and (yield from tape.literal("}")) is not None:
            tape.skip(tape.at)
        return whole

    def read_quoted(self) -> Reading[bool]:
        """Read an object quoted as a whole, from behind the opening quote. Return True if the object is
        whole. The text goes to the tape's arguments piece by piece, also the text of a broken object.

        A quote inside the incomplete object is taken as a string quote of the object with a missing
        backslash.
        """
        tape = self._tape
        scanner = JsonObjectScanner()
        decoder = StringDecoder()
        while char := (yield from tape.peek()):
            text = decoder.push(char)
            if text is None and scanner.whole:
                tape.at += 1
                tape.skip(tape.at)
                return True
            # The quote belongs to the object: repair the missing backslash.
            text = '"' if text is None else text
            if text.strip() if scanner.whole else self._take(scanner, text) < len(text):
                break
            tape.at += 1
            tape.arguments(scanner.written())
        scanner.give_up()
        tape.arguments(scanner.written(), tape.done)
        return False

    def held(self) -> Reading[tuple[Span, str] | None]:
        """Read an object of at most ``MAX_HELD`` characters without giving the object out.

        Return ((start, end), JSON text), with the cursor behind the object; None for a broken or longer
        object.
        """
        tape = self._tape
        start = tape.at
        scanner = JsonObjectScanner()
        while True:
            # The bound keeps a client from waiting for an endless object.
            text = tape.slice(tape.at, min(tape.end, tape.at + _WINDOW, start + MAX_HELD))
            tape.at += self._take(scanner, text)
            if scanner.whole:
                if scanner.doubled:
                    yield from tape.literal("}")
                return (start, tape.at), scanner.written()
            if scanner.broken or tape.at - start >= MAX_HELD:
                return None
            if tape.at == tape.end and not (yield from tape.more()):
                return None

    def _take(self, scanner: JsonObjectScanner, text: str) -> int:
        taken = scanner.take(text, 0)
        self._tape.work += scanner.work
        scanner.work = 0
        return taken

    def _closes(self, scanner: JsonObjectScanner, ends: CallEnds) -> Reading[bool]:
        """Close an incomplete object if the output ends here, or the end of the call or another call follows.

        Return True if the object is whole then. The cursor does not move.
        """
        tape = self._tape
        start = tape.at
        here = tape.ended and start == tape.end
        if not here:
            yield from tape.blank()
            here = (yield from tape.literal(*ends.closings, *ends.openings)) is not None
            tape.at = start
        return here and scanner.finish()
