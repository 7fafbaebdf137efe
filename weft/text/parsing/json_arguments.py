"""Arguments of a call that are a JSON object, read at a tape's cursor while they stream."""

from __future__ import annotations

from typing import TypeAlias

from weft.text.parsing.call_ends import CallEnds
from weft.text.parsing.json_text import JsonObjectScanner, StringDecoder
from weft.text.parsing.tape import Reading, Tape, Texts

MAX_HELD = 8192
"""Arguments that stand before the name they belong to are held back up to this many characters."""
_WINDOW = 512
"""Characters of arguments that are looked at together."""
Span: TypeAlias = tuple[int, int]


class JsonReader:
    """Reads the arguments of calls that have begun; ``held`` reads those of one that has not."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def read(self, ends: CallEnds) -> Reading[bool]:
        """Reads an object; whether it is whole. The call's end may stand in place of its last brackets.

        A string that is not closed ends before a line that ends the call, so that calls behind it are found.
        """
        tape = self._tape
        scanner = JsonObjectScanner()
        marks = Texts("\n" + text for text in (*ends.closings, *ends.openings) if len(text) > 1)
        while not scanner.whole and not scanner.broken:
            text = tape.slice(tape.at, min(tape.end, tape.at + _WINDOW))
            match = marks.pattern.search(text)
            held = 0 if tape.ended else marks.held(text)
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
        """Reads an object that is quoted as a whole, behind the quote; whether it is whole.

        A quote that does not end the object is one of its own that misses its backslash.
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
            text = '"' if text is None else text
            if text.strip() if scanner.whole else self._take(scanner, text) < len(text):
                break
            tape.at += 1
            tape.arguments(scanner.written())
        scanner.give_up()
        tape.arguments(scanner.written(), tape.done)
        return False

    def held(self) -> Reading[tuple[Span, str] | None]:
        """Reads an object without giving it out: where it stands, and its text. None where it breaks."""
        tape = self._tape
        start = tape.at
        scanner = JsonObjectScanner()
        while True:
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
        """Closes an object at the output's end, or where the call's end or another call follows."""
        tape = self._tape
        start = tape.at
        here = tape.ended and start == tape.end
        if not here:
            yield from tape.blank()
            here = (yield from tape.literal(*ends.closings, *ends.openings)) is not None
            tape.at = start
        return here and scanner.finish()
