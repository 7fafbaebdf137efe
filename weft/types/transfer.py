"""Transfers as data. A transfer moves the cache of one sequence from a prefill group to a decode group.

    API server ──► receiver  Submit with a transfer: blocked, without blocks
    API server ──► sender    Submit with a transfer: queued
    sender  ── Admitted ──►  receiver        the prompt's lengths, hashes and cache layout
    sender  ◄── Bound | Later | Refused ──   blocks are reserved: where the sender's ranks push to
    ranks of the sender ═══ bytes, layer by layer ═══► ranks of the receiver       (``weft.disagg.transport``)
    sender  ── Metadata ──►  receiver        first tokens, logprobs, drafts
    sender  ◄─ AllReceived ─ receiver        every rank has every byte, with right digests
    either  ── Fence ──►     the other       the transfer failed or is not needed: stop all access
    the other ── Fenced ──►                  no process here accesses the memory

Messages are frozen structs, one tag each, msgpack on the wire. Unknown fields and tags are rejected, as are
messages over the size limit of their type. Lost, repeated and late messages are legal: see
``weft.disagg.protocol``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from weft.common.errors import ErrorInfo, WeftError

VERSION = 1
"""Version of these messages. Engine processes of different versions are never paired: the version is part of
the fingerprint."""

MOST_SECONDS = 600.0
"""Maximum seconds of a transfer. Ended transfers are remembered for longer."""

U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
# msgspec's bounds are int64, so there is no upper bound here. msgpack itself is limited to 64 bits.
U64 = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]


class TransferMessageError(WeftError):
    """Bytes that are not a valid transfer message."""

    code, blame = "bad_room_message", "peer"


class TransferKey(NamedTuple):
    """The key of one transfer. The API server creates the key. A retry is a new attempt, with separate
    memory."""

    transfer: U64
    attempt: U32
    incarnation: U64
    """Incarnation of the sending engine process, from the Welcome: a restarted sender has other transfers."""


class Peer(NamedTuple):
    """A process at the other end of a transfer: name and number of the start."""

    name: str
    incarnation: int


class TransferParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The transfer parameters of a sequence, as part of a Submit."""

    key: TransferKey
    sends: bool
    """True if the engine process prefills the sequence and sends the cache. False if the engine process
    receives and decodes."""
    peer: Peer
    """The engine process at the other end, named by the address for transfer messages in the Welcome."""
    seconds: float
    """Maximum seconds of the transfer, counted from the first offer. Before the offer the sequence is in the
    sender's queue."""


class Outcome(IntEnum):
    """The result of a transfer on one rank. The outcome of a group is the minimum over all ranks."""

    failed = 0
    pending = 1
    done = 2


class State(IntEnum):
    """The state of a transfer on one side. Transitions only go to the right:

    new -> bound -> active -> done
       \\----\\-------\\-----> failing -> fenced
    """

    new = 0
    bound = 1
    active = 2
    failing = 3
    done = 4
    """The receiver has all bytes; the sender may reuse the memory."""
    fenced = 5
    """Failed, and no process can access the memory any more, so the memory may be reused."""

    @property
    def ended(self) -> bool:
        return self >= State.done


class _TransferPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    pass


class _TransferMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    key: TransferKey


class TensorDims(_TransferPart, frozen=True):
    """One tensor of a KV cache group on a rank: ``weft.config.cache_layout.TensorLayout`` as a message."""

    name: str
    dims: tuple[tuple[str, Count], ...]
    dtype: str


class CacheGroupDims(_TransferPart, frozen=True):
    """One KV cache group on each rank of a group of ranks."""

    kind: Literal["full", "window", "chunk", "latent", "compressed", "state", "embedding"]
    layers: tuple[int, ...]
    block_size: Annotated[int, Meta(ge=1, lt=1 << 24)]
    """Positions per block."""
    window: Count
    ratio: Annotated[int, Meta(ge=1, lt=1 << 24)]
    kv_heads: Count
    """KV heads of the whole model; 0 where entries are not made of KV heads."""
    tensors: tuple[TensorDims, ...]
    shards: bool = False
    """For embeddings on the receiver. True if each rank receives its share of an image's rows
    (``config.sharding.balanced_share``) and the ranks exchange the shares. False if each rank receives all
    rows.
    """


