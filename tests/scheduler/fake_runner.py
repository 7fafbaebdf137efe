"""A runner without a model, and helpers that make configurations and requests for the runner.

The model of the runner is a deterministic function of the whole history, the seed and the choice. The runner
keeps slots, block tables and the content of every cache position. The content of a position is a hash of the
tokens up to the position. All of this state comes from plans and slot updates alone. An assertion fails as
soon as a plan breaks the contract. A recurrent state is the hash of the prefix that the state has read. The
runner proposes the drafts of rows with drafts; some drafts are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np

from weft.common.errors import ErrorInfo
from weft.config.resolved import KVConfig, MediaLimits, PoolSpec
from weft.config.spec import CacheSpec, StatePart
from weft.types.grammar import Grammar
from weft.types.media_item import MediaItem, spans_of
from weft.types.messages import Pooling, Submit, ids_from_bytes, ids_to_bytes
from weft.types.plan import (
    EMPTY,
    AllocSlot,
    AppendBlocks,
    AppendEach,
    BindMedia,
    EmbeddingRows,
    Encode,
    Export,
    FreeSlot,
    GatherMedia,
    LoadState,
    LogprobRows,
    MoveMedia,
    SaveState,
    Segment,
    StepPlan,
    StepResult,
    column,
)
from weft.types.sampling import TokenParams

Row: TypeAlias = tuple[int, int, int, int, int, int, int]
"""(slot, gen, start, count, logits, sample, next_k)."""
Made: TypeAlias = tuple[int, list[int], list[int], bool, int]
"""A row with logits: its number in the plan, followed by the values of ``_run_row``."""

VOCAB = 50
BAD_SEED = 666
"""A sequence with this seed fails with a row error at its third output token."""
ROW_ERROR = ErrorInfo(code="non_finite_logits", message="planted")
TOP = 3


def kv_config(
    *,
    blocks: int = 64,
    window: int | None = None,
    window_blocks: int = 64,
    max_model_len: int = 48,
    slots: int = 12,
    caching: bool = True,
    block: int = 4,
    window_block: int | None = None,
    full: bool = True,
    latent: bool = False,
    sliding: int = 0,
    ratio: int = 0,
    states: int = 0,
    stride: int = 0,
    copies: int = 1,
    media: MediaLimits | None = None,
) -> KVConfig:
    """Return a configuration with a full pool by default and with the requested further KV cache groups.

    ``window`` and ``sliding`` are the windows of the window group and of the sliding latent group. ``ratio``
    is the number of positions in one compressed entry. ``states`` is the number of snapshots in each of two
    recurrent groups.
    """
    pools = []
    if full:
        spec = CacheSpec(kind="full", layers=(0,), kv_heads=1, head_dim=1)
        pools.append(PoolSpec(cache=spec, block_size=block, num_blocks=blocks))
    if window is not None:
        spec = CacheSpec(kind="window", layers=(1,), window=window, kv_heads=1, head_dim=1)
        pools.append(PoolSpec(cache=spec, block_size=window_block or block, num_blocks=window_blocks))
    if latent:
        spec = CacheSpec(kind="latent", layers=(2,), width=1, form="latent")
        pools.append(PoolSpec(cache=spec, block_size=block, num_blocks=blocks))
    if sliding:
        spec = CacheSpec(kind="latent", layers=(3,), width=1, window=sliding, form="sparse")
        pools.append(PoolSpec(cache=spec, block_size=block, num_blocks=window_blocks))
    if ratio:
        spec = CacheSpec(kind="compressed", layers=(3,), width=1, ratio=ratio, form="sparse")
        size = math.lcm(block, ratio)
        least = -(-max_model_len // size)
        pools.append(PoolSpec(cache=spec, block_size=size, num_blocks=max(least, blocks * block // size)))
    unit = math.lcm(block, *(pool.block_size for pool in pools))
    # A state block covers as many positions as the least common multiple of all other block sizes.
    for layer in (4, 5) if states else ():
        parts = (StatePart(name="state", shape=(1,), wide=True),)
        spec = CacheSpec(kind="state", layers=(layer,), parts=parts, form="delta")
        pools.append(PoolSpec(cache=spec, block_size=unit, num_blocks=states, stride=stride))
    return KVConfig(
        pools=tuple(pools),
        block_size=block,
        enable_prefix_caching=caching,
        max_model_len=max_model_len,
        num_slots=slots,
        copies=copies,
        media=media,
    )


def submit(
    sequence: int,
    prompt: list[int],
    *,
    request: int | None = None,
    choice: int = 0,
    seed: int = 1,
    emitted: list[int] | None = None,
    priority: int = 0,
    salt: str = "",
    owner: int = 0,
    client: int = 0,
    pooling: Pooling = "",
    session: str = "",
    grammar: Grammar | None = None,
    media: tuple[MediaItem, ...] = (),
    **params: object,
) -> Submit:
    """Return a Submit. ``params`` are fields of ``TokenParams``; ``max_tokens`` is 6 by default."""
    params.setdefault("max_tokens", 6)
    return Submit(
        sequence=sequence,
        request=sequence if request is None else request,
        choice=choice,
        seed=seed,
        prompt_ids=ids_to_bytes(prompt),
        emitted_ids=ids_to_bytes(emitted or []),
        params=TokenParams(**params),  # type: ignore[arg-type]
        priority=priority,
        salt=salt,
        owner=owner,
        client=client,
        pooling=pooling,
        session=session,
        grammar=grammar,
        media=media,
    )


def prefix_hashes(tokens: list[int], media: tuple[MediaItem, ...] = ()) -> list[int]:
    """Return one hash per position p, over tokens[0 .. p] with the rows of images in place of
    placeholders."""
    hashes, state = [], 7
    rows = {item.start + row: (item.pixels, row) for item in media for row in range(item.count)}
    for position, token in enumerate(tokens):
        state = hash((state, rows.get(position, token)))
        hashes.append(state)
    return hashes


def embedding(tokens: list[int], pooling: str) -> list[float]:
    """Return the embedding of a whole prompt: two floats."""
    states = [state % 1000 for state in prefix_hashes(tokens)]
    return [float(states[-1]), 1.0] if pooling == "last" else [sum(states) / len(states), 2.0]


def next_token(prefix: int, seed: int, choice: int, made: int, params: TokenParams) -> int:
    """Return output token number ``made`` (from 0) of the model after a history with the hash ``prefix``."""
    token = hash((prefix, seed, choice)) % VOCAB
    while made < params.min_tokens and token in params.stop_ids:
        token = (token + 1) % VOCAB
    return token


def alone(request: Submit, max_model_len: int) -> tuple[list[int], str]:
    """Return (tokens after the emitted tokens, finish reason) of a sequence that runs alone."""
    prompt = ids_from_bytes(request.prompt_ids).tolist()
    tokens = prompt + ids_from_bytes(request.emitted_ids).tolist()
    params, first = request.params, len(tokens)
    while True:
        made = len(tokens) - len(prompt)
        if made > params.min_tokens and tokens[-1] in params.stop_ids:
            return tokens[first:], "stop"
        if made >= params.max_tokens or len(tokens) >= max_model_len:
            return tokens[first:], "length"
        if request.seed == BAD_SEED and made == 2:
            return tokens[first:], "error"
        tokens.append(
            next_token(prefix_hashes(tokens, request.media)[-1], request.seed, request.choice, made, params)
        )


@dataclass
class SlotSequence:
    gen: int
    op: AllocSlot
    history: list[int]
    prefix: list[int]
    num_computed: int
    tables: list[list[int]]
    live: int = 0
    next_k: int = 0
    """Drafts that the last row of the sequence left for the next row."""
    media: tuple[MediaItem, ...] = ()

    def push(self, token: int) -> None:
        self.prefix.append(hash((self.prefix[-1], token)))
        self.history.append(token)


@dataclass
class FakeRunner:
    """Applies plans in order, at launch. ``committed`` marks the steps whose results the scheduler has
    read."""

    kv: KVConfig
    in_slot: dict[int, SlotSequence] = field(default_factory=dict)
    gens: dict[int, int] = field(default_factory=dict)
    memory: list[dict[tuple[int, int], int]] = field(default_factory=list)
    named: dict[int, tuple[dict[int, None], list[dict[int, None]]]] = field(default_factory=dict)
    """Step in flight -> (slots in use, blocks in use for each KV cache group)."""
    verifying: dict[int, dict[int, None]] = field(default_factory=dict)
    """Step in flight -> slots with drafts to verify in the step."""
    saving: dict[int, dict[tuple[int, int], None]] = field(default_factory=dict)
    """Step in flight -> (KV cache group, block) of the snapshots that the step saves."""
    states: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(slot, KV cache group, copy) -> hash of the prefix in the state. Entries outlive sequences, like
    memory."""
    exports: list[Export] = field(default_factory=list)
    """The exports of all plans, in order."""
    right: float = 0.7
    """Share of correct drafts."""
    accepted: int = 0
    rejected: int = 0
    saved: int = 0
    loaded: int = 0
    last_step: int = -1
    media_of: Callable[[int], tuple[MediaItem, ...]] = lambda slot: ()
    """Returns the images of the sequence in a slot, from the submitting side."""
    images: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """Block of the embedding pool -> (pixels of the stored image, number of the block within the image)."""
    host_images: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """The same mapping for the pool in host memory."""
    host_shares: set[int] = field(default_factory=set)
    shares: set[int] = field(default_factory=set)
    """Blocks that were received from another group. Each rank has only a shard of the rows of such a
    block."""
    touched: dict[int, set[int]] = field(default_factory=dict)
    """Step in flight -> embedding blocks that the step reads or writes."""
    encoded: int = 0
    moved: int = 0
    overwritten: int = 0

    def __post_init__(self) -> None:
        self.memory = [{} for _ in self.kv.pools]
        self.kinds = [number for number, pool in enumerate(self.kv.pools) if pool.cache.kind == "state"]

    def anew(self) -> FakeRunner:
        """Return a runner without any sequence. The counters, ``gens`` and settings continue."""
        names = (
            "right",
            "accepted",
            "rejected",
            "saved",
            "loaded",
            "media_of",
            "encoded",
            "moved",
            "overwritten",
        )
        counts = {name: getattr(self, name) for name in names}
        return FakeRunner(self.kv, gens=self.gens, **counts)

    def launch(self, plan: StepPlan) -> StepResult:
        assert self.last_step in (-1, plan.step - 1)
        self.last_step = plan.step
        self.named[plan.step] = ({}, [{} for _ in self.kv.pools])
        self.verifying[plan.step] = {}
        self.saving[plan.step] = {}
        for op in plan.ops:
            if isinstance(op, AllocSlot):
                self._alloc(op)
            elif isinstance(op, FreeSlot):
                self._free(op)
            elif isinstance(op, AppendBlocks):
                self._append(op)
            elif isinstance(op, SaveState):
                self._save(plan.step, op)
            elif isinstance(op, LoadState):
                self._load(plan.step, op)
            elif isinstance(op, AppendEach):
                self._append_each(op)
            elif isinstance(op, Export):
                self._export(plan, op)
        self._media(plan)
        rows = [*self._rows(plan.prefill), *self._rows(plan.decode)]
        assert rows or plan.ops, "an empty plan"
        assert len({r[0] for r in rows}) == len(rows), "a slot twice in a plan"
        made: list[Made] = []
        output: list[int] = []
        embeddings: list[tuple[int, list[float]]] = []
        # Only rows with logits have a result. Drafts are appended for every row, in plan order.
        for number, row in enumerate(rows):
            answer = self._run_row(plan.step, row, number >= plan.prefill.rows)
            if row[4]:
                made.append((number, *answer))
            op = self.in_slot[row[0]].op
            if op.pooling and row[2] + row[3] == len(op.token_ids):
                assert not (op.pooling == "mean" and op.num_cached), "a mean of states that nobody computed"
                bad = [float("nan"), 0.0] if op.seed == BAD_SEED else None
                embeddings.append((number, bad or embedding(op.token_ids.tolist(), op.pooling)))
            output += self._drafts(self.in_slot[row[0]], row[6])
        return msgspec.structs.replace(_result(plan.step, made, output), embeddings=_embeddings(embeddings))

    def committed(self, step: int) -> None:
        del self.named[step], self.verifying[step], self.saving[step], self.touched[step]

    # ---- ops

    def _alloc(self, op: AllocSlot) -> None:
        assert op.slot not in self.in_slot, "AllocSlot of a slot that is not free"
        assert 0 <= op.slot < self.kv.num_slots
        assert op.gen > self.gens.get(op.slot, -1), "gen did not grow"
        for slots, _ in self.named.values():
            assert op.slot not in slots, "a slot was given away while a plan in flight names it"
        history = op.token_ids.tolist()
        assert 0 < op.num_prompt <= len(history)
        assert 0 <= op.num_cached < len(history)
        self.gens[op.slot] = op.gen
        tables: list[list[int]] = [[] for _ in self.kv.pools]
        media = self.media_of(op.slot)
        if media:
            assert self.kv.media is not None
            assert op.spans.tolist() == spans_of(media, self.kv.media.merge).ravel().tolist()
        prefix = prefix_hashes(history, media)
        sequence = SlotSequence(op.gen, op, history, prefix, op.num_cached, tables, media=media)
        self.in_slot[op.slot] = sequence

    def _free(self, op: FreeSlot) -> None:
        assert self.in_slot[op.slot].gen == op.gen
        for slots, _ in self.named.values():
            assert op.slot not in slots, "a slot was freed while a plan in flight names it"
        del self.in_slot[op.slot]

    def _append(self, op: AppendBlocks) -> None:
        occupant, pool = self.in_slot[op.slot], self.kv.pools[op.kind]
        assert len(op.blocks)
        for block in op.blocks.tolist():
            entry = len(occupant.tables[op.kind])
            occupant.tables[op.kind].append(block)
            assert 0 <= block <= pool.num_blocks
            if block == 0:
                assert pool.cache.window
            elif entry * pool.block_size >= occupant.op.num_cached:  # a block of the slot's own
                for _, blocks in self.named.values():
                    assert block not in blocks[op.kind], "a block was reused while a plan in flight names it"

    def _append_each(self, op: AppendEach) -> None:
        slots, blocks = op.slots.tolist(), op.blocks.tolist()
        assert not op.slots.flags.writeable
        assert 0 < len(slots) == len(blocks)
        assert len(set(slots)) == len(slots), "a slot twice in an op"
        assert 0 not in blocks
        for slot, block in zip(slots, blocks, strict=True):
            self._append(AppendBlocks(slot=slot, kind=op.kind, blocks=column([block])))

    def _save(self, step: int, op: SaveState) -> None:
        occupant, copy = self.in_slot[op.slot], self.in_slot[op.slot].live - op.back
        assert copy >= 0, "a snapshot of a state that is not there"
        assert not any(op.slot in slots for slots in self.verifying.values()), "the length is not known"
        assert occupant.num_computed > op.back
        self._name(step, op.kind, op.block, "a snapshot is written over while a plan in flight names it")
        self.named[step][0][op.slot] = None
        self.memory[op.kind][op.block, 0] = self.states[op.slot, op.kind, copy]
        self.saving[step][op.kind, op.block] = None
        self.saved += 1

    def _load(self, step: int, op: LoadState) -> None:
        occupant = self.in_slot[op.slot]
        assert occupant.num_computed == occupant.op.num_cached > 0
        wanted = occupant.prefix[occupant.num_computed - 1]
        assert self.memory[op.kind].get((op.block, 0)) == wanted, "a snapshot of another prefix is loaded"
        assert 1 <= op.block <= self.kv.pools[op.kind].num_blocks
        for saved in self.saving.values():
            assert (op.kind, op.block) not in saved, "a snapshot is loaded whose plan has not committed"
        self.named[step][1][op.kind][op.block] = None
        self.states[op.slot, op.kind, 0] = wanted
        occupant.live = 0
        self.loaded += 1

    def _export(self, plan: StepPlan, op: Export) -> None:
        """Check that the export belongs to a prefill row, or to state snapshots without a row in the plan."""
        rows = {row[0]: row for row in self._rows(plan.prefill)}
        if op.states:
            assert op.slot not in rows
            assert op.end == op.start == self.in_slot[op.slot].num_computed
            for kind in self.kinds:
                assert (kind, *np.frombuffer(op.blocks[kind].ids, "<i4")) in self.saving[plan.step]
        else:
            assert rows[op.slot][2:4] == (op.start, op.end - op.start)
        self.exports.append(op)

    def _media(self, plan: StepPlan) -> None:
        """Apply the media updates. Check that each image read by a row is bound to its complete embedding."""
        patches: list[int] = []
        bound: dict[tuple[int, int], BindMedia] = {}
        touched = self.touched[plan.step] = set()
        for op in plan.ops:
            if isinstance(op, Encode):
                assert op.pixels
                for number, block in enumerate(self._embedding_blocks(op.blocks, op.count)):
                    self.overwritten += block in self.images
                    self.images[block] = (op.pixels, number)
                    self.shares.discard(block)
                    touched.add(block)
                patches.append(math.prod(op.grid))
                self.encoded += 1
            elif isinstance(op, MoveMedia):
                here = np.frombuffer(op.blocks, "<i4").tolist()
                there = np.frombuffer(op.host, "<i4").tolist()
                assert len(here) == len(there)
                assert self.kv.media is not None
                assert all(1 <= block <= self.kv.media.host_blocks for block in there)
                source, target = (self.host_images, self.images) if op.up else (self.images, self.host_images)
                pairs = zip(there, here, strict=True) if op.up else zip(here, there, strict=True)
                for old, new in pairs:
                    target[new] = source[old]
                    shared = self.host_shares if op.up else self.shares
                    other = self.shares if op.up else self.host_shares
                    (other.add if old in shared else other.discard)(new)
                touched.update(here)
                self.moved += 1
            elif isinstance(op, GatherMedia):
                blocks = self._embedding_blocks(op.blocks, op.count)
                assert self.shares.issuperset(blocks), "ranks exchange what they have whole"
                self.shares.difference_update(blocks)
                touched.update(blocks)
            elif isinstance(op, BindMedia):
                bound[op.slot, op.start] = op
                touched.update(self._embedding_blocks(op.blocks, op.count))
        if patches:
            limits = self.kv.media
            assert limits is not None
            assert sum(patches) <= limits.encode_patches or len(patches) == 1
        # Every image that overlaps a prefill row needs exactly one BindMedia with the whole embedding.
        for slot, _, start, count, *_ in self._rows(plan.prefill):
            for item in self.in_slot[slot].media:
                if item.start < start + count and start < item.start + item.count:
                    op = bound.pop((slot, item.start))
                    assert op.count == item.count
                    blocks = self._embedding_blocks(op.blocks, op.count)
                    found = [self.images[block] for block in blocks]
                    whole = [(item.pixels, number) for number in range(len(blocks))]
                    assert found == whole, "positions of another image"
                    assert self.shares.isdisjoint(blocks), "rows that ranks have not exchanged"
        assert not bound, "an image is bound that no row reads"

    def _embedding_blocks(self, blocks: bytes, count: int) -> list[int]:
        limits = self.kv.media
        assert limits is not None
        found = np.frombuffer(blocks, "<i4").tolist()
        assert len(set(found)) == len(found) == limits.blocks_of(count)
        assert all(1 <= block <= limits.blocks for block in found)
        return found

    def _name(self, step: int, kind: int, block: int, why: str) -> None:
        assert 1 <= block <= self.kv.pools[kind].num_blocks
        for _, blocks in self.named.values():
            assert block not in blocks[kind], why
        self.named[step][1][kind][block] = None

    # ---- rows

    def _rows(self, s: Segment) -> list[Row]:
        columns = (s.slot, s.gen, s.start, s.count, s.logits, s.sample, s.next_k)
        assert len({len(c) for c in columns}) == 1
        assert not any(c.flags.writeable for c in columns)
        return list(zip(*(c.tolist() for c in columns), strict=True))

    def _run_row(self, step: int, row: Row, decode: bool) -> tuple[list[int], list[int], bool, int]:
        """Run one row. Return (sampled ids, prompt ids with logits, True if the row failed, accepted
        drafts)."""
        slot, gen, start, count, logits, sample, next_k = row
        occupant = self.in_slot[slot]
        assert occupant.gen == gen, "a row names another occupant"
        assert count > 0
        assert 0 <= sample <= logits <= count
        assert 0 <= next_k < self.kv.copies
        assert sample or not next_k, "drafts behind an unfinished prompt"
        begin = occupant.num_computed
        # Drafts in flight make the length uncertain: the planned start may then be too far, never too near.
        loose = any(slot in slots for slots in self.verifying.values())
        assert start >= begin if loose else start == begin
        assert len(occupant.history) > begin, "a position whose id nobody knows"
        known = len(occupant.op.token_ids)
        fetched = occupant.op.num_cached == known - 1
        if decode:
            assert begin >= known - fetched
            assert count == logits == sample <= 1 + occupant.next_k, "drafts that nobody proposed"
            drafts = self._drafts(occupant, count - 1)
            if drafts:
                self.verifying[step][slot] = None
        else:
            assert start + count <= known
            assert sample == (start + count == known and not occupant.op.pooling)
            drafts = []
        occupant.next_k = next_k
        content = occupant.prefix[begin : begin + count]
        for draft in drafts:
            content.append(hash((content[-1], draft)))
        assert start + count + next_k <= self.kv.max_model_len
        self._touch(step, slot, occupant, start + count + next_k, begin, content)
        self._recur(slot, occupant, begin, content, decode)
        end = begin + count
        prompt = [] if decode else occupant.history[end - logits + 1 : end - sample + 1]
        if not sample:
            occupant.num_computed = end
            return [], prompt, False, 0
        tokens, error, accepted = self._sampled(occupant, content[-sample:], drafts)
        occupant.num_computed = begin + 1 + accepted if decode else end
        occupant.live = accepted
        return tokens, prompt, error, accepted

    def _sampled(
        self, occupant: SlotSequence, content: list[int], drafts: list[int]
    ) -> tuple[list[int], bool, int]:
        """Return (a token after each of ``content``, True if the last accepted one fails, accepted
        drafts)."""
        op, made = occupant.op, len(occupant.history) - occupant.op.num_prompt
        tokens = [
            next_token(prefix, op.seed, op.choice, made + number, op.params)
            for number, prefix in enumerate(content)
        ]
        accepted, fails = 0, 2 - made if op.seed == BAD_SEED else -1
        while accepted < len(drafts) and drafts[accepted] == tokens[accepted] and accepted != fails:
            accepted += 1
        assert made + accepted < op.params.max_tokens, "a row beyond max_tokens"
        if accepted == fails:
            tokens[accepted] = 0
        for token in tokens[: accepted + 1]:
            occupant.push(token)
        assert len(occupant.history) <= self.kv.max_model_len, "a row beyond the context"
        self.accepted += accepted
        self.rejected += len(drafts) - accepted
        return tokens, accepted == fails, accepted

    def _drafts(self, occupant: SlotSequence, count: int) -> list[int]:
        """Return ``count`` guesses of the next ids. The share ``right`` of the guesses is correct."""
        op, drafts = occupant.op, list[int]()
        prefix, made = occupant.prefix[-1], len(occupant.history) - occupant.op.num_prompt
        for number in range(count):
            right = next_token(prefix, op.seed, op.choice, made + number, op.params)
            wrong = hash((prefix, 1)) % 100 >= 100 * self.right
            drafts.append((right + 1) % VOCAB if wrong else right)
            prefix = hash((prefix, drafts[-1]))
        return drafts

    def _recur(self, slot: int, occupant: SlotSequence, begin: int, content: list[int], decode: bool) -> None:
        """Advance the recurrent states over ``content``, the prefix hashes of the positions from ``begin``
        on."""
        for kind in self.kinds:
            if begin:
                state = self.states.get((slot, kind, occupant.live))
                assert state == occupant.prefix[begin - 1], "a state of another prefix goes on"
            for copy, prefix in enumerate(content) if decode else [(0, content[-1])]:
                self.states[slot, kind, copy] = prefix
        occupant.live = 0

    def _touch(
        self, step: int, slot: int, occupant: SlotSequence, bound: int, start: int, content: list[int]
    ) -> None:
        """Write ``content`` to the positions from ``start`` on, and check every position that attention
        reads."""
        slots, blocks = self.named[step]
        slots[slot] = None
        end, whole = start + len(content), occupant.prefix[:start] + content
        for kind, pool in enumerate(self.kv.pools):
            if kind in self.kinds:
                continue
            table, memory, size = occupant.tables[kind], self.memory[kind], pool.block_size
            window, ratio = pool.cache.window, pool.cache.ratio
            first = max(0, start - window + 1) if window else 0
            assert len(table) * size >= bound, "the block table does not cover the row"
            for p in range(start, end):
                assert table[p // size] != 0
                if (p + 1) % ratio == 0:  # the last position of a compressed entry
                    memory[table[p // size], p % size // ratio] = whole[p]
            for p in range(first, end):
                block = table[p // size]
                assert block != 0, "attention reads a hole"
                blocks[kind][block] = None
                if (p + 1) % ratio == 0:
                    line = memory.get((block, p % size // ratio))
                    assert line == whole[p], "attention reads foreign content"


def _result(step: int, made: list[Made], drafts: list[int]) -> StepResult:
    offsets = np.cumsum([0, *(len(m[1]) for m in made)])
    prompt_offsets = np.cumsum([0, *(len(m[2]) for m in made)])
    tokens = [t for m in made for t in m[1]]
    prompt = [t for m in made for t in m[2]]
    return StepResult(
        step=step,
        rows=column([m[0] for m in made]),
        offsets=column(offsets),
        tokens=column(tokens),
        accepted=column([m[4] for m in made]),
        drafts=column(drafts),
        row_error=tuple((i, ROW_ERROR) for i, m in enumerate(made) if m[3]),
        logprobs=_logprobs(offsets, tokens),
        prompt_logprobs=_logprobs(prompt_offsets, prompt),
    )


def _embeddings(made: list[tuple[int, list[float]]]) -> EmbeddingRows | None:
    if not made:
        return None
    values = np.array([values for _, values in made], np.float32)
    lengths = column([values.shape[1]] * len(values))
    return EmbeddingRows(rows=column([number for number, _ in made]), values=values, lengths=lengths)


def _logprobs(offsets: np.ndarray, tokens: list[int]) -> LogprobRows:
    ids = np.array([[t, *range(TOP)] for t in tokens], np.int32).reshape(-1, 1 + TOP)
    return LogprobRows(
        offsets=column(offsets),
        ids=ids,
        values=-(ids + 0.5).astype(np.float32),
        rank=column([t + 1 for t in tokens]) if tokens else EMPTY,
    )
