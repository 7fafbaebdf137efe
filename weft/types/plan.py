"""A step as data: the scheduler's plan for the runner, and the runner's result.

One plan describes one forward pass of one group. The rows of a plan are ``[prefill | decode]``. Either part
may be empty, without special cases in the code. Plans and results are immutable: columns are read-only numpy
arrays.

Lengths are named by where the tokens are. With ``c = num_computed`` of a slot before the step, a row of
``count`` tokens computes positions ``c .. c + count - 1``, and reads the ids from ``history[slot]``:

    history   | prompt + emitted ids known to the scheduler    | ids that exist on the device only |
    prefill     [start ........ start + count)
    decode                                                      [start, start + 1 + drafts)
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from weft.common.errors import EngineDead, ErrorInfo
from weft.common.shared_bytes import SharedName
from weft.types.routes import Routes
from weft.types.sampling import TokenParams
from weft.types.transfer import Blocks, TransferKey

MAX_PROMPT_LOGITS = 1024
"""Maximum prompt positions with logits in one step. A row of logits is as wide as the vocabulary."""


def column(values: list[int] | list[tuple[int, ...]] | np.ndarray) -> np.ndarray:
    """Return a read-only int32 array of ``values``. Tuples give a table [len(values), len(tuple)]."""
    array = np.asarray(values, dtype=np.int32)
    array.setflags(write=False)
    return array


EMPTY = column([])


class _SlotUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class AllocSlot(_SlotUpdate, frozen=True, kw_only=True):
    """Give ``slot`` to a sequence, as the ``gen``-th sequence of the slot. Writes all known ids to the
    history and sets the lengths. The slot must be free, or freed by an earlier update of the same plan."""

    slot: int
    gen: int
    choice: int
    seed: int
    """Philox key, 0 .. 2^64 - 1."""
    params: TokenParams
    num_prompt: int
    """Number of prompt ids in ``token_ids``. Further ids are output from before (preemption, failover)."""
    num_cached: int
    """Leading positions found in the cache: the initial ``num_computed`` of the slot."""
    token_ids: np.ndarray
    """int32 [prompt + emitted]."""
    adapter: int = -1
    """Place of the LoRA adapter, filled by an earlier ``PlaceAdapter``; -1 for the model alone."""
    pooling: str = ""
    """Pooling of a sequence that ends with an embedding and no token (``messages.Pooling``); else ""."""
    routes: bool = False
    """True to report the experts of each computed position."""
    forced: Routes | None = None
    """Experts that replace the choice of the router at the positions of ``forced``."""
    spans: np.ndarray = EMPTY
    """int32 [items * 6], for models with rope sections: the image spans of the prompt, cached images
    included, row by row as ``weft.types.media_item.spans_of`` returns the spans."""


class FreeSlot(_SlotUpdate, frozen=True, kw_only=True):
    """Take ``slot`` from the ``gen``-th sequence and empty the block tables."""

    slot: int
    gen: int


class AppendBlocks(_SlotUpdate, frozen=True, kw_only=True):
    """Append ``blocks`` to the slot's block table of KV cache group number ``kind``.

    Block 0 is the null block of every pool: a hole that no later row of the slot reads (positions behind a
    window). Entry ``i`` of a table holds positions ``i * block .. (i + 1) * block - 1``.
    """

    slot: int
    kind: int
    blocks: np.ndarray


class AppendEach(_SlotUpdate, frozen=True, kw_only=True):
    """Append one block for each of many slots: ``blocks[i]`` goes to the table of ``slots[i]``.

    Both columns have the same length, at least 1. Slots are distinct. No block is the null block.
    """

    kind: int
    slots: np.ndarray
    blocks: np.ndarray

    def without(self, slot: int) -> AppendEach | None:
        """Return the slot update without the entry for ``slot``, if any; None if no entry is left."""
        keep = self.slots != slot
        if keep.all():
            return self
        if not keep.any():
            return None
        return AppendEach(kind=self.kind, slots=column(self.slots[keep]), blocks=column(self.blocks[keep]))


class SaveState(_SlotUpdate, frozen=True, kw_only=True):
    """Copy the slot's recurrent state of KV cache group ``kind`` into ``block``, as a snapshot.

    The snapshot is the state ``back`` positions before the slot's last position. 0 is the live state. Larger
    values are valid only after a decode row, which leaves the state after each token. The scheduler knows the
    exact length.
    """

    slot: int
    kind: int
    block: int
    back: int = 0


class LoadState(_SlotUpdate, frozen=True, kw_only=True):
    """Copy the snapshot in ``block`` to copy 0 of the slot's state of KV cache group ``kind``, the live
    state."""

    slot: int
    kind: int
    block: int


class Export(_SlotUpdate, frozen=True, kw_only=True):
    """Release positions ``start`` .. end - 1 of the slot, computed by the plan, to the transfer ``key``.

    With ``states``, also release the state after ``end`` positions. An earlier ``SaveState`` of the same plan
    has copied the state to ``blocks``, and the plan has no row of the slot.
    """

    slot: int
    key: TransferKey
    start: int
    end: int
    blocks: tuple[Blocks, ...]
    """For each KV cache group the slot's block table from entry ``first`` on, after the plan's other slot
    updates. For a state: the snapshot's block with ``states``, else no ids. May repeat or extend the blocks
    of earlier exports.
    """
    states: bool = False


class Encode(_SlotUpdate, frozen=True, kw_only=True):
    """Encode an image on every rank, into ``blocks`` of the embedding pool.

    Belongs to no slot. Comes before all ops that read the blocks. The former contents are lost.
    """

    blocks: bytes
    """int32: blocks of ``MediaLimits.block_rows`` rows each, in order; the last may be used in part."""
    count: int
    """Number of rows of the embedding."""
    grid: tuple[int, int, int]
    """Frame groups, rows and columns of patches."""
    pixels: bytes
    """uint8 [frames, height, width, 3]. Not part of a digest."""
    shared: SharedName | None = None
    """Name of shared memory with the pixels, as in ``MediaItem``. Replaces the pixels in step frames."""


class BindMedia(_SlotUpdate, frozen=True, kw_only=True):
    """Read positions ``start`` .. ``start + count - 1`` of the slot from the rows of ``blocks``, within the
    plan.

    A prefill row of the plan computes some of the positions. Every plan repeats the bindings of all rows.
    """

    slot: int
    start: int
    count: int
    blocks: bytes
    columns: int = 0
    """If greater than 0, a text token follows every ``columns`` tokens of the image."""
    whole: bool = False
    """True if no row of a step or micro-batch may end within the image."""


class SendMedia(_SlotUpdate, frozen=True, kw_only=True):
    """Release the embedding of ``count`` rows in ``blocks`` to the transfer ``key``, after the plan's other
    ops."""

    key: TransferKey
    blocks: bytes
    """int32: blocks of the embedding pool, in order."""
    count: int


class GatherMedia(_SlotUpdate, frozen=True, kw_only=True):
    """Exchange the rows of a received embedding between ranks: each rank has received a share of ``count``
    rows.

    Runs before the plan's rows, at the same point of the collectives on every rank.
    """

    blocks: bytes
    count: int


class MoveMedia(_SlotUpdate, frozen=True, kw_only=True):
    """Copy an embedding between blocks of the device pool and of the host pool, over all levels.

    ``up``: from host to device. Later ops may overwrite the source.
    """

    blocks: bytes
    host: bytes
    up: bool


class ReadAdapter(_SlotUpdate, frozen=True, kw_only=True):
    """Begin to read the LoRA adapter ``digest`` from ``folder``, beside the steps. ``HoldAdapter`` follows,
    or ``ReleaseAdapter`` if the files are not an adapter of the model."""

    digest: str
    folder: str


class HoldAdapter(_SlotUpdate, frozen=True, kw_only=True):
    """Read the LoRA adapter ``digest`` from ``folder`` into the host memory of every rank."""

    digest: str
    folder: str


class PlaceAdapter(_SlotUpdate, frozen=True, kw_only=True):
    """Copy the adapter ``digest`` from host memory to ``place`` of the pool. No sequence uses the place."""

    digest: str
    place: int


class ReleaseAdapter(_SlotUpdate, frozen=True, kw_only=True):
    """Free the host memory of the adapter ``digest``. No later op names the adapter."""

    digest: str


AdapterUpdate: TypeAlias = ReadAdapter | HoldAdapter | PlaceAdapter | ReleaseAdapter


class ReplicaUpdate(_SlotUpdate, frozen=True, kw_only=True):
    """Apply another replica's update, because this rank has experts for the rows of all replicas.

    In the plans of all other replicas for the step of the update.
    """

    replica: int
    update: AdapterUpdate


class Rebalance(_SlotUpdate, frozen=True, kw_only=True):
    """Sum the load of each expert over all ranks of the expert-parallel group, and move experts accordingly.

    In the plans of all replicas for the same step. No token depends on a rebalance.
    """


SlotUpdate: TypeAlias = (
    AllocSlot
    | FreeSlot
    | AppendBlocks
    | AppendEach
    | SaveState
    | LoadState
    | Export
    | Encode
    | BindMedia
    | SendMedia
    | GatherMedia
    | MoveMedia
    | Rebalance
    | AdapterUpdate
    | ReplicaUpdate
)


SlotlessUpdate: TypeAlias = (
    Encode | SendMedia | GatherMedia | MoveMedia | Rebalance | AdapterUpdate | ReplicaUpdate
)


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prefill or the decode part of a plan: int32 columns with one entry per row."""

    slot: np.ndarray = EMPTY
    gen: np.ndarray = EMPTY
    start: np.ndarray = EMPTY
    """Upper bound of ``num_computed``. Equal to the device's value unless a verify row is in flight."""
    count: np.ndarray = EMPTY
    """Chunk length, or 1 + drafts."""
    logits: np.ndarray = EMPTY
    """Number of trailing positions with logits."""
    sample: np.ndarray = EMPTY
    """Number of trailing positions sampled: 0 (unfinished chunk), 1, or 1 + drafts. sample <= logits; the
    other ``logits`` positions give prompt logprobs."""
    next_k: np.ndarray = EMPTY
    """Number of drafts to propose after the step."""

    @property
    def rows(self) -> int:
        return len(self.slot)

    @property
    def tokens(self) -> int:
        return int(self.count.sum()) if len(self.count) else 0


