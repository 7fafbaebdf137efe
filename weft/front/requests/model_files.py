"""Facts of the files of a model that are the same in every API server."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
_START = time.time()
"""Time for a folder whose files are gone: a fixed time, because clients compare the times."""


def files_of(path: str) -> tuple[int, float, str]:
    """Return (bytes of the weights on disk, time of the last change, digest as 64 hex digits).

    The digest covers the configuration, and names and sizes of the weights. Each call reads the folder again,
    so a changed or deleted file changes the result. Without files the time is the start of the process.
    """
    folder = Path(path)
    digest = hashlib.blake2b(digest_size=32)
    size, changed = 0, 0.0
    for file in sorted({found for pattern in ("config.json", *_WEIGHTS) for found in folder.glob(pattern)}):
        try:
            facts = file.stat()
            content = file.read_bytes() if file.suffix == ".json" else b""
        except OSError:  # the file was deleted after the listing
            continue
        changed = max(changed, facts.st_mtime)
        digest.update(f"{file.name}\0{facts.st_size}\0".encode() + content)
        size += 0 if content else facts.st_size
    return size, changed or _START, digest.hexdigest()


def changed_at(paths: Iterable[str]) -> dict[str, int]:
    """Return folder -> time of the last change of the model's files, in seconds. Reads files: call in a
    thread."""
    return {path: int(files_of(path)[1]) for path in set(paths)}
