"""The boundary between a front and a head: one typed, tagged message class each, msgpack on the wire.

Unknown fields, unknown tags and frames over ``MAX_FRAME`` are refused. Ids are u64, minted inside Weft,
never taken from a client. A front may have sent anything; a head validates before it acts.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import numpy as np

from weft.common.errors import ErrorInfo, InvalidRequest
from weft.common.shared_bytes import SharedName
from weft.types.grammar import Grammar
from weft.types.measures import Measures
from weft.types.media import MediaItem
from weft.types.rooms import RoomTicket
from weft.types.sampling import TokenParams

VERSION = 9
"""The newest version of these messages that this release speaks."""
OLDEST = 1
"""The oldest version that this release understands. Fields added later have defaults, and are left out for a
peer with an older version:

    2   Submit.attempt, TokenEvent.attempt, the ends ``moved`` and ``evicted``, Welcome.block_size, Goodbye
    3   room and trace of Submit, TokenEvent.position, HeadStats.transfers; role, fingerprint and rooms of
        Welcome
    4   grammar, pooling, explain and session of Submit, embedding and cache_miss of TokenEvent; WatchPrefixes
        and PrefixIndex; prefill_rows, prefill_tokens, decode_rows, constrained_steps, mask_seconds,
        grammars_compiled and grammar_errors of HeadStats
    5   media of Submit; images_encoded, image_hits, embedding_bytes and encode_seconds of HeadStats
    6   room of MediaItem; the role ``encode``; tower, embeddings and tower_fingerprint of Welcome;
        embedding_transfers and embedding_host_bytes of HeadStats; Profile
    7   probe of Welcome, shared of MediaItem
    8   client of Submit
    9   queue_times and prefill_times of HeadStats
"""
MAX_FRAME = 64 << 20
READINESS_SALT = "weft readiness"
"""Salt of the sequences with which fronts see whether heads make tokens."""

Role: TypeAlias = Literal["unified", "prefill", "decode", "encode"]
Pooling: TypeAlias = Literal["", "last", "mean"]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Message, frozen=True, kw_only=True):
    """Front to head, the first message: the front's name, and the versions that it understands."""

    versions: tuple[int, int]
    """[oldest, newest]. Both ends speak the newest that both understand."""
    front: str
    quiet: bool = False
    """Send heartbeats to this front only while it has sequences here, and one in answer to this message."""