class GroupDims(_TransferPart, frozen=True):
    """The caches of every rank of a group."""

    ranks: Annotated[int, Meta(ge=1, le=1024)]
    """Tensor parallel size."""
    kinds: tuple[CacheGroupDims, ...]


class Blocks(_TransferPart, frozen=True):
    """The location of a sequence in the pool of one KV cache group, on every rank of its group."""

    first: Count
    """Number of the first block table entry in ``ids``."""
    ids: bytes
    """int32 [n], little-endian. For a state: one id, of the slot copy or of the snapshot."""


class Endpoint(_TransferPart, frozen=True):
    """The addresses at which one rank of the receiver receives bytes, one for each transport.

    The sender's engine chooses one transport (``weft.disagg.protocol.pairing``) and passes an endpoint with
    only this transport. An older engine with one transport per endpoint refuses several by name.
    """

    transport: str
    """One name, or several: ``shm,tcp``."""
    address: str
    """One line per name."""
    incarnation: U64

    @classmethod
    def of(cls, ways: Mapping[str, str], incarnation: int) -> Endpoint:
        """``ways``: transport -> address, in the rank's order."""
        return cls(",".join(ways), "\n".join(ways.values()), incarnation)

    @property
    def ways(self) -> dict[str, str]:
        """Transport -> address, in the rank's order. Without an address for a name: empty."""
        names, addresses = self.transport.split(","), self.address.split("\n")
        return dict(zip(names, addresses, strict=True)) if len(names) == len(addresses) else {}


class Admitted(_TransferMessage, frozen=True, kw_only=True):
    """Sender to receiver: prefill begins, or will begin once the receiver is bound."""

    num_prompt: Count
    choices: Annotated[int, Meta(ge=1, lt=1 << 16)] = 1
    dims: GroupDims
    hashes: bytes = b""
    """Hashes of the prompt's full base blocks, 16 bytes each, for the receiver's prefix lookup."""


class Bound(_TransferMessage, frozen=True, kw_only=True):
    """Receiver to sender: blocks are reserved. The sender pushes positions ``start`` .. num_prompt - 1."""

    start: Count
    """Number of positions already in the receiver's cache."""
    dims: GroupDims
    blocks: tuple[Blocks, ...]
    """One entry per KV cache group."""
    endpoints: tuple[Endpoint, ...]
    """One entry per rank of the receiver."""


class Later(_TransferMessage, frozen=True, kw_only=True):
    """Receiver to sender: no free blocks now; offer again after ``seconds``."""

    seconds: Annotated[float, Meta(ge=0.0, le=3600.0)]


class Refused(_TransferMessage, frozen=True, kw_only=True):
    """Receiver to sender: the pair can never work. The API server must choose another pair."""

    error: ErrorInfo


class FirstToken(_TransferPart, frozen=True):
    """The prefill result of one choice."""

    choice: U32
    token: U32
    drafts: bytes = b""
    """int32: drafts proposed after the token."""
    logprobs: bytes = b""
    """A packed ``messages.LogprobColumns``; empty if not requested."""


class Metadata(_TransferMessage, frozen=True, kw_only=True):
    """Sender to receiver: everything is computed, with the result."""

    first: tuple[FirstToken, ...]
    digest: U64 = 0
    """Digest of the message with a digest of 0."""


class AllReceived(_TransferMessage, frozen=True, kw_only=True):
    """Receiver to sender: bytes and metadata are received and verified. The sender may reuse the memory."""


class Fence(_TransferMessage, frozen=True, kw_only=True):
    """Either side: the transfer ends without success. The other side stops and answers ``Fenced``."""

    error: ErrorInfo


class Fenced(_TransferMessage, frozen=True, kw_only=True):
    """Either side: no process on the answering side accesses memory of the transfer any more."""


TransferMessage = Admitted | Bound | Later | Refused | Metadata | AllReceived | Fence | Fenced

