"""Separate the content of an output from everything else while the text streams."""

from __future__ import annotations

from weft.text.parsing.declaration import OutputFormat, TextUse
from weft.text.parsing.parser import OutputSpec
from weft.text.parsing.parsing_engine import OutputEngine
from weft.text.parsing.tape import Tape


class _Noted(Tape):
    """A tape with a record of the boundaries between content and other text."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[bool, int]] = []
        """(True for content, end position) of each stretch since the last read."""

    def mark(self, use: TextUse, end: int) -> None:
        if end > self.done:
            self.noted.append((use == "content", end))
        super().mark(use, end)


class ContentScope:
    """Splits the text of one output into content and everything else (reasoning, calls, markup). No text is
    lost.
    """

    def __init__(self, declared: OutputFormat, spec: OutputSpec) -> None:
        """``spec`` names the parts to separate, as for the parser of the request."""
        self._tape = _Noted()
        self._engine = OutputEngine(declared, spec, self._tape)
        self._text = ""
        """Text without a decision yet."""
        self._done = 0
        """Absolute position of the first character of ``_text``."""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """Add ``text`` and return the stretches now certain: (True for content, text)."""
        self._text += text
        self._engine.feed(text)
        return self._taken()

    def finish(self) -> list[tuple[bool, str]]:
        """Return the remaining stretches at the end of the output."""
        self._engine.close()
        return self._taken()

    def _taken(self) -> list[tuple[bool, str]]:
        """Return the newly decided stretches as (is content, text), neighbours of the same sort joined, and
        forget the text.
        """
        noted, self._tape.noted = self._tape.noted, []
        stretches: list[tuple[bool, str]] = []
        start = 0
        for content, position in noted:
            end = position - self._done
            if stretches and stretches[-1][0] == content:
                stretches[-1] = (content, stretches[-1][1] + self._text[start:end])
            else:
                stretches.append((content, self._text[start:end]))
            start = end
        self._text = self._text[start:]
        self._done += start
        return stretches
