"""A temporary folder for the files of one measurement."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from weft.common.folder import cache_folder


@contextlib.contextmanager
def scratch_folder(root: Path | None = None) -> Iterator[Path]:
    """Yield a new folder below ``root`` (default: the user's cache folder), which is deleted afterwards."""
    root = root or cache_folder("bench")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weft-bench-", dir=root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
