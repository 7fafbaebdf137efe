"""Input of ``weft chat``: a terminal with history and multi-line input, or any file."""

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

from weft.cli.chat.chat_session import COMMANDS, unfinished
from weft.common.errors import ConfigError


class Lines(Protocol):
    """Source of user input."""

    stays: bool
    """True if Ctrl-C interrupts only the present action, not the program."""

    def ask(self, question: str = "") -> str | None:
        """Return the next input, which may have several lines; None at the end of input.

        ``question`` replaces the usual prompt. Raise KeyboardInterrupt at Ctrl-C.
        """


class PlainLines:
    """Lines of a file. Three quotes begin and end a multi-line input."""

    stays = False

    def __init__(self, source: TextIO | None = None) -> None:
        self._source = source or sys.stdin

    def ask(self, question: str = "") -> str | None:
        """Return the next input, or None at the end of the file. Shows nothing. Raise ConfigError for bytes
        that are no text."""
        try:
            text = self._source.readline()
            while unfinished(text) and (line := self._source.readline()):
                text += line
        except UnicodeDecodeError:
            raise ConfigError("standard input is not UTF-8 text") from None
        return text or None


class TerminalLines:
    """A terminal: arrow keys move through the history, Alt-Enter starts a new line, Enter sends."""

    stays = True

    def __init__(self, history: Path | None, warn: Callable[[str], None]) -> None:
        """``history``: file of the input history, None for no file.

        ``warn`` receives the reason if the file fails.
        """
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
        """Return the next input. Ctrl-D on an empty line ends the input."""
        try:
            return self._session.prompt([("class:prompt", question or "> ")])
        except EOFError:
            return None


def _open_history(path: Path | None, warn: Callable[[str], None]) -> History:
    """Return the history in ``path``, in a file that only the user can read; made if missing.

    Fall back to memory: with None, or with a warning if the file fails.
    """
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
    """Return the key bindings: Enter sends a finished input, Alt-Enter starts a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "c-j")  # some terminals send c-j for Enter
    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
