"""Weight updates of an ``LLM``: tensors of the caller go through shared memory to every rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from weft.api.request import client_error
from weft.common.errors import InvalidRequest, ReportedError
from weft.engine.core import EngineCore
from weft.models.weight_source import write_shared
from weft.store.fixed_weights import PARTS, check_parts, check_sleep, former_updates
from weft.store.new_weights import SHARED, source_files
from weft.store.shared_files import delete_stale, new_token, shared_name
from weft.types.weights import WeightsUpdate

if TYPE_CHECKING:
    from weft.engine.server.replicas import Replicas

DEFAULT = "default"
"""Label of the weights of the start."""


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
        """Updates in order, from the last complete update on."""

    def update(
        self,
        core: EngineCore | Replicas,
        source: str | Path | Iterable[tuple[str, Any]],
        label: str | None,
        partial: bool,
    ) -> str:
        """Stage and use new weights, and return the label. Blocks. See ``LLM.update_weights``."""
        if not isinstance(core, EngineCore):
            raise InvalidRequest(
                "update_weights is not supported with several replicas: use data_parallel_size 1"
            )
        if self._freed and partial:
            raise InvalidRequest(
                "the weights are empty after a sleep of level 2: update all tensors first (partial=False), "
                "or call wake_up"
            )
        number = core.weights.version + 1
        try:
            if isinstance(source, str | Path):
                files = source_files("file", str(Path(source).absolute()))
            else:
                delete_stale()
                # The engine deletes the file when no rank needs the file any more.
                files = (str(SHARED / write_shared(shared_name(os.getpid(), new_token()), _pairs(source))),)
            update = WeightsUpdate(version=number, files=files, partial=partial)
            core.weights.update(update, lambda: _turn(core))
        except BaseException as error:
            if isinstance(error, ReportedError) and (known := client_error(error.info())) is not None:
                raise known from error
            if isinstance(error, ValueError):
                raise InvalidRequest(str(error), param="source") from error
            raise
        if not partial:
            self._history, self._freed = (), False
        self._history = (*self._history, update)
        self.label = str(number) if label is None else label
        return self.label

    def sleep(self, core: EngineCore | Replicas, level: int) -> None:
        """See ``LLM.sleep``."""
        if not isinstance(core, EngineCore):
            raise InvalidRequest("sleep is not supported with several replicas: use data_parallel_size 1")
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


def _turn(core: EngineCore) -> None:
    """Handle frames of the ranks, and let a recovery go on."""
    core.check()
    core.poll()
    if core.recovering:
        core.step()


def _pairs(source: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the pairs of ``source``. Raise InvalidRequest for other values."""
    wrong = InvalidRequest("source must be a folder, or pairs of a name and a tensor", param="source")
    if not isinstance(source, Iterable):
        raise wrong
    for pair in source:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise wrong
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise wrong
        yield name, tensor
