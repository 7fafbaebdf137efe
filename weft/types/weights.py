"""New weights for a running model: messages between an API server and an engine process, and for ranks.

    API server                       engine process                      ranks
      │ StageWeights(update) ──────────► │ ── the same frame ────────────► │   read, check, pack beside steps
      │ ◄─ WeightsChanged(staged) or     │ ◄─────────── WeightsReport ──── │
      │    with ``error``                │                                 │
      │ UseWeights(version) ───────────► │   between two steps:            │
      │                                  │ ── SwapWeights ───────────────► │   copy into the memory in use
      │ ◄─ WeightsChanged(version) ───── │ ◄─────────── WeightsReport ──── │   digests must be equal

      │ JoinTrainer, ReceiveWeights ───► │   receiver processes: tensors of a trainer, into a file in shared
      │ ◄─ WeightsChanged(version) ───── │   memory, which ``StageWeights`` names later

      │ FreeMemory(weights) ───────────► │ ── the same frame ────────────► │   a sleep: release memory
      │ ◄─ WeightsChanged(version) ───── │ ◄─────────── WeightsReport ──── │

Nothing changes before ``UseWeights``, so invalid weights are refused while the old weights serve.
``DropWeights`` discards staged weights. Version 0 is the initial weights. A restarted process gets all
updates since the last complete update, in order.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weft.common.errors import ErrorInfo

Backend: TypeAlias = Literal["file", "shm"]
GroupBackend: TypeAlias = Literal["gloo", "nccl", "ipc"]
"""gloo: broadcasts between CPUs. nccl: broadcasts between NVIDIA GPUs. ipc: no broadcasts, but memory of the
trainer's GPU, which receivers on the same host open."""


def prefix_name(version: int, name: str | None) -> bytes:
    """Return the name of weights in prefix hashes; b"" for the initial weights.

    ``name``: ``WeightsChanged.name``. None: the version number names the weights, unique only while the
    engine processes live.
    """
    if name is not None:
        return name.encode()
    return version.to_bytes(8, "little") if version else b""


class WeightsUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights of one version, in files that all processes can read."""

    version: int
    """Number of the version: the previous number plus 1."""
    files: tuple[str, ...]
    """Absolute paths of safetensors files, on the hosts of all ranks."""
    partial: bool = False
    """True if the files have only some of the tensors. The other tensors do not change."""


class TrainerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process group in which a trainer, rank 0, broadcasts tensors."""

    backend: GroupBackend
    address: str
    """Host name or address of the trainer."""
    port: int
    world_size: int
    """The trainer, and one receiver for each rank of each engine."""
    seconds: float
    """Maximum seconds until the group is formed, and for each broadcast."""


class IpcHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Place of a tensor in the memory of a GPU (``weft.models.ipc``)."""

    gpu: str
    """UUID of the GPU."""
    name: bytes
    """64 bytes of the CUDA runtime that name an allocation."""
    offset: int
    """Bytes from the begin of the allocation to the tensor."""


class AnnouncedTensors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors that a trainer is about to send, in this order."""

    names: tuple[str, ...]
    """Published names, as in the checkpoint."""
    dtypes: tuple[str, ...]
    """Names of ``weft.store.announced.DTYPES``."""
    shapes: tuple[tuple[int, ...], ...]
    digests: tuple[int, ...] = ()
    """CRC-32 of the bytes of each tensor; () if the trainer sends none."""
    packed: bool = False
    """True if a broadcast has the bytes of several consecutive tensors, until the bytes exceed
    ``buffer_bytes``."""
    buffer_bytes: int = 1 << 30
    handles: tuple[IpcHandle, ...] = ()
    """Place of each tensor; () for broadcasts."""


class JoinTrainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine: join the group of a trainer with one receiver for each rank."""

    token: str
    """Text that the answer repeats as ``digest``."""
    group: TrainerGroup
    first_rank: int
    """Rank of the engine's first receiver. Further receivers have the next ranks."""


class ReceiveWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine: receive tensors from the trainer into a file in shared memory."""

    file: str
    """Absolute path, a name of ``weft.store.shared_files``. The answer repeats the path as ``digest``."""
    tensors: AnnouncedTensors


class StageWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine, and engine to rank: read and check the weights, beside the steps."""

    update: WeightsUpdate


class UseWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine: compute with the staged weights from the next step on."""

    version: int


class DropWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine, and engine to rank: discard staged and received weights. No answer. A
    receiver that still waits for the trainer leaves the group and ends."""


class FreeMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine, and engine to rank, with no sequence open: release the memory of the KV
    cache."""

    weights: bool = False
    """True: also release the memory of the weights. An update must come before the next step."""


class WeightsChanged(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True
):
    """Engine to API server: the answer to every message of an update except ``DropWeights``. Only the sender
    gets the answer, except for a change of the weights in use, which is sent to every API server."""

    version: int
    """Version of the weights that the engine computes with."""
    staged: int = 0
    """Version of the staged weights; 0 for none."""
    digest: str = ""
    """Digest of the files of the staged version, or of the version in use after ``UseWeights``. After
    ``JoinTrainer`` and ``ReceiveWeights``: the token or the file of the message."""
    name: str | None = None
    """Name of the weights in use by content, from an engine with a KV tier; "" for the initial weights. None:
    the version number is the name."""
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
