"""A step as data: what the scheduler asks of the runner, and what the runner answers.

One plan describes one forward pass of one group. Its rows are laid out ``[prefill | decode]``; either part
may be empty, and no code asks which. A plan or a result never changes after it is made: the
columns are read-only numpy arrays.

Lengths are named by where the tokens are. With ``c = num_computed`` of a slot before the step, a row of
``count`` tokens computes positions ``c .. c + count - 1``, reading their ids from ``history[slot]``:

    history   | prompt + emitted ids known to the plan's maker | ids that exist on the device only |
    prefill     [start ........ start + count)
    decode                                                      [start, start + 1 + drafts)
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from weft.common.errors import EngineDead, ErrorInfo
from weft.common.shared_bytes import SharedName
from weft.types.rooms import Blocks, RoomKey
from weft.types.sampling import TokenParams

MAX_PROMPT_LOGITS = 1024
"""Prompt positions of one step whose logits are computed: a row of logits is as wide as the vocabulary."""


def column(values: list[int] | list[tuple[int, ...]] | np.ndarray) -> np.ndarray:
    """A read-only int32 column of ``values``; of tuples, a table whose rows are columns."""
    array = np.asarray(values, dtype=np.int32)
    array.setflags(write=False)
    return array


EMPTY = column([])


class _Op(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class AllocSlot(_Op, frozen=True, kw_only=True):
    """Gives ``slot`` to a sequence, its ``gen``-th: writes all known ids to the history and sets the lengths.

    The slot must be free, or freed earlier in the same plan's ops.
    """

    slot: int
    gen: int
    choice: int
    seed: int
    """Philox key, 0 .. 2^64 - 1."""
    params: TokenParams
    num_prompt: int
    """How many of ``token_ids`` are prompt; the rest are output emitted before (preemption, failover)."""
    num_cached: int
    """Leading positions whose cache is already there: the slot's first ``num_computed``."""
    token_ids: np.ndarray
    """int32 [prompt + emitted]."""
    pooling: str = ""
    """Of a sequence that ends with an embedding and no token: "last" or "mean"."""
    spans: np.ndarray = EMPTY
    """int32 [items * 6], of models whose rope has sections: where the images of the prompt are, cached ones
    too, row by row as ``weft.types.media.spans_of`` makes them."""


class FreeSlot(_Op, frozen=True, kw_only=True):
    """Takes ``slot`` from its sequence number ``gen``. Its block tables are emptied."""

    slot: int
    gen: int


class AppendBlocks(_Op, frozen=True, kw_only=True):
    """Appends ``blocks`` to the slot's block table of cache kind number ``kind``.

    Block 0 is the null block of every pool: a hole that no row of the slot will ever read (positions that a
    window has passed). The table's entry ``i`` holds positions ``i * block .. (i + 1) * block - 1``.
    """

    slot: int
    kind: int
    blocks: np.ndarray


class AppendEach(_Op, frozen=True, kw_only=True):
    """AppendBlocks of one block for many slots at once: ``blocks[i]`` goes to the table of ``slots[i]``.

    Columns of one length, at least 1; no slot is named twice, no block is the null block.
    """

    kind: int
    slots: np.ndarray
    blocks: np.ndarray

    def without(self, slot: int) -> AppendEach | None:
        """The op without its entry for ``slot``; None when that leaves nothing."""
        keep = self.slots != slot
        if keep.all():
            return self
        if not keep.any():
            return None
        return AppendEach(kind=self.kind, slots=column(self.slots[keep]), blocks=column(self.blocks[keep]))


class SaveState(_Op, frozen=True, kw_only=True):
    """Copies the slot's recurrent state of cache kind ``kind`` into ``block``: a snapshot.

    The state is the one ``back`` positions before the slot's last: 0 for the live one; more only after a
    decode row, which left the state after each of its tokens. The plan's maker knows the length exactly.
    """

    slot: int
    kind: int
    block: int
    back: int = 0


class LoadState(_Op, frozen=True, kw_only=True):
    """Copies the snapshot in ``block`` to copy 0 of the slot's state of kind ``kind``; it is live then."""

    slot: int
    kind: int
    block: int


class Export(_Op, frozen=True, kw_only=True):
    """Positions ``start`` .. end - 1 of the slot, which this plan computes, may leave for the room ``key``.

    With ``states``: so may the state after ``end`` positions, which a ``SaveState`` before it in the same
    plan has put where ``blocks`` says; the plan has no row of the slot then.
    """

    slot: int
    key: RoomKey
    start: int
    end: int
    blocks: tuple[Blocks, ...]
    """For each kind the block table of the slot, from entry ``first`` on as far as it reaches once the plan's
    other ops are applied; of a state its snapshot, with ``states``, else no ids. Repeats what earlier ones of
    the room had, or goes on where those ended."""
    states: bool = False


