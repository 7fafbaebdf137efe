"""Logging: one place, lines of text or of JSON. Step logs hold counts, never token ids or text."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname).1s {process} %(name)s: %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"
_form = "text"
"""The form of this process's lines."""


class _Json(logging.Formatter):
    """One JSON object a line; ``ts`` is UTC, to the millisecond."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
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
    """Writes to what ``sys.stderr`` is when a record comes, which may have been replaced since."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def head_name(replica: int, replicas: int, rank: int | None = None) -> str:
    """What lines of a replica's head name as their process, or those of its worker ``rank``.

    ``head`` and ``rank 1``; of one of several replicas ``head 1`` and ``head 1 rank 3``. Ranks are counted
    over all replicas, as everywhere in messages.
    """
    head = f"head {replica}" if replicas > 1 else "head" if rank is None else ""
    return head if rank is None else f"{head} rank {rank}".strip()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; ``name`` is its ``__name__``."""
    return logging.getLogger(name)


def joined(level: str, form: str) -> str:
    """Level and form (``text`` or ``json``) as one word, the ``settings`` that processes pass on."""
    return level if form == "text" else f"{level}:{form}"


def settings() -> str:
    """The settings of this process, for a process that it starts."""
    return joined(logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower(), _form)


def configure(settings: str = "info", process: str = "main") -> None:
    """Sends Weft's logs to stderr; each line names ``process``, its role. ``settings``: see ``joined``. Safe
    to call twice: the form of lines stays.
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
