"""Files for ``--group-secret``."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_secret(folder: Path, text: str | None = None) -> Path:
    """Write a file with mode 600 and ``text`` or a random secret. Return the path."""
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32) if text is None else text)
    return file
