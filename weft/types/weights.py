"""New weights for a running model: messages between an API server and an engine process, and for ranks.

    API server                       engine process                      ranks
      │ StageWeights(update) ──────────► │ ── the same frame ────────────► │   read, check, pack beside steps
      │ ◄─ WeightsChanged(staged) or     │ ◄─────────── WeightsReport ──── │
      │    with ``error``                │                                 │
      │ UseWeights(version) ───────────► │   between two steps:            │
      │                                  │ ── SwapWeights ───────────────► │   copy into the memory in use
      │ ◄─ WeightsChanged(version) ───── │ ◄─────────── WeightsReport ──── │   digests must be equal

      │ FreeMemory(weights) ───────────► │ ── the same frame ────────────► │   a sleep: give memory back
      │ ◄─ WeightsChanged(version) ───── │ ◄─────────── WeightsReport ──── │

Nothing changes before ``UseWeights``. So weights that do not fit are refused while the old weights serve.
``DropWeights`` forgets staged weights. Versions count from 0, the weights of the start. A process that starts
again gets all updates since the last complete one, in order.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weft.common.errors import ErrorInfo

Backend: TypeAlias = Literal["file", "shm"]


def prefix_name(version: int, name: str | None) -> bytes:
    """Return the name of weights in the hashes of prefixes; b"" for the weights of the start.

    ``name``: of ``WeightsChanged``. Without one, the number of the version names the weights within the
    present processes.
    """
    if name is not None:
        return name.encode()
    return version.to_bytes(8, "little") if version else b""


class WeightsUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights of one version, as all processes can read them."""

    version: int
    """Number of the version: that of the version before plus 1."""
    files: tuple[str, ...]
    """Absolute paths of safetensors files, on the hosts of all ranks."""
    partial: bool = False
    """True if the files hold some of the tensors only. The others stay as they are."""


class StageWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine, and engine to rank: read and check the weights, beside the steps."""

    update: WeightsUpdate


class UseWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine: compute with the staged weights from the next step on."""

    version: int


class DropWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine, and engine to rank: forget staged weights. Without an answer."""


class FreeMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine, and engine to rank, with no sequence open: give the memory of the KV cache
    back."""

    weights: bool = False
    """True: also give the memory of the weights back. An update must come before the next step."""


class WeightsChanged(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True
):
    """Engine to API server: the answer to ``StageWeights``, ``UseWeights`` or ``FreeMemory``, to the sender
    only."""

    version: int
    """Version of the weights that the engine computes with."""
    staged: int = 0
    """Version of the staged weights; 0 for none."""
    digest: str = ""
    """Digest of the files of the staged version, or of the version in use after ``UseWeights``."""
    name: str | None = None
    """Name of the weights in use by content, from an engine with a KV tier; "" for the weights of the start.
    None: the number of the version is the name."""
    error: ErrorInfo | None = None
    """The reason why the weights were not staged or not used; None after success."""


class SwapWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Engine to rank, with no step in flight: copy the staged weights into the memory in use."""

    version: int


class WeightsReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Rank to engine: the answer to ``StageWeights``, ``SwapWeights`` or ``FreeMemory``."""

    rank: int
    version: int
    """Version in use on the rank."""
    staged: int = 0
    """Version of the staged weights; 0 for none."""
    digest: str = ""
    """Digest of the files of the version that was staged, or put into use."""
    error: ErrorInfo | None = None


WeightsToRank: TypeAlias = StageWeights | SwapWeights | DropWeights | FreeMemory
