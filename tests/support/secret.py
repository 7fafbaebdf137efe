"""Files for ``--group-secret``."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_secret(folder: Path, text: str | None = None) -> Path:
    """Write a file that only this user can read, with ``text`` or a random secret. Return its path."""
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32) if text is None else text)
    return file
