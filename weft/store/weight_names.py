"""Names of weights by content, for blocks that outlive a process or that other servers read.

The number of a version repeats in the next process. So an engine with a KV tier names new weights by a digest
over all bytes of their files:

    complete update     digest of the files; "" if these are the weights of the start
    partial update      digest of the name before and of the files
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from weft.common.errors import ConfigError, InvalidRequest
from weft.store.weights_digest import WeightsDigest, file_state, read_digest
from weft.types.weights import WeightsUpdate


class WeightNames:
    """The names of the weights of one engine process. Used by one thread at a time."""

    def __init__(self, start: WeightsDigest | None) -> None:
        """``start``: of the weights of the start; None if nothing outlives the process."""
        self._start = start
        self._first: str | None = None

    def of(self, update: WeightsUpdate, before: str) -> tuple[str, str]:
        """Return (name of the weights after ``update``, state of the files). Reads all bytes. ``before``:
        name of the weights in use. Raises OSError, and InvalidRequest for a file that changes meanwhile."""
        state = self.state(update)
        digest = content(read_digest(Path(file)) for file in update.files)
        if self.state(update) != state:
            raise changed()
        if update.partial:
            return hashlib.sha256(f"{before}\0{digest}".encode()).hexdigest()[:32], state
        return "" if digest == self._of_start() else digest, state

    def state(self, update: WeightsUpdate) -> str:
        """Return a text that changes with the files. Raises OSError."""
        return "\n".join(file_state(Path(file)) for file in update.files)

    def _of_start(self) -> str:
        """Return the digest of the weights of the start; "" for weights without files, or with files that
        have changed."""
        if self._first is None:
            self._first = ""
            try:
                digests = [] if self._start is None else self._start.tensor_files()
                self._first = content(digests) if digests else ""
            except ConfigError:
                # Files that changed have no digest: an update to the weights of the start gets a new name.
                pass
        return self._first


def content(digests: Iterable[str]) -> str:
    """Return one digest for the digests of files: 32 hex digits. Names and order of the files have no
    effect."""
    return hashlib.sha256("\0".join(sorted(digests)).encode()).hexdigest()[:32]


def changed() -> InvalidRequest:
    """Return the error for a source that changes while ranks read the source."""
    return InvalidRequest(
        "the files changed while the engines read them; begin the update again, and keep the files unchanged",
        param="update_info",
    )
