"""The protocol between an API server and an engine process: tagged msgspec structs, sent as msgpack.

Unknown fields, unknown tags and frames over ``MAX_FRAME`` are rejected. Ids are u64 numbers that Weft
generates, never numbers of a client. An engine process validates every message before acting.

Pixels of a Submit are raw frames after the message, to avoid copies of megabytes: one frame for each image of
``Submit.media``, in order, or no frame at all. An engine process on the same host may get the name of shared
memory instead. The frame of such an image is empty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from weft.common.errors import ErrorInfo, InvalidRequest
from weft.common.shared_bytes import SharedName
from weft.types.adapters import AdapterChanged, DropAdapter, LoadAdapter
from weft.types.grammar import Grammar
from weft.types.handshake import EngineIdentity
from weft.types.media_item import MediaItem
from weft.types.routes import Routes
from weft.types.sampling import TokenParams
from weft.types.tier_flush import FlushTier
from weft.types.tiers import TierStats
from weft.types.transfer import TransferParameters
from weft.types.transport_counts import TransportCounts
from weft.types.weights import (
    DropWeights,
    FreeMemory,
    JoinTrainer,
    ReceiveWeights,
    StageWeights,
    UseWeights,
    WeightsChanged,
)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_TOKENS = (1.0, *(2.0**power for power in range(3, 15)))
BYTES = (2.0**16, 2.0**18, 2.0**20, 2.0**22, 2.0**24, 2.0**26, 2.0**28, 2.0**30, 2.0**32)


class Measures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts of numbers between bounds, and the sum. Empty before the first number."""

    counts: tuple[int, ...] = ()
    """One count for each bound (numbers in (previous bound, bound]), and one for larger numbers."""
    total: float = 0.0

    def add(self, bounds: tuple[float, ...], value: float) -> Measures:
        """Return the measures with ``value`` added. ``bounds`` must be the same in every call."""
        counts = list(self.counts) or [0] * (len(bounds) + 1)
        counts[bisect_left(bounds, value)] += 1
        return Measures(counts=tuple(counts), total=self.total + value)

    def __add__(self, other: Measures) -> Measures:
        """Return the sum of two measures with equal bounds."""
        one, two = self.counts, other.counts
        counts = tuple(map(sum, zip(one, two, strict=True))) if one and two else one or two
        return Measures(counts=counts, total=self.total + other.total)

    def cumulative(self, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
        """Return (bound, count of numbers up to the bound) for each bound and +Inf, as Prometheus expects."""
        counts = self.counts if len(self.counts) == len(bounds) + 1 else (0,) * (len(bounds) + 1)
        found, below = list[tuple[str, float]](), 0
        for bound, count in zip((*bounds, float("inf")), counts, strict=True):
            below += count
            found.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(below)))
        return found


VERSION = 8
"""The newest version of these messages. The constants ``.._SINCE`` list the changes, also in ``handshake``
and ``versions``."""
OLDEST = 1
"""The oldest supported version. A sender uses only the fields of the newest common version."""
SENT_SINCE = 2
"""Version that added ``TransferStats.sent``."""
TIER_SINCE = 3
"""Version that added ``EngineStats.tier`` and ``FlushTier``."""
ROUTES_SINCE = 4
"""Version that added ``Submit.routes``, ``Submit.forced`` and ``TierStats.levels``."""
REPORTS_SINCE = 6
"""Version from which every API server gets ``WeightsChanged`` after a change by another API server."""
SLEEP_SINCE = 5
"""Version that added ``FreeMemory``."""
RECEIVE_SINCE = 6
"""Version that added ``JoinTrainer`` and ``ReceiveWeights``."""
LAG_SINCE = 7
"""Version that added ``MediaItem.lag``, and grids that count averaged frames."""
OVERLAP_SINCE = 8
"""Version that added ``EngineStats.overlap_choices``."""
MAX_FRAME = 64 << 20
READINESS_SALT = "weft readiness"
"""Salt of probe sequences. API servers send probe sequences to check if an engine process produces tokens."""