EMPTY_SEGMENT = Segment()


class PlannedRows(Protocol):
    """The rows of a step, of a frozen plan or of a plan builder."""

    @property
    def step(self) -> int: ...

    @property
    def prefill(self) -> Segment: ...

    @property
    def decode(self) -> Segment: ...

    @property
    def rows(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def whole_images(self) -> list[BindMedia]:
        """Images that no row of a micro-batch may cut."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agreement of an expert-parallel group's replicas on one step. A single group has no agreement."""

    wave: int
    """Number of the current wake period of the expert-parallel group."""
    padded_tokens: int
    """Upper bound of the tokens of any replica: in the step or, with ``overlap``, in a micro-batch."""
    tokens: tuple[int, ...] = ()
    """Upper bound of the tokens of each replica. Fewer may be left after the last attention."""
    overlap: bool = False
    """True if every replica computes the step as two micro-batches. The micro-batches of an idle replica are
    empty."""
    drafts: int = 0
    """Maximum drafts of a row of any replica: the number of passes of a drafter with collectives."""
    rebalance: bool = False
    """True if the plan of every replica has the update ``Rebalance``."""
    adapted: bool = False
    """True if a row of any replica has an adapter that changes experts."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of one group. ``ops`` apply in order before any compute.

    A plan without rows, with or without ops, is sent, executed and committed like any other plan.
    """

    step: int
    epoch: int = 0
    ops: tuple[SlotUpdate, ...] = ()
    prefill: Segment = EMPTY_SEGMENT
    decode: Segment = EMPTY_SEGMENT
    constrained: bool = False
    """True if ``TokenMasks`` follow for the step, before sampling."""
    agreed: Agreement | None = None
    micro_batches: int = 1
    """Number of micro-batches. With 2, the communication of one overlaps the compute of the other. The engine
    process decides, with its expert-parallel group. No result depends on the number."""

    @property
    def rows(self) -> int:
        return self.prefill.rows + self.decode.rows

    @property
    def tokens(self) -> int:
        return self.prefill.tokens + self.decode.tokens

    @property
    def whole_images(self) -> list[BindMedia]:
        """Images that no row of a micro-batch may cut."""
        return [op for op in self.ops if isinstance(op, BindMedia) and op.whole]

    @property
    def entries(self) -> int:
        """Number of sampled positions, which is the number of tokens in the step's result."""
        return int(self.prefill.sample.sum() + self.decode.sample.sum())


class TokenMasks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token masks for constrained entries of a step. Sent after a plan with ``constrained``, before
    ``sample``.

    An entry is one sampled position, numbered as the tokens of ``StepResult``. A row has ``sample`` entries.
    A row that verifies k drafts therefore needs 1 + k masks, each for correct earlier drafts. The result of
    the proposing step has the drafts. Entries without a mask may sample any token.

    Masks depend on all earlier tokens. The engine therefore makes the masks of a step while the step
    computes:

        forward(N), read and commit(N - 1), masks(N), sample(N), then forward(N + 1)

    forward(N + 1) may come before masks(N) only where the two steps share no buffers; forward(N + 2) never.
    """

    entries: np.ndarray = EMPTY
    """int32 [entries], strictly increasing."""
    words: np.ndarray = EMPTY
    """int32 [entries * ceil(vocabulary / 32)], row by row; bit i of word w allows token 32 w + i."""

    def check(self, plan: StepPlan, vocab_size: int) -> None:
        """Raise EngineDead unless the masks are valid for ``plan``: entries in order and in range, words for
        the whole vocabulary."""
        if not plan.constrained:
            raise EngineDead(f"token masks arrived for step {plan.step}, which is not constrained")
        entries = self.entries
        if len(entries) and not 0 <= entries[0] <= entries[-1] < plan.entries:
            raise EngineDead(f"a token mask of step {plan.step} has an entry out of range")
        if (entries[1:] <= entries[:-1]).any():
            raise EngineDead(f"the token masks of step {plan.step} are not in order")
        # Each mask has ceil(vocab_size / 32) words.
        if len(self.words) != len(entries) * -(-vocab_size // 32):
            raise EngineDead(f"the token masks of step {plan.step} do not have the width of the vocabulary")


class LogprobRows(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of many positions: log_softmax of the raw logits, or of the logits used for sampling
    (``--logprobs-mode``).

    ``ids[i, 0]`` is the token of the position (sampled, or of the prompt). The other ids are the ``top``
    likeliest tokens in order (logit descending, id ascending), padded with -1 for rows with fewer. For the
    whole vocabulary: one id, and values for the token of the position and then for each token id.
    """

    offsets: np.ndarray
    """int32 [rows + 1]: entries of result row r are ``offsets[r] .. offsets[r + 1]``."""
    ids: np.ndarray
    """int32 [entries, 1 + top]."""
    values: np.ndarray
    """float32 [entries, 1 + top] (float64 for a float64 model)."""
    rank: np.ndarray
    """int32 [entries]: 1 + number of tokens ordered before the token of the position."""


class EmbeddingRows(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings of the prompts completed by a step."""

    rows: np.ndarray
    """int32 [n], ascending: rows of the plan. Such rows have no logits and no row in the result."""
    values: np.ndarray
    """float32 [n, most lengths], not normalized."""
    lengths: np.ndarray
    """int32 [n]: length of each row of ``values``; the rest is padding."""


class RouteRows(msgspec.Struct, frozen=True, kw_only=True):
    """Routes of the rows whose requests need routes."""

    rows: np.ndarray
    """int32 [n], ascending: rows of the plan."""
    offsets: np.ndarray
    """int32 [n + 1]: tokens of row i are ``offsets[i] .. offsets[i + 1]``."""
    ids: np.ndarray
    """uint16 [tokens, layers, top_k]: experts of each token of a row, rejected drafts included."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step. Row r of the result is row ``rows[r]`` of the plan (prefill rows first)."""

    step: int
    rows: np.ndarray
    """int32 [rows]: plan rows with logits > 0, in plan order."""
    offsets: np.ndarray
    """int32 [rows + 1]: offsets into ``tokens``, by the plan's ``sample``."""
    tokens: np.ndarray
    """int32: sampled ids."""
    accepted: np.ndarray
    """int32 [rows]: drafts accepted. The first ``accepted + 1`` tokens of a sampling row are valid."""
    drafts: np.ndarray = EMPTY
    """int32: the drafts proposed after the step, ``next_k`` ids for each row of the plan. The engine process
    keeps the drafts of a constrained sequence until the verifying step commits, to make the masks."""
    row_error: tuple[tuple[int, ErrorInfo], ...] = ()
    """(result row, error). The last token of such a row is invalid; accepted drafts are valid."""
    logprobs: LogprobRows | None = None
    """Entries by ``sample``, for the sampled tokens."""
    prompt_logprobs: LogprobRows | None = None
    """Entries by ``logits - sample``: for token ``position + 1`` of each leading logits position."""
    all_logprobs: LogprobRows | None = None
    """As ``logprobs``, for rows with the whole vocabulary."""
    all_prompt_logprobs: LogprobRows | None = None
    """As ``prompt_logprobs``, for rows with the whole vocabulary."""
    embeddings: EmbeddingRows | None = None
    routes: RouteRows | None = None