class Welcome(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Head to front, the answer to Hello: what the head serves."""

    versions: tuple[int, int]
    vocab_size: int
    """Ids 0 .. vocab_size - 1 can be prompted, sampled and biased."""
    max_model_len: int
    max_num_seqs: int
    num_blocks: tuple[int, ...]
    incarnation: int
    deterministic: bool = False
    """Whether logits are bitwise equal whatever is computed beside a sequence."""
    block_size: int = 0
    """Tokens of a block of its prefix cache; 0 when it does not say."""
    role: Role = "unified"
    fingerprint: str = ""
    """Of model, weights, dtypes and cache layout: heads with different ones are never paired. "" when it does
    not transfer caches."""
    rooms: str = ""
    """The address where it takes messages of rooms; "" when it does not."""
    tower: bool = False
    """Whether it encodes images."""
    embeddings: str = ""
    """The address for messages of rooms of embeddings; "" of a head that neither sends nor takes them."""
    tower_fingerprint: str = ""
    """Of what encodes images: tower, weights, dtype. Embeddings go between heads with equal ones only."""
    probe: SharedName | None = None
    """For a front that can open it: so this head can open what the front shows it (``MediaItem.shared``)."""


class Submit(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Front to head: start, or continue, one sequence.

    Sequences of one prompt share ``request``; ``choice`` numbers them. The first of them to arrive is
    prefilled, the others wait for its prompt and share its blocks.
    """

    sequence: int
    request: int
    choice: int = 0
    seed: int
    prompt_ids: bytes
    """int32, little-endian."""
    emitted_ids: bytes = b""
    """Output that the client has already, int32; penalties, limits and stops count it as output."""
    params: TokenParams
    priority: int = 0
    salt: str = ""
    """Prefixes are shared only between equal salts."""
    owner: int = 0
    """Slots are shared fairly among owners: one id for all sequences of a request; 0: ``request``."""
    client: int = 0
    """Number of the request's API key, 0 without keys. Keys share the places to compile grammars."""
    attempt: int = 0
    """The front's number of this sending of the sequence, from 0. A later attempt ends an earlier one."""
    room: RoomTicket | None = None
    """The transfer from a head that prefills to one that decodes. All else is equal in their Submits."""
    trace: str = ""
    """The front's span of this sending (W3C traceparent); "" where requests are not traced."""
    grammar: Grammar | None = None
    """What the whole output may be, ``emitted_ids`` included. It belongs to the head: no rank sees it."""
    pooling: Pooling = ""
    """Return an embedding, and no token: the prompt's last final hidden state, or the mean of all."""
    explain: bool = False
    """Whether to tell why the prompt's prefix was not found further in the cache
    (``TokenEvent.cache_miss``).
    """
    media: tuple[MediaItem, ...] = ()
    """The images of the prompt, in the order of their positions; they do not overlap."""
    session: str = ""
    """Of the conversation that this is a turn of, a hash; "" where it is not known. Its next turns go where
    this one went, and what it has cached is kept for a while."""


class Finish(_Message, frozen=True, kw_only=True):
    """Front to head: the text side ended the sequence (stop string), or its client went away. Idempotent."""

    sequence: int


class Drain(_Message, frozen=True, kw_only=True):
    """Front to head: no new sequences will come. The head ends when none is left."""


class Goodbye(_Message, frozen=True, kw_only=True):
    """Front to head: this front leaves, and its sequences end. The head serves others."""


class WatchPrefixes(_Message, frozen=True, kw_only=True):
    """Front to head: tell what the prefix cache has, now all of it, then what changes. Again on a gap."""


class Profile(_Message, frozen=True, kw_only=True):
    """Front to head: profile the steps of the next ``seconds``; 0 ends a profile. Nothing is answered."""

    seconds: float


class Shutdown(_Message, frozen=True, kw_only=True):
    """Owner of the head to head: stop now."""


class LogprobColumns(_Message, frozen=True, kw_only=True):
    """Logprobs of consecutive positions of one sequence; arrays as little-endian bytes."""

    width: int
    """1 + top."""
    ids: bytes
    """int32 [positions, width]; -1 pads."""
    values: bytes
    """float32 [positions, width]."""
    rank: bytes
    """int32 [positions]."""

    @property
    def positions(self) -> int:
        return len(self.rank) // 4

    @property
    def nbytes(self) -> int:
        return len(self.ids) + len(self.values) + len(self.rank)

    def first(self, count: int) -> LogprobColumns:
        """The first ``count`` positions, or all where there are not so many."""
        if count >= self.positions:
            return self
        size = 4 * count
        return LogprobColumns(
            width=self.width,
            ids=self.ids[: size * self.width],
            values=self.values[: size * self.width],
            rank=self.rank[:size],
        )

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids int32 [n, width], values float32 [n, width], rank int32 [n])."""
        shape = (-1, self.width)
        return (
            np.frombuffer(self.ids, "<i4").reshape(shape),
            np.frombuffer(self.values, "<f4").reshape(shape),
            np.frombuffer(self.rank, "<i4"),
        )


class CacheMiss(_Message, frozen=True, kw_only=True):
    """Why the cached prefix of a prompt ends where it does.

    ``reason`` is one of: "none" (nothing more could be cached: the last token is always computed),
    "differs" (a sequence seen before goes on with other tokens), "evicted" (it was cached, and its block
    given to another sequence), "state" (it is cached, but no snapshot of the recurrent state is),
    "salt" (its client sent it under another salt), "computing" (another sequence computes it now), "new" (no
    prompt like it is remembered), "disabled" (nothing is remembered, or the request needs all computed).
    """

    reason: str
    position: int
    """Tokens of the prompt that were found; where the reason is "differs", those that are alike, which may
    be more: full blocks are found."""
    theirs: bytes = b""
    """Where the reason is "differs": the remembered ids from ``position`` on, at most 32, int32."""


class TokenEvent(_Message, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Head to front: new tokens of one sequence, its end, or both. The last one has ``finish``."""

    sequence: int
    token_ids: tuple[int, ...] = ()
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    """The next piece, in order, for prompt tokens 1, 2, ... All pieces come before the first token."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when the sequence was first admitted."""
    accepted: int = 0
    """How many of ``token_ids`` were drafts."""
    rejected: int = 0
    """Drafts that were verified in the same step and rejected."""
    finish: str | None = None
    """"stop", "length", "abort" or "error". Two more end the sequence at this head, but not
    the client's stream: "moved" (another head has it already and goes on), "evicted" (any head may go on)."""
    stop_id: int | None = None
    error: ErrorInfo | None = None
    attempt: int = 0
    """The attempt of the Submit that it answers."""
    position: int = -1
    """Of a sequence with a room: output tokens before ``token_ids``, the Submit's ``emitted_ids`` among them.
    Both heads tell the first token; -1 when it does not say."""
    embedding: bytes = b""
    """Of a Submit with ``pooling``: float32, little-endian, [hidden size], not normalized. It comes with the
    end, whose reason is "stop"."""
    cache_miss: CacheMiss | None = None
    """Of a Submit with ``explain``, once, with ``num_cached``."""


