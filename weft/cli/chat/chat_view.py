"""Display of replies in ``weft chat``: growing Markdown on a terminal, plain text elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from typing import Protocol, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text as RichText

from weft.cli.chat.chat_client import AnswerPiece, Piece, ReasoningPiece
from weft.cli.chat.chat_session import ChatCall, Reply

REFRESH = 12
"""Redraws per second of the end of a growing reply."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class View(Protocol):
    """Display of replies."""

    def show(self, pieces: Iterable[Piece], reply: Reply) -> None:
        """Take and show all pieces. If an exception passes, the text shown so far stays."""

    def note(self, text: str) -> None:
        """Show a line from the program. The line may contain words of the server."""

    def problem(self, text: str) -> None:
        """Show an error."""


def clean(text: str) -> str:
    """Return ``text`` without control characters, so that a reply cannot control the terminal."""
    return _CONTROL.sub("", text)


class PlainView:
    """Display as plain text, without delay."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    def show(self, pieces: Iterable[Piece], reply: Reply) -> None:
        """Show ``pieces`` as they arrive and add each to ``reply``.

        Reasoning stands in separate lines, before the text that follows. Errors of ``pieces`` pass through
        after a line end.
        """
        kind: type[object] | None = None
        try:
            for piece in pieces:
                reply.take(piece)
                if not isinstance(piece, AnswerPiece | ReasoningPiece):
                    continue
                # ``kind``: type of the last shown piece, None before the first.
                if kind is ReasoningPiece and isinstance(piece, AnswerPiece):
                    self._write("\n")
                elif kind is not ReasoningPiece and isinstance(piece, ReasoningPiece):
                    self._write("\n[thinks] " if kind else "[thinks] ")
                kind = type(piece)
                self._write(clean(piece.text))
        finally:
            if kind is not None:
                self._write("\n")
        for call in reply.calls:
            self._write(f"[calls] {describe(call)}\n")
        if (end := ending(reply)) is not None:
            self.note(end)

    def note(self, text: str) -> None:
        """Write to standard error: standard output has only replies."""
        self._err.write(clean(text) + "\n")
        self._err.flush()

    def problem(self, text: str) -> None:
        """Write to standard error."""
        self.note(f"weft chat: {text}")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class RichView:
    """Display as Markdown on a terminal. Finished blocks are printed once; only the last block is redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, pieces: Iterable[Piece], reply: Reply) -> None:
        """Show ``pieces`` as they arrive and add each to ``reply``.

        Reasoning is dim. Tool calls and timing follow the reply. After an error of ``pieces`` the rest of the
        text is printed and the error passes through.
        """
        began = time.monotonic()
        first: float | None = None
        growing = _Growing(self._console)
        try:
            with Live(growing.tail, console=self._console, refresh_per_second=REFRESH, transient=True):
                for piece in pieces:
                    first = first or time.monotonic()
                    reply.take(piece)
                    if isinstance(piece, AnswerPiece | ReasoningPiece):
                        growing.add(clean(piece.text), isinstance(piece, ReasoningPiece))
        # Also after an interruption: print the rest as permanent text.
        finally:
            growing.close()
        for call in reply.calls:
            self._console.print(RichText(f"→ {describe(call)}", style="cyan"))
        if (end := ending(reply)) is not None:
            self.note(end)
        if reply.end is not None and reply.end.tokens and first is not None:
            seconds = max(time.monotonic() - first, 1e-3)
            speed = f"{(reply.end.tokens - 1) / seconds:.0f} a second, " if reply.end.tokens > 1 else ""
            self.note(f"{reply.end.tokens} tokens, {speed}{first - began:.2f} s to the first")

    def note(self, text: str) -> None:
        """Show the line in dim text."""
        self._console.print(RichText(clean(text), style="dim"))

    def problem(self, text: str) -> None:
        """Show the error in red."""
        self._console.print(RichText(clean(text), style="red"))


class _Growing:
    """Growing text: finished blocks of Markdown are printed, the last block is redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._parser = MarkdownIt().enable("table").enable("strikethrough")
        self._reasoning = False
        self._text = ""
        """Text not printed yet."""
        # The redrawn part must fit on the screen: a terminal cannot erase lines above the screen.
        self.tail = _ViewBlock(RichText("...", style="dim"), False, max(console.size.height - 3, 1))

    def add(self, text: str, reasoning: bool) -> None:
        """Add the next piece. Print finished blocks; ``tail`` shows the rest."""
        done = ""
        if reasoning != self._reasoning:
            self._finish(self._text, "")
            self._reasoning = reasoning
        self._text += text
        if "\n" in text:
            lines = self._text.splitlines(keepends=True)
            done = "".join(lines[: self._last_block()])
        self._finish(done, self._text[len(done) :])

    def close(self) -> None:
        """Print the rest. Call after the end of the live display."""
        self._finish(self._text, "")

    def _finish(self, done: str, rest: str) -> None:
        """Print ``done``, unless blank; from now on ``tail`` shows ``rest``.

        Blank text stays in front of ``rest``.
        """
        printed = done.strip() != ""
        self._text = rest if printed or not done else done + rest
        gap = self.tail.gap
        self.tail.content = self._form(self._text)
        self.tail.gap = gap or printed
        if printed:
            block = _ViewBlock(self._form(done), gap)
            self._console.print(block, end="")

    def _last_block(self) -> int:
        """Return the line number at which the last block begins. Earlier blocks are finished."""
        if self._reasoning:
            return 0
        starts = [one.map[0] for one in self._parser.parse(self._text) if one.level == 0 and one.map]
        return max(starts, default=0)

    def _form(self, text: str) -> Markdown | RichText:
        """Return the text as a renderable."""
        if self._reasoning:
            return RichText(text.strip("\n"), style="dim italic")
        return Markdown(text)


class _ViewBlock:
    """Part of a text without blank lines at both ends, and with a blank line above if ``gap``."""

    def __init__(self, content: Markdown | RichText, gap: bool, most: int | None = None) -> None:
        """``most``: maximum number of lines to draw, counted from the end; None for all."""
        self.content = content
        self.gap = gap
        self._most = most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the content without blank lines at both ends: at most the last ``_most``."""
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        while lines and _blank(lines[-1]):
            lines.pop()
        while lines and _blank(lines[0]):
            lines.pop(0)
        # Blank line between the block and the block before.
        if self.gap and lines:
            yield Segment.line()
        for line in lines if self._most is None else lines[-self._most :]:
            yield from line
            yield Segment.line()


def _blank(line: list[Segment]) -> bool:
    """Return True if the line has neither text nor background colour."""
    return all(not one.text.strip() and (one.style is None or one.style.bgcolor is None) for one in line)


def describe(call: ChatCall) -> str:
    """Return a tool call as one line: ``weather({"city": "Oslo"})``."""
    return clean(f"{call.name}({call.arguments})")


def ending(reply: Reply) -> str | None:
    """Return a note on an unusual end of a reply, or None."""
    if reply.end is None or reply.end.reason in ("stop", "tool_calls", "function_call"):
        return None
    if reply.end.reason == "length":
        return "(the reply was cut off: --max-tokens or the end of the context is reached)"
    return f"(the reply ended with {clean(reply.end.reason)!r})"
