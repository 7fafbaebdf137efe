"""Result files of commands: checked before a long run, written after the results are printed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from weft.cli.options import Decorator
from weft.common.errors import ConfigError


def json_option(about: str = "Write the result to this file.") -> Decorator:
    """Return ``--json`` with the help text ``about``. The command gets ``json_file``."""
    return click.option("--json", "json_file", type=click.Path(dir_okay=False), help=about)


def check_result_file(file: str | None, flag: str = "--json") -> None:
    """Raise ConfigError, before a run, if the result file could not be written. Changes no file.

    ``file``: None without a result file.
    """
    if file is None:
        return
    # ``os.path`` returns False where ``Path`` raises PermissionError.
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder) or os.path.isdir(file):
        raise ConfigError(f"{flag} must name a file in an existing folder", param=flag)
    if not os.access(file if os.path.exists(file) else folder, os.W_OK):
        raise ConfigError(f"{flag} {file} cannot be written: no write permission", param=flag)


def write_result(file: str | None, data: bytes, flag: str = "--json") -> None:
    """Write ``data`` to ``file``, if a file was requested. Raise ConfigError, for example for a full disk."""
    if file is None:
        return
    try:
        Path(file).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be written: {error.strerror}", param=flag) from None


def write_json(file: str | None, report: dict[str, Any]) -> None:
    """Write a report as JSON, if a file was requested. Raise the errors of ``write_result``."""
    if file is not None:
        write_result(file, json.dumps(report, indent=1).encode() + b"\n")
