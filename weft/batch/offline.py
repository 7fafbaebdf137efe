"""A batch from a file to a file. The output file is the log: a new start continues an interrupted run.

An output record is complete when its line end is written. The next start removes an incomplete record and
runs the line again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from weft.batch.book import EndReason
from weft.batch.lines import (
    RECORD_BEGIN,
    Checks,
    LineError,
    Place,
    body_of,
    line_of,
    read_places,
    record_of,
    sequences_of,
)
from weft.batch.runner import LineOutput, LineRequest
from weft.common.errors import ConfigError

OFFLINE = "offline"
"""Name of the only batch."""


class _Known(msgspec.Struct):
    """The fields of an output record that a new start reads."""

    custom_id: str
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Only lines of an input file have a method."""


class RecordLog:
    """An append-only file of output records. One process writes at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file and cut off an incomplete last record. Makes a missing file with mode 0600.

        Raises ConfigError, with the file unchanged, if another process writes the file or if the file has
        other contents than records."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise ConfigError(f"{path} is not a regular file, so an interrupted run could not continue")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ConfigError(f"another process writes {path}; wait until that process ends") from None
        self.ids: set[str] = set()
        """The ``custom_id`` of every record."""
        try:
            self._end = self._read()
        except BaseException:
            self.close()
            raise
        os.ftruncate(self._file, self._end)

    def _read(self) -> int:
        """Fill ``ids`` and return the end of the last complete record."""
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    if not data.startswith(RECORD_BEGIN[: len(data)]):
                        raise self._foreign()
                    break
                try:
                    found = msgspec.json.decode(data, type=_Known)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    raise self._foreign() from None
                if found.method is not msgspec.UNSET:
                    raise self._foreign()
                self.ids.add(found.custom_id)
                end += len(data)
        return end

    def _foreign(self) -> ConfigError:
        return ConfigError(f"{self.path} has a line that is not an output record; name a new file")

    def append(self, records: list[bytes]) -> None:
        """Write records durably. Raises ConfigError, for example for a full disk."""
        data = b"".join(records)
        try:
            while data:
                written = os.pwrite(self._file, data, self._end)
                self._end += written
                data = data[written:]
            os.fdatasync(self._file)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}; free disk space, then run the command "
                "again to continue"
            ) from error

    def close(self) -> None:
        """Close the file, and let other processes write."""
        os.close(self._file)


class OfflineStore:
    """LineStore of one batch from a file to a file."""

    def __init__(
        self,
        source: BinaryIO,
        checks: Checks,
        output: RecordLog,
        errors: RecordLog | None,
        seed: int,
        done: Callable[[bool], None],
    ) -> None:
        """Read and check the input file. The attribute ``problems`` lists the errors of the file.

        ``errors``: log of answers with another status than 200; None for ``output``. ``seed``: seed of the
        batch. ``done``: called for each written line, with True for status 200."""
        places, self.problems = read_places(source, checks)
        self._places = {place.line: place for place in places}
        self._source, self._seed, self._done = source, seed, done
        self._model = checks.default_model
        self._output, self._errors = output, errors or output
        written = output.ids | self._errors.ids
        self.finished = sum(place.custom_id in written for place in places)
        """Number of lines with a record of an earlier run."""
        self.pending = tuple(place.line for place in places if place.custom_id not in written)
        """Lines to run, in order."""
        self.ended: EndReason | None = None

    async def request(self, batch: str, line: int) -> LineRequest:
        made = line_of(self._data(self._places[line]))
        return LineRequest(
            batch, line, made.url, body_of(made, self._seed, self._model), sequences=sequences_of(made)
        )

    def _data(self, place: Place) -> bytes:
        return os.pread(self._source.fileno(), place.size, place.start)

    async def record(self, outputs: list[LineOutput]) -> None:
        made: dict[bool, list[bytes]] = {True: [], False: []}
        for output in outputs:
            custom_id = self._places[output.line].custom_id
            made[output.good].append(record_of(output.batch, custom_id, output.answer))
        for good, log in ((True, self._output), (False, self._errors)):
            if made[good]:
                await asyncio.to_thread(log.append, made[good])
        for output in outputs:
            self._done(output.good)

    async def finalize(self, batch: str, reason: EndReason) -> None:
        self.ended = reason


def problem_text(error: LineError) -> str:
    """Return an error of an input file as one line of text."""
    where = "" if error.line is None else f"line {error.line}: "
    return where + error.message


def compact(data: bytes) -> Any:
    """Return an answer of any server as JSON on one line. Invalid JSON becomes an error object."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = {"error": {"message": data[:2000].decode("utf-8", "replace"), "code": "invalid_answer"}}
    return msgspec.json.encode(found)
