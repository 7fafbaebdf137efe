"""The protocol between an engine process and the ranks of a group: typed frames, msgpack on the wire, one tag
each.

    rank                       engine process
     │ RankHello ─────────────► │   version and settings; compared before anything is loaded
     │ ◄───── RankWelcome, or RankRefused, which names the difference and both values
     │ Loaded ────────────────► │   weights are loaded, and how many blocks fit
     │ ◄───────────────── Pools │   as many blocks as fit on every rank
     │ Ready ─────────────────► │   caches are allocated
     │ ◄──────────────── Form   │   an epoch: connect through this store, all slots are empty
     │ Formed ────────────────► │
     │ ◄─────────── StepFrame   │   one per step (then LateMasks, where rows are constrained)
     │ StepOutcome|RankFailed ► │
     │ ◄─ PushTransfer | ExpectTransfer | StopTransfer  of transfers to and from other groups, between steps
     │ TransferReport | TransferStopped ► │
     │ ◄─ CopyBlocks | FlushStore  to and from a KV tier (``weft.types.tiers``), in order with steps
     │ BlocksCopied ──────────► │
     │ ◄─ StageWeights | SwapWeights | DropWeights | FreeMemory  (``weft.types.weights``), in order with steps
     │ WeightsReport ─────────► │
     │ ◄─ Abort | RankShutdown  │
     │ ◄─ RankHeartbeat ──────► │   both ways, on a connection of its own

A sequence is named only by a slot. Frames without a slot have separate tags, so no special slot value is
needed. Encoding and decoding are pure. numpy columns travel as little-endian int32 bytes. Never pickle.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from weft.common.errors import EngineDead, ErrorInfo
from weft.types.plan import Segment, StepPlan, TokenMasks
from weft.types.tiers import BlocksCopied, CopyBlocks, TierCommand
from weft.types.transfer import Admitted, Blocks, Bound, Endpoint, TransferKey
from weft.types.transfer import Outcome as TransferOutcome
from weft.types.weights import StageWeights, WeightsReport, WeightsToRank, WeightsUpdate

VERSION = 1
"""Version of the frame protocol. A rank with another version is rejected with an error naming both
versions."""

Cache: TypeAlias = Literal["kv", "embeddings"]
"""The data of a transfer: KV caches of sequences, or embeddings of images. A rank has separate transfers for
each."""


class FrameError(EngineDead):
    """Bytes that are not a valid frame."""


class VersionMismatch(FrameError):
    """A frame of another protocol version. The message names both versions."""


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class RankHello(_Frame, frozen=True, kw_only=True):
    """Rank to engine, the first frame. Repeated until the engine process answers, and sent again to a
    replacement engine."""

    version: int
    release: str
    """Version of the package, for the error text when frame versions differ."""
    rank: int
    pid: int
    epoch: int
    """The last epoch of this rank process, with any engine process; -1 for none."""
    settings: dict[str, str]
    """Name and value of every setting with an effect on wire, shapes or collectives."""


class RankWelcome(_Frame, frozen=True, kw_only=True):
    """Engine to rank: the rank belongs to the group. The rank then loads the weights, unless already
    loaded."""

    heartbeats: str
    """Address of the connection for ``RankHeartbeat``; empty if there is none."""
    incarnation: str
    """Random id of the engine process, which differs for a replacement process."""
    updates: tuple[WeightsUpdate, ...] = ()
    """Updates since the initial weights, for a rank that loads the initial weights."""


class RankRefused(_Frame, frozen=True, kw_only=True):
    """Engine to rank: the rank does not belong to the group. The rank ends."""

    error: ErrorInfo


class Loaded(_Frame, frozen=True, kw_only=True):
    """Rank to engine: weights are loaded."""

    rank: int
    blocks: tuple[int, ...]
    """For each pool, the number of blocks that fit into the rank's memory: as configured, or as measured on
    the device."""


class Pools(_Frame, frozen=True, kw_only=True):
    """Engine to rank: allocate pools of the given sizes, equal on all ranks."""

    blocks: tuple[int, ...]


class Ready(_Frame, frozen=True, kw_only=True):
    """Rank to engine: the pools are allocated."""

    rank: int
    endpoint: Endpoint | None = None
    """Address for KV of other groups; None in a group without KV transfers."""
    embeddings: Endpoint | None = None
    """Address for embeddings of other groups; None in a group without embedding transfers."""


class Form(_Frame, frozen=True, kw_only=True):
    """Engine to rank: epoch ``epoch`` begins. All slots are empty. Ranks connect through ``store``."""

    epoch: int
    store: str
    weights: int = 0
    """Version of the weights. A rank with another version ends."""


class Formed(_Frame, frozen=True, kw_only=True):
    """Rank to engine: the communicators are connected and the slots are empty."""

    rank: int
    epoch: int


class StepFrame(_Frame, frozen=True, kw_only=True):
    """Engine to rank: one whole step. Epochs and steps follow each other without gaps."""

    version: int = VERSION
    step: int
    epoch: int
    plan: StepPlan
    digest: int
    """Digest of the slot table after the plan (``weft.kv.digest``)."""


class LateMasks(_Frame, frozen=True, kw_only=True):
    """Engine to rank, after the StepFrame of a plan with ``constrained``: the masks of the step.

    The rank computes the logits without the masks, then waits for the masks and samples. No frame of a later
    step comes between the two frames.
    """

    step: int
    epoch: int
    masks: TokenMasks


class StepOutcome(_Frame, frozen=True, kw_only=True):
    """Rank to engine: the step is done."""

    rank: int
    epoch: int
    step: int
    checksum: int
    """Checksum of the sampled tokens, equal on all ranks of a group."""


class RankFailed(_Frame, frozen=True, kw_only=True):
    """Rank to engine: a step, or the formation of an epoch, failed on the rank. The rank has ended all
    communicators and waits for the next epoch."""

    rank: int
    epoch: int
    step: int
    error: ErrorInfo
    comm: bool = False
    """True if a collective failed. Then another rank may be at fault."""


class PushTransfer(_Frame, frozen=True, kw_only=True):
    """Engine to rank: the receiver of a transfer is bound. See
    ``weft.disagg.protocol.transfer_events.Push``."""

    offer: Admitted
    bound: Bound
    blocks: tuple[Blocks, ...]
    """Blocks of the sequence in the group's caches, as known from earlier plans."""
    num_cached: int
    cache: Cache = "kv"


