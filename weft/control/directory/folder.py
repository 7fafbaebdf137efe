"""The directory as a folder: one file per engine. For one host, or for hosts with a shared file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from weft.common.counted_log import CountedLog
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.control.directory.record import EngineRecord

log = get_logger(__name__)

_RECORD, _DRAIN = ".engine.json", ".drain"
_MOST_BYTES = 1 << 16
"""Maximum size of a record."""
_MARK = "weft-directory"
"""A file that each directory has."""


class FolderDirectory:
    """Implementation of ``DirectoryReader`` and ``DirectoryWriter`` over a folder of one user alone.

    Each write replaces a whole file, so a reader sees the old or the new record. A file that is no record is
    counted, logged and ignored.
    """

    def __init__(self, folder: str | Path) -> None:
        """Create the folder if there is none. Raise ConfigError if the folder cannot be used, or if other
        users have access to the folder."""
        self._folder = Path(folder)
        self._strangers = CountedLog(log)
        self.mend()

    def mend(self) -> None:
        """Create the folder again, for example after a cleaner of /tmp. See ``__init__``."""
        folder = self._folder
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._folder.stat()
            (self._folder / _MARK).touch(mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"--directory {folder}: the folder cannot be used ({error.strerror})", param="--directory"
            ) from error
        # A writer of the folder decides where prompts are sent, so no other user may write.
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"--directory {folder}: the folder must belong to you alone: run `chmod 700 {folder}`, or "
                "name another folder",
                param="--directory",
            )

    def publish(self, record: EngineRecord) -> None:
        """See ``DirectoryWriter``."""
        self._write(record.name + _RECORD, msgspec.json.encode(record))

    def withdraw(self, record: EngineRecord) -> None:
        """See ``DirectoryWriter``."""
        path = self._folder / (record.name + _RECORD)
        stored = self._read(path)
        if stored is not None and stored.incarnation == record.incarnation:
            path.unlink(missing_ok=True)
        self._drain_file(record).unlink(missing_ok=True)

    def read(self) -> Mapping[str, EngineRecord]:
        """See ``DirectoryReader``."""
        # An unmounted file system leaves an empty folder, which must not look like a server without engines.
        if not (self._folder / _MARK).exists():
            raise FileNotFoundError(2, "the folder is gone, or is not mounted", str(self._folder))
        with os.scandir(self._folder) as entries:
            paths = [Path(entry.path) for entry in entries if entry.name.endswith(_RECORD)]
        found = (self._read(path) for path in paths)
        return {record.name: record for record in found if record is not None}

    def ask_drain(self, record: EngineRecord) -> None:
        """See ``DirectoryReader``."""
        self._write(self._drain_file(record).name, b"")

    def asked_to_drain(self, record: EngineRecord) -> bool:
        """See ``DirectoryWriter``."""
        return self._drain_file(record).exists()

    def _drain_file(self, record: EngineRecord) -> Path:
        # The incarnation is part of the name: a later process of the engine does not drain.
        return self._folder / f"{record.name}.{record.incarnation:x}{_DRAIN}"

    def _write(self, name: str, data: bytes) -> None:
        partial = self._folder / f".{name}.{os.getpid()}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
        partial.replace(self._folder / name)

    def _read(self, path: Path) -> EngineRecord | None:
        """Return the record in ``path``. None if the file has gone meanwhile, or is no record."""
        try:
            # Without a wait: the entry may be a pipe.
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                record = msgspec.json.decode(file.read(_MOST_BYTES), type=EngineRecord)
        except FileNotFoundError:
            return None
        except (OSError, TypeError, msgspec.MsgspecError) as error:
            self._strangers.warn("ignored a file of the directory that is no record (%s)", error)
            return None
        return record if path.name == record.name + _RECORD else None
