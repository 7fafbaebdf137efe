"""How ``weft chat`` shows replies: as Markdown that grows on a terminal, and as plain text elsewhere."""

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

from weft.launch.chat_client import Piece, Text, Thought
from weft.launch.chat_session import Call, Reply

REFRESH = 12
"""Times a second that the end of a growing reply is drawn."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class View(Protocol):
    """Shows one reply after the other."""

    def show(self, pieces: Iterable[Piece], reply: Reply) -> None:
        """Shows and takes pieces until they end. What it has drawn stays when an exception passes."""

    def note(self, text: str) -> None:
        """A line of the program's own, in which words of the server may stand."""

    def problem(self, text: str) -> None:
        """What went wrong."""


def clean(text: str) -> str:
    """Without control characters: a reply must not command the terminal."""
    return _CONTROL.sub("", text)


class PlainView:
    """Plain text, as it comes."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    def show(self, pieces: Iterable[Piece], reply: Reply) -> None:
        """Thoughts stand in lines of their own, before what follows them."""
        kind: type[object] | None = None
        try:
            for piece in pieces:
                reply.take(piece)
                if not isinstance(piece, Text | Thought):
                    continue
                if kind is Thought and isinstance(piece, Text):
                    self._write("\n")
                elif kind is not Thought and isinstance(piece, Thought):
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
        """On standard error: standard output has replies alone."""
        self._err.write(clean(text) + "\n")
        self._err.flush()

    def problem(self, text: str) -> None:
        """On standard error."""
        self.note(f"weft chat: {text}")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class RichView:
    """Markdown on a terminal. What is finished is printed once; only the last block is drawn again."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, pieces: Iterable[Piece], reply: Reply) -> None:
        """Thoughts are dim; calls and how long it took come behind the reply."""
        began = time.monotonic()
        first: float | None = None
        growing = _Growing(self._console)
        try:
            with Live(growing.tail, console=self._console, refresh_per_second=REFRESH, transient=True):
                for piece in pieces:
                    first = first or time.monotonic()
                    reply.take(piece)
                    if isinstance(piece, Text | Thought):
                        growing.add(clean(piece.text), isinstance(piece, Thought))
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
        """Dim."""
        self._console.print(RichText(clean(text), style="dim"))

    def problem(self, text: str) -> None:
        """Red."""
        self._console.print(RichText(clean(text), style="red"))


class _Growing:
    """Text that grows: blocks of Markdown that can change no more are printed, the last one is drawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._parser = MarkdownIt().enable("table").enable("strikethrough")
        self._thought = False
        self._text = ""
        """What is not printed yet."""
        # No more than the terminal can take back.
        self.tail = _Block(RichText("...", style="dim"), False, max(console.size.height - 3, 1))

    def add(self, text: str, thought: bool) -> None:
        """The next piece; ``tail`` is drawn meanwhile, and finished blocks are printed above it."""
        done = ""
        if thought != self._thought:
            self._finish(self._text, "")
            self._thought = thought
        self._text += text
        if "\n" in text:
            lines = self._text.splitlines(keepends=True)
            done = "".join(lines[: self._last_block()])
        self._finish(done, self._text[len(done) :])

    def close(self) -> None:
        """Prints the rest. Nothing may be drawn any more."""
        self._finish(self._text, "")

    def _finish(self, done: str, rest: str) -> None:
        """Prints ``done``; ``rest`` is what is drawn from now on."""
        printed = done.strip() != ""
        self._text = rest if printed or not done else done + rest
        gap = self.tail.gap
        self.tail.content = self._form(self._text)
        self.tail.gap = gap or printed
        if printed:
            block = _Block(self._form(done), gap)
            self._console.print(block, end="")

    def _last_block(self) -> int:
        """The line at which the last block begins: earlier ones are finished."""
        if self._thought:
            return 0
        starts = [one.map[0] for one in self._parser.parse(self._text) if one.level == 0 and one.map]
        return max(starts, default=0)

    def _form(self, text: str) -> Markdown | RichText:
        if self._thought:
            return RichText(text.strip("\n"), style="dim italic")
        return Markdown(text)


class _Block:
    """A part of a text without the empty lines around it, and with one above it if ``gap``."""

    def __init__(self, content: Markdown | RichText, gap: bool, most: int | None = None) -> None:
        """``most``: how many lines are drawn, the last ones."""
        self.content = content
        self.gap = gap
        self._most = most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        while lines and _blank(lines[-1]):
            lines.pop()
        while lines and _blank(lines[0]):
            lines.pop(0)
        if self.gap and lines:
            yield Segment.line()
        for line in lines if self._most is None else lines[-self._most :]:
            yield from line
            yield Segment.line()


def _blank(line: list[Segment]) -> bool:
    return all(not one.text.strip() and (one.style is None or one.style.bgcolor is None) for one in line)


def describe(call: Call) -> str:
    """A call in a line: ``weather({"city": "Oslo"})``."""
    return clean(f"{call.name}({call.arguments})")


def ending(reply: Reply) -> str | None:
    """Why a reply ended, where that is no ordinary end."""
    if reply.end is None or reply.end.reason in ("stop", "tool_calls", "function_call"):
        return None
    if reply.end.reason == "length":
        return "(the reply ends here: --max-tokens or the context is reached)"
    return f"(the reply ended with {clean(reply.end.reason)!r})"
