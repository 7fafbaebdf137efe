"""Logging: one format, one place. Step logs hold counts, never token ids or text."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname).1s {process} %(name)s: %(message)s"


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


def configure(level: str = "info", process: str = "main") -> None:
    """Sends Weft's logs to stderr at ``level``; each line names ``process``, its role. Safe to call twice."""
    root = logging.getLogger("weft")
    root.setLevel(level.upper())
    root.propagate = False
    if not root.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(_FORMAT.format(process=process), datefmt="%H:%M:%S"))
        root.addHandler(handler)