class Tokens(_Message, frozen=True, kw_only=True):
    """Head to front: the new tokens of one step."""

    step: int
    events: tuple[TokenEvent, ...]


class TransferStats(_Message, frozen=True, kw_only=True):
    """Transfers of a head with a role: counters since start unless said otherwise."""

    awaiting: int = 0
    """Now: sequences that await their room."""
    fetching: int = 0
    """Now: sequences whose cache is coming."""
    rooms: int = 0
    """Now: rooms that have not ended, on either side."""
    blocks_on_hold: int = 0
    """Now: blocks that a transfer may still touch."""
    done: int = 0
    failed: int = 0
    corrupt: int = 0
    """Rooms that failed by a digest; they are among ``failed``."""
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    """From the first byte to the last, of all rooms that were done."""
    evictions: int = 0
    """Sequences that were given back to their front."""
    took: Measures = Measures()
    """``seconds``, one by one (bounds: ``measures.SECONDS``)."""
    exposed: Measures = Measures()
    """At the sender: seconds from the first token until the receiver had all, which no prefill hid."""
    sizes: Measures = Measures()
    """Bytes of each room that was done (bounds: ``measures.BYTES``)."""


class HeadStats(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Counters since start unless said otherwise."""

    steps: int = 0
    mixed_steps: int = 0
    idle_steps: int = 0
    """Steps without rows, which ran as other replicas of the domain had rows; ``steps`` counts them, too."""
    running: int = 0
    """Now."""
    waiting: int = 0
    """Now."""
    kv_usage: float = 0.0
    """Now: used share of the fullest pool, 0 .. 1."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Tokens found there."""
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: tuple[int, ...] = ()
    """Drafts verified, by position in the draft: one entry for each draft that a step may verify of a
    sequence.
    """
    drafts_accepted: tuple[int, ...] = ()
    """Drafts accepted, by position in the draft: they and all drafts before them were right."""
    prefill_rows: int = 0
    """Rows of prompts in all steps: a prompt has one in each step that computes some of it."""
    prefill_tokens: int = 0
    """Tokens of those rows."""
    decode_rows: int = 0
    """Rows of sequences whose prompt is computed, in all steps."""
    constrained_steps: int = 0
    """Steps in which a grammar said what some row may sample."""
    mask_seconds: float = 0.0
    """Seconds in which their masks were made; steps computed meanwhile."""
    grammars_compiled: int = 0
    """Grammars that were compiled, or found compiled, for a sequence."""
    grammar_errors: int = 0
    """Sequences that their grammar ended with an error."""
    row_errors: int = 0
    recoveries: int = 0
    """Times that ranks were lost and their group was formed anew."""
    requeued: int = 0
    """Sequences that were running when ranks were lost; they were computed again."""
    free_blocks: tuple[int, ...] = ()
    """Now, one for each cache kind."""
    free_slots: int = 0
    """Now."""
    bad_frames: int = 0
    overlapped_steps: int = 0
    """Computed in two micro-batches."""
    communication_seconds: float = 0.0
    """Seconds in which a collective of the head's rank was under way."""
    communication_hidden_seconds: float = 0.0
    """Seconds of ``communication_seconds`` during which the same rank computed."""
    transfers: TransferStats | None = None
    embedding_transfers: TransferStats | None = None
    """Of a head that sends or takes embeddings of images: the transfers of these."""
    images_encoded: int = 0
    image_hits: int = 0
    """Images of prompts whose embedding was there already."""
    embedding_bytes: int = 0
    embedding_host_bytes: int = 0
    """Now: of the embeddings of images that a rank keeps, on its device and in host memory."""
    encode_seconds: float = 0.0
    """Seconds in which the head's rank encoded images; on a GPU, in which it launched that."""
    queue_times: Measures = Measures()
    """Seconds from the arrival of a sequence until a step gave it a slot, by ``SECONDS``."""
    prefill_times: Measures = Measures()
    """Seconds from then until its first token."""


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Head to front, sent by the step loop: it proves that steps make progress, not just that the process
    exists.
    """

    idle: bool
    """Whether the head has nothing to do. If not, ``stats.steps`` must have grown within
    ``--engine-timeout``.
    """
    stats: HeadStats


PREFIX_KEY = 16
"""Bytes of a key of ``PrefixIndex``."""


class PrefixIndex(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Head to front, to those that asked: which prefixes are cached. The first one has all, each further one
    what changed since the one before; a number that is left out means that a change was missed.

    A key is the hash of the block of a prefix that ends it (``weft.kv.hashing``). There is one at each
    multiple of ``positions``, which is a whole number of ``Welcome.block_size``.
    """

    number: int
    whole: bool = False
    """Whether ``added`` is everything, and what was known before is void."""
    positions: int
    added: bytes = b""
    removed: bytes = b""


class HeadFailed(_Message, frozen=True, kw_only=True):
    """Head to front: the head failed with ``error`` and ends. The last message of a head; its sequences have
    ended.
    """

    error: ErrorInfo


ToHead = Hello | Submit | Finish | WatchPrefixes | Drain | Goodbye | Profile | Shutdown
ToFront = Welcome | Tokens | Heartbeat | PrefixIndex | HeadFailed


def common_version(versions: tuple[int, int]) -> int | None:
    """The newest version that both ends understand, if any. ``versions``: the peer's, [oldest, newest]."""
    low, high = versions
    newest = min(VERSION, high)
    return newest if newest >= max(OLDEST, low) else None


_encoder = msgspec.msgpack.Encoder()
_to_head: msgspec.msgpack.Decoder[ToHead] = msgspec.msgpack.Decoder(ToHead)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToHead | ToFront) -> bytes:
    """The message as one frame. Raises InvalidRequest over ``MAX_FRAME``."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME:
        raise InvalidRequest("the request is too large for one message")
    return frame


def decode_to_head(frame: bytes) -> ToHead:
    """Parses a frame from a front. Raises msgspec.DecodeError (or its ValidationError) or ValueError."""
    if len(frame) > MAX_FRAME:
        raise ValueError("frame over the size limit")
    return _to_head.decode(frame)


def decode_to_front(frame: bytes) -> ToFront:
    """Parses a frame from a head. Raises msgspec.DecodeError (or its ValidationError) or ValueError."""
    if len(frame) > MAX_FRAME:
        raise ValueError("frame over the size limit")
    return _to_front.decode(frame)


def ids_to_bytes(ids: list[int] | np.ndarray) -> bytes:
    """Token ids as a Submit carries them."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(data: bytes) -> np.ndarray:
    """int32 [n] from a Submit's bytes. Raises ValueError when the length is not a multiple of 4."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)