class ExpectTransfer(_Frame, frozen=True, kw_only=True):
    """Engine to rank: bytes of a transfer will arrive. See
    ``weft.disagg.protocol.transfer_events.Expect``."""

    offer: Admitted
    bound: Bound
    cache: Cache = "kv"


class StopTransfer(_Frame, frozen=True, kw_only=True):
    """Engine to rank: forget a transfer and stop all access to the memory. Answered with TransferStopped."""

    key: TransferKey
    cache: Cache = "kv"


class TransferReport(_Frame, frozen=True, kw_only=True):
    """Rank to engine: the state of the rank's part of a transfer."""

    rank: int
    key: TransferKey
    outcome: TransferOutcome
    error: ErrorInfo | None = None
    cache: Cache = "kv"


class TransferStopped(_Frame, frozen=True, kw_only=True):
    """Rank to engine: StopTransfer is complete."""

    rank: int
    key: TransferKey
    cache: Cache = "kv"


class Abort(_Frame, frozen=True, kw_only=True):
    """Engine to rank: epoch ``epoch`` and all earlier epochs have ended."""

    epoch: int


class RankShutdown(_Frame, frozen=True, kw_only=True):
    """Engine to rank: free everything and end."""


class RankHeartbeat(_Frame, frozen=True, kw_only=True):
    """Both ways, several times per second, from a dedicated thread: proof of a running process."""

    rank: int
    epoch: int
    step: int
    """The last step completed by the sender."""
    incarnation: str
    """Incarnation of the engine process: the sender if the sender is an engine, else the engine of the
    rank."""
    aborted: int = -1
    """Set by an engine process: the last ended epoch. A rank waiting in a collective of the epoch stops
    waiting."""
    peer: bytes = b""
    """Set by a rank: the name of the rank's control connection, which identifies the rank process."""
    given_up: bool = False
    """Set by an engine process: the engine has replaced the rank process that sent ``peer``. The rank must
    send RankHello again over a new control connection. ``RankRefused`` says the same, but a broken connection
    loses that frame.
    """