class Encode(_Op, frozen=True, kw_only=True):
    """Every rank makes the embedding of an image, in ``blocks`` of its pool of embeddings.

    Of no slot; before any other op that reads them. What was in them is gone.
    """

    blocks: bytes
    """int32: blocks of ``MediaLimits.block_rows`` rows each, in order; the last may be used in part."""
    count: int
    """Rows."""
    grid: tuple[int, int, int]
    """Frame groups, rows and columns of patches."""
    pixels: bytes
    """uint8 [frames, height, width, 3]; in no digest."""
    shared: SharedName | None = None
    """As of ``MediaItem``: in frames of steps in the place of the pixels."""


class BindMedia(_Op, frozen=True, kw_only=True):
    """Positions ``start`` .. ``start + count - 1`` of the slot are the rows of ``blocks``, in this plan.

    A prefill row of the plan computes some of them. Every plan says anew what its rows read.
    """

    slot: int
    start: int
    count: int
    blocks: bytes


class SendMedia(_Op, frozen=True, kw_only=True):
    """The embedding of ``count`` rows in ``blocks`` may leave for the room ``key``: it is there once the
    plan's other ops are carried out."""

    key: RoomKey
    blocks: bytes
    """int32: blocks of the pool of embeddings, in order."""
    count: int


class GatherMedia(_Op, frozen=True, kw_only=True):
    """Each rank has received its share of an embedding's ``count`` rows, in ``blocks``: all ranks exchange
    theirs, so that each has all. Before the plan's rows, at the same point of the collectives on every
    rank."""

    blocks: bytes
    count: int


class MoveMedia(_Op, frozen=True, kw_only=True):
    """Copies an embedding between the blocks of the device's pool and those of the host's, over all levels.

    ``up``: from host to device. What it is copied from may be overwritten by later ops.
    """

    blocks: bytes
    host: bytes
    up: bool


class Rebalance(_Op, frozen=True, kw_only=True):
    """Every rank of the domain counts what its experts had to do, and all move experts by the sums alike.

    In the plans of all replicas for the same step. No token depends on it.
    """


Op: TypeAlias = (
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
)


OfNoSlot: TypeAlias = Encode | SendMedia | GatherMedia | MoveMedia | Rebalance


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prefill or the decode part of a plan: int32 columns, one entry a row."""

    slot: np.ndarray = EMPTY
    gen: np.ndarray = EMPTY
    start: np.ndarray = EMPTY
    """Upper bound of ``num_computed``; equal to the device's unless a verify row is in flight."""
    count: np.ndarray = EMPTY
    """Chunk length, or 1 + drafts."""
    logits: np.ndarray = EMPTY
    """Trailing positions whose logits are computed."""
    sample: np.ndarray = EMPTY
    """Trailing positions sampled: 0 (unfinished chunk), 1, or 1 + drafts. sample <= logits; the rest of
    ``logits`` gives prompt logprobs."""
    next_k: np.ndarray = EMPTY
    """Drafts to propose after this step."""

    @property
    def rows(self) -> int:
        return len(self.slot)

    @property
    def tokens(self) -> int:
        return int(self.count.sum())


EMPTY_SEGMENT = Segment()


class PlannedRows(Protocol):
    """The rows of a step: of a plan, or of one in the making."""

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


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the replicas of a domain agreed on for one step. A group alone has none."""

    wave: int
    """Number of the domain's present time awake."""
    padded_tokens: int
    """No replica has more tokens at once: in the step or, with ``overlap``, in a micro-batch of it."""
    tokens: tuple[int, ...] = ()
    """Of each replica. After the last attention fewer may be left: these are upper bounds."""
    overlap: bool = False
    """Whether every replica computes the step as two micro-batches; an idle one's are empty."""
    drafts: int = 0
    """Most drafts that a row of any replica proposes: passes of a drafter whose layers communicate."""
    rebalance: bool = False
    """Whether every replica's plan has the op ``Rebalance``."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of one group. ``ops`` apply in order before any compute.

    A plan without rows is one like any other, with or without ops: it is sent, carried out and committed.
    """

    step: int
    epoch: int = 0
    ops: tuple[Op, ...] = ()
    prefill: Segment = EMPTY_SEGMENT
    decode: Segment = EMPTY_SEGMENT
    constrained: bool = False
    """Whether ``TokenMasks`` follow for this step, before it samples."""
    agreed: Agreement | None = None
    micro_batches: int = 1
    """2: computed as two micro-batches, the communication of one under the compute of the other. The head
    decides, and with it its domain; every rank obeys. No result depends on it."""

    @property
    def rows(self) -> int:
        return self.prefill.rows + self.decode.rows

    @property
    def tokens(self) -> int:
        return self.prefill.tokens + self.decode.tokens

    @property
    def entries(self) -> int:
        """Positions that are sampled: tokens of the step's result."""
        return int(self.prefill.sample.sum() + self.decode.sample.sum())


