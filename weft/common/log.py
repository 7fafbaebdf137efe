"""Logging setup: lines of text or of JSON. Step logs contain counts, never token ids or text."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname).1s {process} %(name)s: %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"
_form = "text"
"""Format of log lines in the process: "text" or "json"."""


class _Json(logging.Formatter):
    """One JSON object per line; ``ts`` is UTC, to the millisecond."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "ts": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, which may have been replaced since the handler was created."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def head_name(replica: int, replicas: int, rank: int | None = None) -> str:
    """Return the process name in log lines of a replica's engine process, or of the worker ``rank``.

    ``head`` and ``rank 1``; for one of several replicas ``head 1`` and ``head 1 rank 3``. Ranks are counted
    over all replicas.
    """
    head = f"head {replica}" if replicas > 1 else "head" if rank is None else ""
    return head if rank is None else f"{head} rank {rank}".strip()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; ``name`` is the module's ``__name__``."""
    return logging.getLogger(name)


def joined(level: str, form: str) -> str:
    """Return level and format (``text`` or ``json``) as one word, the ``settings`` for other processes."""
    return level if form == "text" else f"{level}:{form}"


def settings() -> str:
    """Return the log settings of the process, to pass to a child process."""
    return joined(logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower(), _form)


def configure(settings: str = "info", process: str = "main") -> None:
    """Send Weft's logs to stderr, with the role ``process`` in each line. ``settings``: see ``joined``.

    A second call changes the level only.
    """
    global _form
    level, _, form = settings.partition(":")
    root = logging.getLogger("weft")
    root.setLevel(level.upper())
    root.propagate = False
    if not root.handlers:
        _form = form or "text"
        handler = _Stderr()
        text = logging.Formatter(_FORMAT.format(process=process), datefmt=_DATE)
        handler.setFormatter(_Json(process) if form == "json" else text)
        root.addHandler(handler)