_SMALL = 1 << 16
MOST_BYTES: dict[type, int] = {Admitted: 16 << 20, Bound: 16 << 20, Metadata: 16 << 20}
"""Maximum bytes of a message, by type; 64 KiB for all other types."""
MAX_MESSAGE = max(MOST_BYTES.values())


# ---- events for the scheduler


class TransferWanted(msgspec.Struct, frozen=True):
    """To a receiver's scheduler: the sender offers the sequence. The scheduler must reserve, postpone or
    refuse."""

    key: TransferKey
    offer: Admitted


class TransferBound(msgspec.Struct, frozen=True):
    """To a sender's scheduler: the receiver needs positions from ``start`` on. Computed chunks may be
    pushed."""

    key: TransferKey
    start: int


class TransferReceived(msgspec.Struct, frozen=True):
    """The transfer is complete. A receiver can admit the sequence as a decode row. A sender's blocks are
    free."""

    key: TransferKey
    first: tuple[FirstToken, ...] = ()
    """First tokens, on the receiver; empty on the sender."""


class TransferFailed(msgspec.Struct, frozen=True):
    """The transfer has failed. The memory stays pinned until ``TransferFreed``."""

    key: TransferKey
    error: ErrorInfo


class TransferFreed(msgspec.Struct, frozen=True):
    """No process can access the memory of a failed transfer any more."""

    key: TransferKey


TransferEvent = TransferWanted | TransferBound | TransferReceived | TransferFailed | TransferFreed


# ---- requests of the scheduler


class OfferTransfer(msgspec.Struct, frozen=True):
    """From a sender's scheduler: the sequence is admitted, and its ``num_prompt`` known ids will be
    computed."""

    key: TransferKey
    num_prompt: int
    num_cached: int
    """Positions found in the sender's prefix cache."""
    hashes: bytes = b""
    """Block hashes: see ``Admitted.hashes``."""


class FinishTransfer(msgspec.Struct, frozen=True):
    """From a sender's scheduler: everything is computed."""

    key: TransferKey
    first: FirstToken | None = None
    """None for an embedding."""


class CancelTransfer(msgspec.Struct, frozen=True):
    """From either scheduler: the sequence has ended, or cannot continue with the transfer."""

    key: TransferKey
    error: ErrorInfo | None = None
    """None if nothing failed: the sequence ended at the first token."""


class ReserveTransfer(msgspec.Struct, frozen=True):
    """From a receiver's scheduler, answer to ``TransferWanted``: ``blocks`` are reserved."""

    key: TransferKey
    start: int
    """Number of positions found in the receiver's cache."""
    blocks: tuple[Blocks, ...]
    """One entry per KV cache group."""


class PostponeTransfer(msgspec.Struct, frozen=True):
    """From a receiver's scheduler, answer to ``TransferWanted``: no free blocks now."""

    key: TransferKey
    seconds: float


class RefuseTransfer(msgspec.Struct, frozen=True):
    """From a receiver's scheduler, answer to ``TransferWanted``: the transfer can never work."""

    key: TransferKey
    error: ErrorInfo


TransferRequest = (
    OfferTransfer | FinishTransfer | CancelTransfer | ReserveTransfer | PostponeTransfer | RefuseTransfer
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[TransferMessage] = msgspec.msgpack.Decoder(TransferMessage)
_M = TypeVar("_M", bound=TransferMessage)


def encode(message: TransferMessage) -> bytes:
    """Return the message as bytes. Raises TransferMessageError over the limit of the type."""
    data = _encoder.encode(message)
    _check_size(type(message), len(data))
    return data


def decode(data: bytes) -> TransferMessage:
    """Parse a message of a peer. Raises TransferMessageError for anything except a valid message of the
    current version."""
    if len(data) > MAX_MESSAGE:
        raise TransferMessageError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE}")
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, UnicodeDecodeError) as error:
        raise TransferMessageError(f"not a transfer message in version {VERSION}: {error}") from None
    _check_size(type(message), len(data))
    return message


def _check_size(kind: type, size: int) -> None:
    most = MOST_BYTES.get(kind, _SMALL)
    if size > most:
        raise TransferMessageError(f"a {kind.__name__} of {size} bytes is over its limit of {most}")