Role: TypeAlias = Literal["unified", "prefill", "decode", "encode"]
Pooling: TypeAlias = Literal["", "last", "mean", "cls", "classify"]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Message, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """API server to engine, the first message. Unknown fields are ignored, so that every release can read
    ``versions``."""

    versions: tuple[int, int]
    """[oldest, newest]. Both ends use the newest common version."""
    front: str
    quiet: bool = False
    """True: send one heartbeat as answer, and further heartbeats only while the API server has sequences at
    the engine."""
    engine: EngineIdentity | None = None
    """The wanted engine process. Another process refuses. Only for a peer of version 2 or later."""
    pause: str | None = None
    """State of the pause at the API server (``PauseState.text``), "" before the first pause; None for an API
    server that shares no pause through engines. Only for a peer of version 2 or later."""


class Welcome(_Message, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """Engine to API server, the answer to Hello: a description of the engine. As in Hello, unknown fields are
    ignored."""

    versions: tuple[int, int]
    vocab_size: int
    """Ids 0 .. vocab_size - 1 can be prompted, sampled and biased."""
    max_model_len: int
    max_num_seqs: int
    num_blocks: tuple[int, ...]
    incarnation: int
    deterministic: bool = False
    """True if logits are bitwise invariant under the batch, see ``EngineCore.deterministic``."""
    block_size: int = 0
    """Tokens per block of the prefix cache; 0 if unknown."""
    role: Role = "unified"
    fingerprint: str = ""
    """Fingerprint of model, weights, dtypes and cache layout. Engine processes with different fingerprints
    are never paired. "" for an engine process without KV transfers."""
    transfer_address: str = ""
    """Address for messages of KV transfers; "" for an engine process without KV transfers."""
    tower: bool = False
    """True if the engine process encodes images."""
    embeddings: str = ""
    """Address for messages of embedding transfers; "" for an engine process without embedding transfers."""
    tower_fingerprint: str = ""
    """Fingerprint of the image encoder: tower, weights, dtype. Embeddings move only between engine processes
    with equal fingerprints."""
    probe: SharedName | None = None
    """Name of shared memory. An API server that can open it may publish pixels (``MediaItem.shared``)."""
    engine: EngineIdentity | None = None
    """Identity of the engine process. Since version 2."""
    max_loras: int = 0
    """Places for LoRA adapters. 0: the engine process accepts no messages about adapters."""
    weights: int = -1
    """Version of the weights in use. -1: the engine process accepts no messages about weights."""
    weights_name: str | None = None
    """As ``WeightsChanged.name``."""
    ranks: int = 1
    """Number of ranks of the group. Groups of one server may differ."""
    pause: str = ""
    """The latest ``Hello.pause`` of all API servers, for an API server that shares the pause."""
    behind: tuple[str, ...] = ()
    """Names of the other API servers that share the pause and have not sent the latest state."""


class Submit(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """API server to engine: start or continue one sequence.

    Sequences of one prompt share ``request`` and are numbered by ``choice``. The first sequence to arrive is
    prefilled. The other sequences wait for the prompt and share the prompt's blocks.
    """

    sequence: int
    request: int
    choice: int = 0
    seed: int
    prompt_ids: bytes
    """int32 [prompt], little-endian."""
    emitted_ids: bytes = b""
    """int32 output tokens already sent to the client. Counted as output by penalties, limits and stops."""
    params: TokenParams
    priority: int = 0
    salt: str = ""
    """Prefixes are shared only between sequences with equal salts."""
    owner: int = 0
    """Id of the client request, for the fair share of slots. Equal for all sequences of a request; 0 means
    ``request``."""
    client: int = 0
    """Number of the request's API key; 0 without keys. Keys share the grammar compile threads fairly."""
    attempt: int = 0
    """Number of the attempt at the sequence, from 0. A later attempt ends an earlier attempt."""
    transfer: TransferParameters | None = None
    """Transfer parameters, for prefill and decode on different engine processes. The Submits to both engine
    processes are otherwise equal."""
    trace: str = ""
    """W3C traceparent of the API server's span; "" without tracing."""
    grammar: Grammar | None = None
    """Constraint on the whole output, ``emitted_ids`` included. The engine process alone uses the grammar;
    ranks receive masks."""
    pooling: Pooling = ""
    """Return an embedding instead of tokens: the final hidden state of the last prompt token (last), the mean
    over all tokens (mean), or the state of the first token (cls). "classify": the outputs of
    ``ModelSpec.classify``.
    """
    explain: bool = False
    """Report why the prefix cache did not match more of the prompt (``TokenEvent.cache_miss``)."""
    media: tuple[MediaItem, ...] = ()
    """Images of the prompt, ordered by position, without overlap."""
    session: str = ""
    """Hash of the session; "" if unknown. Later requests of the session go to the same engine, and cached
    blocks are retained for a while."""
    adapter: str = ""
    """Digest of the LoRA adapter; "" for the model alone. An unknown digest fails the request."""
    payer: str = ""
    """Hash of the API key; "" without keys. The owner of blocks on disk. Since version 3."""
    routes: int = -1
    """First position whose experts are reported (``TokenEvent.routes``); -1 for none. Since version 4."""
    forced: Routes | None = None
    """Experts that replace the choice of the router, from position 0 on. ``salt`` must depend on the experts,
    because the caches do. Since version 4."""


class Finish(_Message, frozen=True, kw_only=True):
    """API server to engine: end a sequence, after a stop string or a cancelled request. Idempotent."""

    sequence: int


class Drain(_Message, frozen=True, kw_only=True):
    """API server to engine: no new sequences will come. The engine process ends after the last sequence."""


class Goodbye(_Message, frozen=True, kw_only=True):
    """API server to engine: the API server leaves, and all its sequences end. The engine process keeps
    serving other API servers."""


class WatchPrefixes(_Message, frozen=True, kw_only=True):
    """API server to engine: subscribe to the contents of the prefix cache and all changes. Sent again after a
    gap."""


class Profile(_Message, frozen=True, kw_only=True):
    """API server to engine: profile the steps of the next ``seconds``; 0 ends a profile. No answer."""

    seconds: float


class Shutdown(_Message, frozen=True, kw_only=True):
    """Owner to engine: stop now."""


class LogprobColumns(_Message, frozen=True, kw_only=True):
    """Logprobs of consecutive positions of one sequence; arrays as little-endian bytes."""

    width: int
    """1 + number of top alternatives; 1 + vocabulary for the whole vocabulary."""
    ids: bytes
    """int32 [positions, width], padded with -1. For the whole vocabulary [positions, 1]: column 0 of
    ``values`` is this token, column 1 + i is token i."""
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

    @property
    def every(self) -> bool:
        """True for the whole vocabulary."""
        return self.width > 1 and len(self.ids) == len(self.rank)

    def without(self, count: int) -> LogprobColumns:
        """Return the logprobs without the first ``count`` positions."""
        return LogprobColumns(
            width=self.width,
            ids=self.ids[4 * count * (1 if self.every else self.width) :],
            values=self.values[4 * count * self.width :],
            rank=self.rank[4 * count :],
        )

    def first(self, count: int) -> LogprobColumns:
        """Return the first ``count`` positions, or all positions if there are fewer."""
        if count >= self.positions:
            return self
        size = 4 * count
        return LogprobColumns(
            width=self.width,
            ids=self.ids[: size * (1 if self.every else self.width)],
            values=self.values[: size * self.width],
            rank=self.rank[:size],
        )

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (ids int32 [n, width], values float32 [n, width], rank int32 [n]); for the whole vocabulary
        ids [n, 1]."""
        return (
            np.frombuffer(self.ids, "<i4").reshape(self.positions, -1),
            np.frombuffer(self.values, "<f4").reshape(self.positions, -1),
            np.frombuffer(self.rank, "<i4"),
        )


class CacheMiss(_Message, frozen=True, kw_only=True):
    """The reason why the cached prefix of a prompt ends at ``position``.

    ``reason`` is one of:

    - "none": nothing more can be cached, because the last token is always computed;
    - "differs": a remembered sequence continues with other tokens;
    - "evicted": the block was cached, and was then given to another sequence;
    - "state": the block is cached, but there is no snapshot of the recurrent state;
    - "salt": the client sent the same prefix under another salt;
    - "computing": another sequence is computing the block now;
    - "new": no similar prompt is remembered;
    - with a KV tier, for a stored block that was not loaded: "slower" (computing was predicted to be faster),
      "loading" (the load took too long), "corrupt", "gone", "off", "lost";
    - with a KV tier, for a block that is not stored: see ``TierBook.why``, or "not_chosen" (the mode
      ``sessions`` stores only blocks of sessions);
    - "disabled": nothing is remembered, or the request needs every position computed.
    """

    reason: str
    position: int
    """Number of prompt tokens found in the cache. For "differs": number of equal tokens, which can be larger,
    because the cache finds only full blocks."""
    theirs: bytes = b""
    """For "differs": int32 remembered ids from ``position`` on, at most 32."""


class TokenEvent(_Message, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Engine to API server: new tokens of one sequence, the end, or both. The last event has ``finish``."""

    sequence: int
    token_ids: tuple[int, ...] = ()
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    """The next piece of the logprobs of prompt tokens 1, 2, ... All pieces come before the first token."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache at the first admission of the sequence."""
    accepted: int = 0
    """Number of drafts among ``token_ids``."""
    rejected: int = 0
    """Number of drafts verified in the same step and rejected."""
    finish: str | None = None
    """"stop", "length", "abort" or "error". Two more values end the sequence on the engine process but not
    the client's stream: "moved" (another engine has received the sequence and continues) and "evicted"
    (returned to the router; any engine process may continue).
    """
    stop_id: int | None = None
    error: ErrorInfo | None = None
    attempt: int = 0
    """Attempt number of the Submit."""
    position: int = -1
    """For a sequence with a transfer: number of output tokens before ``token_ids``, including the Submit's
    ``emitted_ids``. Both engine processes report the first token. -1 if not reported."""
    embedding: bytes = b""
    """For a Submit with ``pooling``: float32 [hidden size], little-endian, not normalized; for "classify"
    float32 [labels]. Sent with the end "stop"."""
    cache_miss: CacheMiss | None = None
    """For a Submit with ``explain``: sent once, with ``num_cached``."""
    weights: int = 0
    """Version of the weights of ``token_ids``. Set by the API server, never sent."""
    routes: Routes | None = None
    """For a Submit with ``routes``: the experts of the positions that the step computed. The event of a part
    of a prompt may have routes and no tokens. Parallel samples report no position before the last prompt
    token."""


class Tokens(_Message, frozen=True, kw_only=True):
    """Engine to API server: the new tokens of one step."""

    step: int
    events: tuple[TokenEvent, ...]


class TransferStats(_Message, frozen=True, kw_only=True):
    """Transfers of an engine process with a role. Counters since the start, except where marked as gauges."""

    blocked: int = 0
    """Gauge: sequences blocked on a transfer."""
    fetching: int = 0
    """Gauge: sequences receiving KV."""
    open: int = 0
    """Gauge: open transfers, on either side."""
    pinned_blocks: int = 0
    """Gauge: blocks pinned by transfers."""
    done: int = 0
    failed: int = 0
    corrupt: int = 0
    """Transfers failed by a wrong digest; also counted in ``failed``."""
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    """Sum over completed transfers of the seconds from the first byte to the last."""
    returns: int = 0
    """Sequences returned to the router."""
    took: Measures = Measures()
    """Histogram of ``seconds`` per transfer (bounds: ``SECONDS``)."""
    exposed: Measures = Measures()
    """Seconds from the first token at the sender until the receiver has all data (bounds: ``SECONDS``)."""
    sizes: Measures = Measures()
    """Bytes per completed transfer (bounds: ``BYTES``)."""
    sent: TransportCounts | UnsetType = UNSET
    """Completed transfers of the sender by transport; unset without transfers. Since version 2."""


class OverlapChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form of the captured decode steps of one bucket, with the median times on the device."""

    rows: int
    each: int
    """Tokens per row."""
    context: int
    """Maximum number of positions of a row."""
    micro_batches: bool
    """True if the steps are computed in micro-batches."""
    whole_seconds: float | None = None
    """None if not measured; likewise ``micro_batch_seconds``."""
    micro_batch_seconds: float | None = None


class EngineStats(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Counters since the start, except where marked as gauges."""

    steps: int = 0
    mixed_steps: int = 0
    idle_steps: int = 0
    """Steps without rows, run because other replicas of the expert-parallel group had rows. Included in
    ``steps``."""
    running: int = 0
    """Gauge."""
    waiting: int = 0
    """Gauge."""
    kv_usage: float = 0.0
    """Gauge: used share of the fullest pool, 0 .. 1."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Tokens found in the prefix cache."""
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: tuple[int, ...] = ()
    """Drafts verified, by position in the draft. The length is the maximum number of drafts of a row."""
    drafts_accepted: tuple[int, ...] = ()
    """Drafts accepted, by position in the draft."""
    prefill_rows: int = 0
    """Rows of prompts in all steps. A prompt has a row in each step with a chunk of the prompt."""
    prefill_tokens: int = 0
    """Tokens of prefill rows in all steps."""
    decode_rows: int = 0
    """Decode rows in all steps."""
    constrained_steps: int = 0
    """Steps in which a grammar constrained a row."""
    mask_seconds: float = 0.0
    """Seconds spent on masks, while steps computed."""
    grammars_compiled: int = 0
    """Grammars compiled or found compiled, counted per sequence."""
    grammar_errors: int = 0
    """Sequences ended by a grammar error."""
    row_errors: int = 0
    recoveries: int = 0
    """Number of times that the group was formed again after a loss of ranks."""
    requeued: int = 0
    """Sequences that were running at a loss of ranks and are computed again."""
    free_blocks: tuple[int, ...] = ()
    """Gauge: free blocks of each KV cache group."""
    free_slots: int = 0
    """Gauge."""
    bad_frames: int = 0
    overlapped_steps: int = 0
    """Steps computed in two micro-batches."""
    communication_seconds: float = 0.0
    """Seconds in which a collective of the engine's rank was running."""
    communication_hidden_seconds: float = 0.0
    """Part of ``communication_seconds`` during which the rank also computed."""
    transfers: TransferStats | None = None
    embedding_transfers: TransferStats | None = None
    """Transfers of image embeddings; None for an engine process without embedding transfers."""
    images_encoded: int = 0
    image_hits: int = 0
    """Images of prompts with an embedding found in the embedding cache."""
    embedding_bytes: int = 0
    embedding_host_bytes: int = 0
    """Gauges: bytes of image embeddings of a rank on the device (``embedding_bytes``) and in host memory."""
    encode_seconds: float = 0.0
    """Seconds in which the engine's rank encoded images; on a GPU only the launch time."""
    queue_times: Measures = Measures()
    """Seconds from the arrival of a sequence until a step gave the sequence a slot (bounds: ``SECONDS``)."""
    prefill_times: Measures = Measures()
    """Seconds from the slot until the first token (bounds: ``SECONDS``)."""
    step_tokens: Measures = Measures()
    """Tokens of each planned step with rows (bounds: ``STEP_TOKENS``)."""
    spans_dropped: int = 0
    """Spans of traced requests that were not written or not pushed."""
    tier: TierStats | None = None
    """None for an engine process without a KV tier. Since version 3."""
    prefix_resets: int = 0
    """Times that ``FlushTier`` emptied the prefix cache. Since version 3."""
    forgotten_blocks: int = 0
    """Blocks removed from the prefix cache by ``FlushTier``. Since version 3."""
    routed_tokens: int = 0
    """Computed tokens whose experts were recorded for a request. Since version 4."""
    overlap_choices: tuple[OverlapChoice, ...] = ()
    """Ended trials of ``--overlap auto`` on GPUs. Since version 8."""


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Engine to API server, sent by the step loop. A heartbeat proves progress of steps, not only a running
    process."""

    idle: bool
    """True if the engine process has no work. If False, ``stats.steps`` must have grown within
    ``--engine-timeout``."""
    stats: EngineStats


PREFIX_KEY = 16
"""Bytes of a key of ``PrefixIndex``."""


class PrefixIndex(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Engine to subscribed API servers: the cached prefixes. The first message has all prefixes, each later
    message the changes since the previous message. A gap in ``number`` means a lost change.

    A key is the hash of the last block of a prefix (``weft.kv.hashing``). There is a key at each multiple of
    ``positions``, which is a multiple of ``Welcome.block_size``.
    """

    number: int
    whole: bool = False
    """True if ``added`` is complete and replaces everything known before."""
    positions: int
    added: bytes = b""
    removed: bytes = b""


class EngineFailed(_Message, frozen=True, kw_only=True):
    """Engine to API server: the engine process failed with ``error`` and ends. The last message; all
    sequences have ended."""

    error: ErrorInfo


ToAdapters: TypeAlias = LoadAdapter | DropAdapter
ToWeights: TypeAlias = StageWeights | UseWeights | DropWeights | FreeMemory | JoinTrainer | ReceiveWeights
ToEngine = (
    Hello | Submit | Finish | WatchPrefixes | Drain | Goodbye | Profile | Shutdown | ToAdapters | FlushTier
) | ToWeights
ToFront = Welcome | Tokens | Heartbeat | PrefixIndex | EngineFailed | AdapterChanged | WeightsChanged


def stats_in(version: int, stats: EngineStats) -> EngineStats:
    """Return ``stats`` with only the fields of ``version``."""
    if version < TIER_SINCE:
        stats = msgspec.structs.replace(stats, tier=None, prefix_resets=0, forgotten_blocks=0)
    if version < OVERLAP_SINCE:
        stats = msgspec.structs.replace(stats, overlap_choices=())
    if version < ROUTES_SINCE:
        stats = msgspec.structs.replace(stats, routed_tokens=0)
        if stats.tier is not None:
            stats = msgspec.structs.replace(stats, tier=msgspec.structs.replace(stats.tier, levels={}))
    if version >= SENT_SINCE:
        return stats
    moves = {
        name: msgspec.structs.replace(one, sent=UNSET)
        for name in ("transfers", "embedding_transfers")
        if (one := getattr(stats, name)) is not None
    }
    return msgspec.structs.replace(stats, **moves) if moves else stats


def common_version(versions: tuple[int, int]) -> int | None:
    """Return the newest common version, or None. ``versions``: the peer's [oldest, newest]."""
    low, high = versions
    newest = min(VERSION, high)
    return newest if newest >= max(OLDEST, low) else None


_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToEngine | ToFront) -> bytes:
    """Return the message as one frame. Raises InvalidRequest over ``MAX_FRAME``."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME:
        raise InvalidRequest("the request is too large for one message")
    return frame


def decode_to_engine(frame: bytes) -> ToEngine:
    """Parse a frame from an API server. Raises msgspec.DecodeError (or the subclass ValidationError) or
    ValueError."""
    if len(frame) > MAX_FRAME:
        raise ValueError("frame over the size limit")
    return _to_engine.decode(frame)


def decode_to_front(frame: bytes) -> ToFront:
    """Parse a frame from an engine process. Raises msgspec.DecodeError (or the subclass ValidationError) or
    ValueError."""
    if len(frame) > MAX_FRAME:
        raise ValueError("frame over the size limit")
    return _to_front.decode(frame)


def ids_to_bytes(ids: list[int] | np.ndarray) -> bytes:
    """Return token ids as int32 little-endian bytes, the form of a Submit."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(data: bytes) -> np.ndarray:
    """Return int32 [n] from a Submit's bytes. Raises ValueError when the length is not a multiple of 4."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


MAX_ATTACHED = 1 << 30
"""Maximum bytes of all attachments of a message. A single attachment is limited to ``MAX_FRAME``."""


def encode_parts(message: ToEngine, by_name: bool = False) -> tuple[bytes, ...]:
    """Return the frames of the message; attached frames are not copied. ``by_name``: True if the engine
    process can open shared memory of the local process. Raises InvalidRequest over a size limit."""
    if not isinstance(message, Submit) or not any(len(item.pixels) for item in message.media):
        return (encode(message),)
    bare = []
    attached: list[bytes] = []
    for item in message.media:
        shared = item.shared if by_name else None
        bare.append(msgspec.structs.replace(item, pixels=b"", shared=shared))
        attached.append(item.pixels if shared is None else b"")
    if max(map(len, attached)) > MAX_FRAME or sum(map(len, attached)) > MAX_ATTACHED:
        raise InvalidRequest("the request's images are too large for one message")
    frame = encode(msgspec.structs.replace(message, media=tuple(bare)))
    # An empty frame marks a named image; no frames at all if every image is named.
    return (frame, *attached) if any(map(len, attached)) else (frame,)


def decode_parts(frame: bytes, attached: Sequence[bytes] = ()) -> ToEngine:
    """Return the message of an API server. ``attached``: the frames after the first frame, possibly views.

    Items with ``shared`` have no pixels yet. Raises msgspec.DecodeError (or the subclass ValidationError) or
    ValueError.
    """
    message = decode_to_engine(frame)
    if not attached:
        return message
    if not isinstance(message, Submit) or len(attached) != len(message.media):
        raise ValueError("the frames do not match the images")
    pairs = list(zip(message.media, attached, strict=True))
    # The pixels of an image are in one place: inline, in a frame, or in shared memory (with an empty frame).
    twice = any(item.pixels or (item.shared is not None and len(pixels)) for item, pixels in pairs)
    if twice or sum(map(len, attached)) > MAX_ATTACHED:
        raise ValueError("an image has pixels twice, or the pixels exceed the size limit")
    media = tuple(msgspec.structs.replace(item, pixels=pixels) for item, pixels in pairs)
    return msgspec.structs.replace(message, media=media)
