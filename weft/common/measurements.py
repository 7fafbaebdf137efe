"""Tables of measurements: a table in the package, and a table of the local machine, written by a command.

    {"version": 1, "measured": [row, ...]}

The owner of a table defines the rows: ``weft/ops/moe_table.py``, ``weft/moe/exchange_cost.py``. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from weft.common import env
from weft.common.errors import ConfigError
from weft.common.folder import home_folder
from weft.common.log import get_logger

_log = get_logger(__name__)

VERSION = 1
Row = TypeVar("Row")


def cache_folder() -> Path:
    """Return the folder of the user's builds and measurements."""
    return Path(env.get("WEFT_OPS_CACHE") or home_folder() / ".cache" / "weft" / "ops")


@dataclass(frozen=True, slots=True)
class Measurements(Generic[Row]):
    """The measurements of one subject: the package's table and the local machine's table."""

    subject: str
    """Name of the subject, for the log."""
    packaged: Path
    parse: Callable[[dict[str, Any]], Row]
    """Makes a row from JSON data. Raises KeyError, TypeError, AttributeError or ValueError for invalid
    data.
    """
    form: Callable[[Row], dict[str, Any]]
    """Makes JSON data from a row, the inverse of ``parse``."""
    of: Callable[[Row], object]
    """Key of a row: a new row replaces an old row with an equal key."""

    def user_file(self) -> Path:
        """Return the path of the local machine's measurements."""
        return cache_folder() / self.packaged.name

    def read(self, path: Path) -> tuple[Row, ...]:
        """Return the rows of a file. Raises OSError, and ValueError for a file without a valid table."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["version"] != VERSION:
                raise ValueError(f"{path} is of version {found['version']}, not {VERSION}")
            return tuple(self.parse(row) for row in found["measured"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a table of measurements: {error!r}") from error

    def as_json(self, rows: Iterable[Row]) -> dict[str, Any]:
        """Return ``rows`` as JSON data in the form expected by ``read``."""
        return {"version": VERSION, "measured": [self.form(row) for row in rows]}

    def found(self) -> tuple[tuple[Row, ...], ...]:
        """Return the rows of the local machine's table, if there is one, then of the package's table. Invalid
        files are logged and skipped.
        """
        tables = []
        for path in (self.user_file(), self.packaged):
            try:
                tables.append(self.read(path))
            except (FileNotFoundError, NotADirectoryError):  # no table, or no home folder
                continue
            except (OSError, ValueError) as error:
                _log.warning("measurements of %s are ignored: %s", self.subject, error)
        return tuple(tables)

    def save(self, rows: list[Row]) -> None:
        """Write ``rows`` to the local machine's table, atomically.

        Rows with other keys stay; an unreadable table is replaced. Raises ConfigError where the table cannot
        be written.
        """
        path = self.user_file()
        new = {self.of(row) for row in rows}
        try:
            kept = [row for row in self.read(path) if self.of(row) not in new]
        except (OSError, ValueError):
            kept = []
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self.as_json([*kept, *rows]), indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            why = (error.strerror or "unknown reason").lower()
            raise ConfigError(
                f"measurements of {self.subject} cannot be saved ({why}): set WEFT_OPS_CACHE to a folder "
                "that this user may write"
            ) from error
