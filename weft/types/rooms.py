"""Rooms as data: one transfer of a sequence's cache from the group that prefilled it to the one that
decodes it.

    front ──► receiver    Submit with a room: awaits, holds nothing
    front ──► sender      Submit with a room: queued
    sender  ── Admitted ──►  receiver        the prompt's lengths, hashes and cache layout
    sender  ◄── Bound | Later | Refused ──   blocks are reserved: where the sender's ranks push to
    ranks of the sender ═══ bytes, layer by layer ═══► ranks of the receiver       (``weft.transports``)
    sender  ── Metadata ──►  receiver        first tokens, logprobs, drafts
    sender  ◄── Landed ──    receiver        every rank has every byte, and their digests are right
    either  ── Fence ──►     the other       the room failed, or is not needed: stop touching its memory
    the other ── Fenced ──►                  nothing here will touch it

Messages are frozen structs, one tag each, msgpack on the wire. Unknown fields and tags, and messages over the
size limit of their type, are refused. Lost, repeated and late ones are legal: see ``weft.transfer``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from weft.common.errors import ErrorInfo, WeftError

VERSION = 2
"""Of these messages. Heads of different versions make no pairs: it is part of what a front pairs them by."""

MOST_SECONDS = 600.0
"""That a room may take: what has ended is remembered for longer."""

U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
# msgspec's bounds are int64; msgpack itself holds no integer of more than 64 bits.
U64 = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]


class RoomMessageError(WeftError):
    """Bytes that are no message of a room, or a message that cannot be right."""

    code, blame = "bad_room_message", "peer"


class RoomKey(NamedTuple):
    """Which transfer. The front mints it; a retry is a new attempt, with memory of its own."""

    room: U64
    attempt: U32
    incarnation: U64
    """Of the sending group's process, as its Welcome said. A sender that was restarted has no part in it."""


class Peer(NamedTuple):
    """A process at the other end: its name, and which start of it."""

    name: str
    incarnation: int


class RoomTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A sequence's part in a room, as its Submit has it."""

    key: RoomKey
    sends: bool
    """Whether this head prefills the sequence and sends its cache; else it receives it and decodes."""
    peer: Peer
    """The head at the other end. Its name is the address where it takes messages of rooms, as its Welcome
    has it.
    """
    seconds: float
    """That the room may take, from its first offer on: until then the sequence is in the sender's queue."""


class Outcome(IntEnum):
    """How a transfer stands on one rank. Those of a group are combined by taking the least."""

    failed = 0
    pending = 1
    done = 2


class State(IntEnum):
    """The state of a room on one side. It only ever moves to the right of its line.

    new -> bound -> active -> done
       \\----\\-------\\-----> failing -> fenced
    """

    new = 0
    bound = 1
    active = 2
    failing = 3
    done = 4
    """The bytes belong to the receiver; the sender may reuse its memory."""
    fenced = 5
    """Failed, and nobody can touch its memory any more: it may be reused."""

    @property
    def ended(self) -> bool:
        return self >= State.done


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    pass


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    key: RoomKey


class TensorDims(_Part, frozen=True):
    """One tensor of a cache kind on a rank: ``weft.config.cache_layout.TensorLayout`` as a message has it."""

    name: str
    dims: tuple[tuple[str, Count], ...]
    dtype: str


class KindDims(_Part, frozen=True):
    """One cache kind on each rank of a group."""

    kind: Literal["full", "window", "latent", "compressed", "state", "embedding"]
    layers: tuple[int, ...]
    block_size: Annotated[int, Meta(ge=1, lt=1 << 24)]
    """Positions of a block."""
    window: Count
    ratio: Annotated[int, Meta(ge=1, lt=1 << 24)]
    kv_heads: Count
    """Of the whole model; 0 where entries are not made of KV heads."""
    tensors: tuple[TensorDims, ...]
    shards: bool = False
    """Of embeddings, where they are received: each rank takes its share of an image's rows
    (``config.sharding.balanced_share``), and the ranks exchange them; else each takes all."""


class GroupDims(_Part, frozen=True):
    """The caches of every rank of a group."""

    ranks: Annotated[int, Meta(ge=1, le=1024)]
    """Tensor parallel size."""
    kinds: tuple[KindDims, ...]


class Blocks(_Part, frozen=True):
    """Where a sequence lies in the pool of one kind, on every rank of its group."""

    first: Count
    """Number of the first entry of the sequence's block table that ``ids`` has."""
    ids: bytes
    """int32, little-endian. Of a state: one id, of the slot copy or the snapshot that has it."""


class Endpoint(_Part, frozen=True):
    """Where one rank of the receiver takes bytes."""

    transport: str
    address: str
    incarnation: U64


class Admitted(_Message, frozen=True, kw_only=True):
    """Sender to receiver: prefill begins (or will as soon as the receiver is bound)."""

    num_prompt: Count
    choices: Annotated[int, Meta(ge=1, lt=1 << 16)] = 1
    dims: GroupDims
    hashes: bytes = b""
    """Of the prompt's full base blocks, 16 bytes each, for the receiver's own prefix lookup."""


class Bound(_Message, frozen=True, kw_only=True):
    """Receiver to sender: blocks are reserved. The sender pushes positions ``start`` .. num_prompt - 1."""

    start: Count
    """Positions before it are in the receiver's cache already."""
    dims: GroupDims
    blocks: tuple[Blocks, ...]
    """For each kind."""
    endpoints: tuple[Endpoint, ...]
    """For each rank of the receiver."""


