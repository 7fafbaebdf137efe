"""New weights of an ``LLM``: tensors of the caller, through shared memory, to every rank."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.api.request import client_error
from weft.common.errors import InvalidRequest, ReportedError
from weft.engine.core import EngineCore
from weft.models.weight_source import write_shared
from weft.store.new_weights import SHARED, source_files
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
        self._kept: list[Path] = []
        """Files in shared memory that a rank may still need."""

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
        number = core.weights.version + 1
        written: list[Path] = []
        try:
            if isinstance(source, str | Path):
                files = source_files("file", str(Path(source).resolve()))
            else:
                name = f"weft-{secrets.token_hex(8)}.safetensors"
                written.append(SHARED / name)
                files = (str(SHARED / write_shared(name, source)),)
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
        self._kept += written
        self.label = str(number) if label is None else label
        return self.label

    def close(self) -> None:
        """Delete the files in shared memory."""
        _unlink(self._kept)


def _turn(core: EngineCore) -> None:
    """Handle frames of the ranks, and let a recovery go on."""
    core.check()
    core.hear()
    if core.recovering:
        core.step()


def _unlink(files: list[Path]) -> None:
    while files:
        files.pop().unlink(missing_ok=True)
