"""Where the lines of ``weft chat`` come from: a terminal with history and several lines, or any file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

from weft.launch.chat_session import COMMANDS, unfinished


class Lines(Protocol):
    """Where the lines of a user come from."""

    stays: bool
    """Whether Ctrl-C ends what goes on, and not the program."""

    def ask(self, question: str = "") -> str | None:
        """The next input, which may have several lines; None where there is none left.

        ``question``: what to show in place of the usual prompt. Raises KeyboardInterrupt at Ctrl-C.
        """


class PlainLines:
    """Lines of a file. Three quotes begin an input of several lines, and end it."""

    stays = False

    def __init__(self, source: TextIO | None = None) -> None:
        self._source = source or sys.stdin

    def ask(self, question: str = "") -> str | None:
        """Shows nothing."""
        text = self._source.readline()
        if not text:
            return None
        while unfinished(text) and (line := self._source.readline()):
            text += line
        return text


class TerminalLines:
    """A terminal: arrows walk through the history, Alt-Enter begins a new line, Enter sends."""

    stays = True

    def __init__(self, history: Path | None, warn: Callable[[str], None]) -> None:
        """``history``: where inputs are kept over sessions; None: nowhere. ``warn`` hears why not."""
        self._session: PromptSession[str] = PromptSession(
            history=_open_history(history, warn),
            completer=WordCompleter(list(COMMANDS), sentence=True),
            complete_while_typing=False,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation="  ",
            style=Style.from_dict({"prompt": "bold"}),
        )

    def ask(self, question: str = "") -> str | None:
        """Ctrl-D on an empty line is the end."""
        try:
            return self._session.prompt([("class:prompt", question or "> ")])
        except EOFError:
            return None


def _open_history(path: Path | None, warn: Callable[[str], None]) -> History:
    """A file that only its user can read."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        with contextlib.suppress(OSError):
            path.chmod(0o600)
    except OSError as error:
        warn(f"no history is kept: {path.name} can't be written ({(error.strerror or 'error').lower()})")
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "c-j")  # what some terminals send for it
    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