class Later(_Message, frozen=True, kw_only=True):
    """Receiver to sender: no room now; offer again after ``seconds``."""

    seconds: Annotated[float, Meta(ge=0.0, le=3600.0)]


class Refused(_Message, frozen=True, kw_only=True):
    """Receiver to sender: this pair will never work; the front pairs again. Nothing was bound."""

    error: ErrorInfo


class FirstToken(_Part, frozen=True):
    """What prefill made of one choice."""

    choice: U32
    token: U32
    drafts: bytes = b""
    """int32: proposed behind the token."""
    logprobs: bytes = b""
    """A ``messages.LogprobColumns``, packed; empty where none was asked for."""


class Metadata(_Message, frozen=True, kw_only=True):
    """Sender to receiver: everything is computed, and this came out of it."""

    first: tuple[FirstToken, ...]
    digest: U64 = 0
    """Of this message with a digest of 0."""


class Landed(_Message, frozen=True, kw_only=True):
    """Receiver to sender: bytes and metadata are here and right. The sender's memory is its own again."""


class Fence(_Message, frozen=True, kw_only=True):
    """Either way: the room ends without success. Whoever gets it stops, and answers ``Fenced``."""

    error: ErrorInfo


class Fenced(_Message, frozen=True, kw_only=True):
    """Either way: nothing on this side touches memory of the room any more, or ever will."""


RoomMessage = Admitted | Bound | Later | Refused | Metadata | Landed | Fence | Fenced

_SMALL = 1 << 16
MOST_BYTES: dict[type, int] = {Admitted: 16 << 20, Bound: 16 << 20, Metadata: 16 << 20}
"""Size of a message at most, by type; 64 KiB of the others."""
MAX_MESSAGE = max(MOST_BYTES.values())


# ---- what the scheduler sees


class RoomWanted(msgspec.Struct, frozen=True):
    """To a receiver's scheduler: prefill of the sequence was admitted. Reserve blocks, or say later, or
    refuse.
    """

    key: RoomKey
    offer: Admitted


class RoomBound(msgspec.Struct, frozen=True):
    """To a sender's scheduler: the receiver takes positions from ``start`` on; chunks may be pushed once
    computed.
    """

    key: RoomKey
    start: int


class RoomLanded(msgspec.Struct, frozen=True):
    """The room is done: a receiver can admit the sequence as a decode row, a sender's blocks are free."""

    key: RoomKey
    first: tuple[FirstToken, ...] = ()
    """Of a receiver."""


class RoomFailed(msgspec.Struct, frozen=True):
    """The room will not be done. Its memory stays on hold until ``RoomFreed``."""

    key: RoomKey
    error: ErrorInfo


class RoomFreed(msgspec.Struct, frozen=True):
    """Nobody can touch the memory of a failed room any more."""

    key: RoomKey


RoomEvent = RoomWanted | RoomBound | RoomLanded | RoomFailed | RoomFreed


# ---- what the scheduler asks for


class OfferRoom(msgspec.Struct, frozen=True):
    """From a sender's scheduler: the sequence is admitted; its ``num_prompt`` known ids will be computed."""

    key: RoomKey
    num_prompt: int
    num_cached: int
    """Positions of its own prefix hit."""
    hashes: bytes = b""
    """As ``Admitted.hashes``."""


class FinishRoom(msgspec.Struct, frozen=True):
    """From a sender's scheduler: everything is computed."""

    key: RoomKey
    first: FirstToken | None = None
    """None of an embedding."""


class CancelRoom(msgspec.Struct, frozen=True):
    """From either scheduler: the sequence has ended, or cannot go on with the room."""

    key: RoomKey
    error: ErrorInfo | None = None
    """None: the sequence ended at its first token, and nothing failed."""


class ReserveRoom(msgspec.Struct, frozen=True):
    """From a receiver's scheduler, answer to ``RoomWanted``: these blocks are reserved."""

    key: RoomKey
    start: int
    """Positions before it are in the cache already."""
    blocks: tuple[Blocks, ...]
    """For each kind."""


class PostponeRoom(msgspec.Struct, frozen=True):
    """From a receiver's scheduler, answer to ``RoomWanted``: no room now."""

    key: RoomKey
    seconds: float


class RefuseRoom(msgspec.Struct, frozen=True):
    """From a receiver's scheduler, answer to ``RoomWanted``: this will never work."""

    key: RoomKey
    error: ErrorInfo


RoomRequest = OfferRoom | FinishRoom | CancelRoom | ReserveRoom | PostponeRoom | RefuseRoom

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RoomMessage] = msgspec.msgpack.Decoder(RoomMessage)
_M = TypeVar("_M", bound=RoomMessage)


def encode(message: RoomMessage) -> bytes:
    """The message's bytes. Raises RoomMessageError over the limit of its type."""
    data = _encoder.encode(message)
    _check_size(type(message), len(data))
    return data


def decode(data: bytes) -> RoomMessage:
    """What a peer sent. Raises RoomMessageError for all that is not exactly a message of this version."""
    if len(data) > MAX_MESSAGE:
        raise RoomMessageError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE}")
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, UnicodeDecodeError) as error:
        raise RoomMessageError(f"not a message of a room in version {VERSION}: {error}") from None
    _check_size(type(message), len(data))
    return message


def _check_size(kind: type, size: int) -> None:
    most = MOST_BYTES.get(kind, _SMALL)
    if size > most:
        raise RoomMessageError(f"a {kind.__name__} of {size} bytes is over its limit of {most}")
