"""Small files of a model, Git LFS pointers, and links to missing files.

A pointer is a small text file in place of a large file until ``git lfs pull`` fetches the content.
"""

from __future__ import annotations

import os
from glob import glob
from pathlib import Path

from weft.common.errors import ConfigError

_FIRST_LINES = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
"""First lines of the current form and of the oldest form."""
_LONGEST = 1024
"""Pointers have fewer bytes. Larger files are real."""
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""All files of a model except weights: configuration, tokenizer, templates."""
_FOLDERS = ("", "additional_chat_templates/", "[0-9]_*/")
"""Folders with small files: the model's own, named templates, modules of sentence-transformers."""


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


def refuse_broken_links(folder: Path, param: str | None = None) -> None:
    """Raise ConfigError with the name of a small file of the model that is a link to a missing file.

    A missing optional file has defaults. A broken link would silently have the same defaults, for example
    other ends of text. Such links remain when a snapshot of the hub's cache is copied without its blobs.
    """
    patterns = [place + pattern for place in _FOLDERS for pattern in SMALL_FILES]
    for name in sorted(name for pattern in patterns for name in glob(pattern, root_dir=folder)):
        path = folder / name
        # Path.glob and Path.exists raise errors for a link into a folder without permission.
        if path.is_symlink() and not os.path.exists(path):
            raise ConfigError(
                f"{name} of the model is a link to {os.readlink(path)}, which does not exist or cannot be "
                "read: copy the folder with the files behind the links (cp -rL), or download the model again",
                param=param,
            )


def read_model_file(path: Path, param: str | None = None) -> bytes:
    """Return the content of the small file ``path`` of a model. Raise ConfigError, with the name of the file,
    for a Git LFS pointer and for an unreadable file."""
    refuse_pointer(path, param)
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error.strerror, param) from error


def read_model_text(path: Path, param: str | None = None) -> str:
    """Return the text of the small file ``path`` of a model, without a byte order mark.

    Some editors write the mark, which is not valid in JSON and templates. Raise ConfigError as
    ``read_model_file``, and for bytes that are not UTF-8.
    """
    refuse_pointer(path, param)
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(path, error.strerror, param) from error
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"the file is not UTF-8 text: {error}", param) from error


def _unreadable(path: Path, why: str | None, param: str | None) -> ConfigError:
    """Return the error for an unreadable file."""
    return ConfigError(f"{path.name} of the model cannot be read: {why}", param=param)
