"""New weights of an ``LLM``: tensors of the caller, through shared memory, to every rank."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weft.api.request import client_error
from weft.common.errors import InvalidRequest, ReportedError
from weft.engine.core import EngineCore
from weft.models.weight_source import write_shared
from weft.store.fixed_weights import PARTS, check_parts, check_sleep, former_updates, why_fixed
from weft.store.new_weights import SHARED, source_files
from weft.types.weights import WeightsUpdate

if TYPE_CHECKING:
    from weft.engine.server.replicas import Replicas

STALE_S = 600.0
"""Age from which a file of an ``LLM`` that has ended is deleted, in seconds."""
DEFAULT = "default"
"""Label of the weights of the start."""


class _Written(NamedTuple):
    """A file in shared memory that this process has written."""

    path: Path
    lock: int
    """Open descriptor that locks the file until the process ends."""


_IS_OURS = re.compile(r"\.?weft-\d+-[0-9a-f]{16}\.safetensors(\.\d+)?$")


class Weights:
    """The versions of one ``LLM``. Used by one thread at a time."""

    def __init__(self) -> None:
        self.label = DEFAULT
        """Label of the weights in use."""
        self.asleep: tuple[str, ...] = ()
        """Parts of the memory that are asleep."""
        self._freed = False
        """True while the ranks lack the weights."""
        self._history: tuple[WeightsUpdate, ...] = ()
        """Updates since the last complete one, in order."""
        self._kept: list[_Written] = []
        """Files in shared memory that a rank may still need."""
        weakref.finalize(self, _unlink, self._kept)  # also at the end of the process

    def update(
        self,
        core: EngineCore | Replicas,
        source: str | Path | Iterable[tuple[str, Any]],
        label: str | None,
        partial: bool,
    ) -> str:
        """Stage and use new weights, and return the label. Blocks. See ``LLM.update_weights``."""
        if not isinstance(core, EngineCore):
            raise InvalidRequest("update_weights of an LLM with several replicas is not supported")
        if why := why_fixed(core.config):
            raise InvalidRequest(why)
        if self._freed and partial:
            raise InvalidRequest(
                "the weights are empty after a sleep of level 2: update all tensors first, or end the sleep"
            )
        number = core.weights.version + 1
        written: list[_Written] = []
        try:
            if isinstance(source, str | Path):
                files = source_files("file", str(Path(source).resolve()))
            else:
                delete_stale()
                name = f"weft-{os.getpid()}-{secrets.token_hex(8)}.safetensors"
                path = SHARED / write_shared(name, source)
                written.append(_Written(path, os.open(path, os.O_RDONLY)))
                fcntl.flock(written[0].lock, fcntl.LOCK_EX)
                files = (str(path),)
            update = WeightsUpdate(version=number, files=files, partial=partial)
            core.weights.update(update, lambda: _turn(core))
        except BaseException as error:
            _unlink(written)
            if isinstance(error, ReportedError) and (known := client_error(error.info())) is not None:
                raise known from error
            if isinstance(error, ValueError):
                raise InvalidRequest(str(error), param="source") from error
            raise
        if not partial:
            _unlink(self._kept)
            self._history, self._freed = (), False
        self._history = (*self._history, update)
        self._kept += written
        self.label = str(number) if label is None else label
        return self.label

    def sleep(self, core: EngineCore | Replicas, level: int) -> None:
        """See ``LLM.sleep``."""
        if not isinstance(core, EngineCore):
            raise InvalidRequest("sleep of an LLM with several replicas is not supported")
        check_sleep(core.config, level)
        self.asleep = PARTS
        self._freed = self._freed or level > 1
        core.weights.free(level > 1, lambda: _turn(core))

    def wake_up(self, core: EngineCore | Replicas, tags: Sequence[str] | None) -> None:
        """See ``LLM.wake_up``."""
        check_parts(tags or ())
        left = tuple(one for one in self.asleep if tags is not None and one not in tags)
        if not left and self._freed:
            assert isinstance(core, EngineCore)
            for one in former_updates(core.config, self._history):
                update = msgspec.structs.replace(one, version=core.weights.version + 1)
                core.weights.update(update, lambda: _turn(core))
            self._freed = False
        self.asleep = left

    def close(self) -> None:
        """Delete the files in shared memory."""
        _unlink(self._kept)


def _turn(core: EngineCore) -> None:
    """Handle frames of the ranks, and let a recovery go on."""
    core.check()
    core.hear()
    if core.recovering:
        core.step()


def _unlink(files: list[_Written]) -> None:
    while files:
        path, lock = files.pop()
        path.unlink(missing_ok=True)
        os.close(lock)


def delete_stale(folder: Path = SHARED) -> None:
    """Delete files of processes that were killed: files older than ``STALE_S`` without a lock.

    A lock, unlike a process id, has a meaning also between containers that share /dev/shm.
    """
    for path in [*folder.glob("weft-*.safetensors"), *folder.glob(".weft-*.safetensors.*")]:
        try:
            if time.time() - path.stat().st_mtime < STALE_S or not _IS_OURS.match(path.name):
                continue
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            finally:
                os.close(lock)
        except OSError:  # the file is in use, gone, or of another user
            continue