class TokenMasks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What constrained entries of a step may sample; follows a plan with ``constrained``, before ``sample``.

    An entry is one sampled position, numbered as the tokens of ``StepResult``: a row has as many as its
    ``sample``. So a row that verifies k drafts needs 1 + k masks, each as if all drafts before it were right;
    the maker of masks knows the drafts from the result of the step that proposed them. Entries without a mask
    may sample any token.

    Masks of a step depend on all tokens before it, so they are made while it computes, in this order:

        forward(N), read and commit(N - 1), masks(N), sample(N), then forward(N + 1)

    forward(N + 1) may come before masks(N) only where the two steps share no buffers; forward(N + 2) never.
    """

    entries: np.ndarray = EMPTY
    """int32, increasing."""
    words: np.ndarray = EMPTY
    """int32 [entries, ceil(vocabulary / 32)], row by row; bit i of word w allows token 32 w + i."""

    def check(self, plan: StepPlan, vocab_size: int) -> None:
        """Raises EngineDead unless these can be the masks of ``plan``."""
        if not plan.constrained:
            raise EngineDead(f"token masks came for step {plan.step}, which is not constrained")
        entries = self.entries
        if len(entries) and not 0 <= entries[0] <= entries[-1] < plan.entries:
            raise EngineDead(f"a token mask of step {plan.step} is of an entry that it does not sample")
        if (entries[1:] <= entries[:-1]).any():
            raise EngineDead(f"the token masks of step {plan.step} are not in order")
        if len(self.words) != len(entries) * -(-vocab_size // 32):
            raise EngineDead(f"the token masks of step {plan.step} are not as wide as the vocabulary")


class LogprobRows(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of many positions, of log_softmax of the untouched logits, or of those that a token was drawn
    from (``--logprobs-mode``).

    ``ids[i, 0]`` is the position's own token (sampled, or the prompt's); the rest are the ``top`` likeliest
    in order (logit descending, id ascending), padded with -1 where a row asked for fewer.
    """

    offsets: np.ndarray
    """int32 [rows + 1]: entries of result row r are ``offsets[r] .. offsets[r + 1]``."""
    ids: np.ndarray
    """int32 [entries, 1 + top]."""
    values: np.ndarray
    """float32 [entries, 1 + top] (float64 in E0)."""
    rank: np.ndarray
    """int32 [entries]: 1 + how many tokens are ahead of the position's own token."""


class EmbeddingRows(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings of the prompts that a step has completed."""

    rows: np.ndarray
    """int32 [n], ascending: rows of the plan. They have no logits, and are no rows of the result."""
    values: np.ndarray
    """float32 [n, hidden], not normalized."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step. Row r of the result is row ``rows[r]`` of the plan (prefill rows first)."""

    step: int
    rows: np.ndarray
    """int32: plan rows with logits > 0, in plan order."""
    offsets: np.ndarray
    """int32 [rows + 1] into ``tokens``, by the plan's ``sample``."""
    tokens: np.ndarray
    """int32: sampled ids."""
    accepted: np.ndarray
    """int32 [rows]: drafts accepted; the first ``accepted + 1`` tokens of a sampling row are valid."""
    drafts: np.ndarray = EMPTY
    """int32: the drafts proposed after the step, ``next_k`` ids of each row of the plan. Those of a
    constrained sequence stay at the head until the step that verifies them commits: its masks depend on
    them."""
    row_error: tuple[tuple[int, ErrorInfo], ...] = ()
    """(result row, what went wrong); of such a row the last token is not valid, only accepted drafts are."""
    logprobs: LogprobRows | None = None
    """Entries by ``sample``, for the sampled tokens."""
    prompt_logprobs: LogprobRows | None = None
    """Entries by ``logits - sample``: for token ``position + 1`` of each leading logits position."""
    embeddings: EmbeddingRows | None = None
