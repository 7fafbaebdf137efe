"""Git LFS pointers: small text files in place of large files until ``git lfs pull`` fetches the content."""

from __future__ import annotations

from pathlib import Path

from weft.common.errors import ConfigError

_FIRST_LINES = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
"""First lines of the current form and of the oldest form."""
_LONGEST = 1024
"""Pointers have fewer bytes. Larger files are real."""


def is_pointer(path: Path) -> bool:
    """Return True if the file ``path`` is a Git LFS pointer. False for a missing file. Reads a few bytes."""
    try:
        if path.stat().st_size >= _LONGEST:
            return False
        with path.open("rb") as file:
            return file.read(_LONGEST).startswith(_FIRST_LINES)
    except OSError:
        return False


def refuse_pointer(path: Path, param: str | None = None) -> None:
    """Raise ConfigError with the name of ``path`` if the file is a Git LFS pointer."""
    if is_pointer(path):
        raise ConfigError(
            f"{path.name} is a Git LFS pointer, not the file itself: run `git lfs pull` in {path.parent}, or "
            "download the model again with `hf download`",
            param=param,
        )