TransferToRank = PushTransfer | ExpectTransfer | StopTransfer
TransferToEngine = TransferReport | TransferStopped
ReportToEngine = TransferToEngine | BlocksCopied | WeightsReport
ToRank = (
    RankWelcome
    | RankRefused
    | Pools
    | Form
    | StepFrame
    | LateMasks
    | Abort
    | RankShutdown
    | RankHeartbeat
    | TransferToRank
    | TierCommand
    | WeightsToRank
)
ToEngine = RankHello | Loaded | Ready | Formed | StepOutcome | RankFailed | RankHeartbeat | ReportToEngine

_SMALL = 1 << 16
MOST_BYTES: dict[type, int] = {
    RankHello: 1 << 20,
    RankWelcome: 4 << 20,
    StageWeights: 4 << 20,
    StepFrame: 256 << 20,
    LateMasks: 256 << 20,
    PushTransfer: 64 << 20,
    ExpectTransfer: 64 << 20,
    CopyBlocks: 64 << 20,
    BlocksCopied: 1 << 20,
}
"""Maximum bytes of a frame, by type; 64 KiB for all other types."""
MAX_FRAME = max(MOST_BYTES.values())


def _pack(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype="<i4").tobytes()
    raise NotImplementedError(f"{type(value).__name__} cannot be in a frame")


def _unpack(kind: type, value: Any) -> Any:
    """Return the int32 column of ``value``. Raises ValueError for anything else."""
    if kind is not np.ndarray or not isinstance(value, bytes):
        raise ValueError("a column is not bytes")
    if len(value) % 4:
        raise ValueError("a column is not a whole number of int32")
    # A read-only view of the frame, without a copy.
    return np.frombuffer(value, "<i4")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=_unpack)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_unpack)

M = TypeVar("M")


def encode(frame: ToRank | ToEngine) -> bytes:
    """Return the frame as bytes. Raises FrameError over the limit of the type."""
    data = _encoder.encode(frame)
    _check_size(type(frame), len(data))
    return data


def encode_part(part: Any) -> bytes:
    """Return the bytes of a part of a frame, such as a slot update. Equal parts have equal bytes."""
    return _encoder.encode(part)


def decode_to_rank(data: bytes) -> ToRank:
    """Return a frame of an engine. Raises FrameError for an invalid frame, or a frame of another version."""
    frame = _decode(_to_rank, data)
    if isinstance(frame, StepFrame):
        if frame.version != VERSION:
            raise VersionMismatch(_version_error("the engine", frame.version, "this rank"))
        for segment in (frame.plan.prefill, frame.plan.decode):
            _check_segment(segment)
    return frame


def decode_to_engine(data: bytes) -> ToEngine:
    """Parse a frame of a rank. Raises FrameError. For a hello of another version, VersionMismatch names both
    versions."""
    try:
        frame = _decode(_to_engine, data)
    except FrameError:
        # A hello of another version may have unknown fields. The version explains the error better.
        version = _version_of_hello(data)
        if version is not None and version != VERSION:
            raise VersionMismatch(_version_error("the rank", version, "this engine")) from None
        raise
    if isinstance(frame, RankHello) and frame.version != VERSION:
        raise VersionMismatch(
            _version_error(f"rank {frame.rank} (weft {frame.release})", frame.version, "this engine")
        )
    return frame


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes) -> M:
    """Return the frame in ``data``. Raises FrameError for invalid bytes, or more bytes than the limit."""
    if len(data) > MAX_FRAME:
        raise FrameError(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME}")
    try:
        frame = decoder.decode(data)
    except (msgspec.DecodeError, ValueError, UnicodeDecodeError) as error:
        raise FrameError(f"not a frame of version {VERSION}: {error}") from None
    _check_size(type(frame), len(data))
    return frame


def _check_size(kind: type, size: int) -> None:
    most = MOST_BYTES.get(kind, _SMALL)
    if size > most:
        raise FrameError(f"a {kind.__name__} of {size} bytes is over its limit of {most}")


def _check_segment(segment: Segment) -> None:
    rest = (segment.gen, segment.start, segment.count, segment.logits, segment.sample, segment.next_k)
    rows = len(segment.slot)
    if any(len(column) != rows for column in rest):
        raise FrameError("the columns of a segment differ in length")


def _version_of_hello(data: bytes) -> int | None:
    """Return the version of an undecodable RankHello, or None."""
    try:
        found = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("type") != "RankHello":
        return None
    version = found.get("version")
    return version if isinstance(version, int) else None


def _version_error(sender: str, version: int, receiver: str) -> str:
    return f"{sender} speaks version {version} of the group protocol, {receiver} version {VERSION}"
