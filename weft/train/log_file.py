"""The log of a run: OUT/log.jsonl, one line per step. The open log is the lock of the folder."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError


class LogFile:
    """Lines of JSON, one per step. One process writes at a time."""

    def __init__(self, out: Path) -> None:
        """Open the log of the folder ``out``. Raises ConfigError if the folder cannot be written, or if
        another run uses the folder."""
        self._path = out / "log.jsonl"
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error.strerror}", param="--out") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ConfigError(
                f"another run writes to {out}: wait until that run ends, or give another --out", param="--out"
            ) from None

    def cut(self, step: int) -> None:
        """Drop the lines after ``step``, and an incomplete last line. Raises ConfigError for foreign
        lines."""
        end = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                behind = int(json.loads(line)["step"]) > step
            except (ValueError, TypeError, KeyError):
                message = f"{self._path} has lines that are not steps of a run: give another --out"
                raise ConfigError(message, param="--out") from None
            if behind:
                break
            end += len(line)
        os.ftruncate(self._file, end)

    def add(self, line: dict[str, Any]) -> None:
        """Write the line of a step. Raises ConfigError for a full disk."""
        data = json.dumps(line).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written: {error.strerror}; free disk space, then the same "
                "command continues from the last checkpoint",
                param="--out",
            ) from error

    def close(self) -> None:
        """Close the file and unlock the folder. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
