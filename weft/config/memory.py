"""How much memory a model and its caches need, and how a number of bytes becomes block pools.

A pool is worth its weakest kind, so bytes are divided in proportion to what one sequence of
``max_model_len`` needs of each: every kind can then hold the same number of such sequences. Each pool has
one block more than it gives out, the null block; it is paid for here.

A recurrent state is no entry in a pool: every slot has its copies of it, which come off first. The pool of
its kind holds snapshots, of which a sequence needs none: they get ``MIN_SNAPSHOTS``, and a share. In groups
that send or receive caches ("rooms") a state passes through a snapshot, and there are more of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.common.errors import ConfigError
from weft.config.cache_layout import block_bytes, slot_tensors
from weft.config.resolved import PoolSpec
from weft.config.sections import SchedulerSection
from weft.config.sharding import local_spec
from weft.config.spec import DTYPE_BYTES, CacheSpec, ModelSpec, SparseSpec, VisionSpec
from weft.types.layout import ALONE, Layout
from weft.types.plan import MAX_PROMPT_LOGITS

GIB = 1 << 30

MIN_SNAPSHOTS = 4
"""Snapshots of the recurrent state that every pool of them has."""
ROOM_SNAPSHOTS = 32
"""More of them, at most, where states are sent or received: one for each sequence that can run."""
MIN_STRIDE = 1024
"""Positions between two snapshots of one prompt, at least."""


def show_bytes(count: int) -> str:
    """``count`` as a value for --kv-cache-memory that is not smaller: ``3M``, ``12G``."""
    for unit, scale in (("G", GIB), ("M", 1 << 20), ("K", 1 << 10)):
        if count >= 10 * scale or (count >= scale and count % scale == 0):
            return f"{-(-count // scale)}{unit}"
    return str(count)


def kind_block(cache: CacheSpec, block_size: int) -> int:
    """Positions of one block of a kind, where a base block has ``block_size``.

    The least that is a whole number of base blocks and of ``ratio`` positions, even if that is one entry: a
    prefix hit of the whole model ends at a block's border of every kind, so eight entries of 128 positions
    a block would lose every hit below 1,024 tokens. A small block costs nothing in return: what reads
    compressed entries picks them one by one, each of them a KiB or so, and blocks are taken less often than
    base blocks are.
    """
    return math.lcm(block_size, cache.ratio)


def hit_unit(spec: ModelSpec, block_size: int) -> int:
    """Positions that every prefix hit is a multiple of."""
    return math.lcm(block_size, *(kind_block(cache, block_size) for cache in spec.caches))


def snapshot_stride(spec: ModelSpec, block_size: int, dtype: str) -> int:
    """Positions between the snapshots of a long prompt: a multiple of the ``hit_unit``.

    So many that a snapshot costs no more bytes than the entries of those positions in the kinds that keep
    all, and no fewer than ``MIN_STRIDE``: a snapshot ends a chunk early.
    """
    states = [cache for cache in spec.caches if cache.kind == "state"]
    snapshot = sum(block_bytes(cache, block_size, dtype) for cache in states)
    positions = MIN_STRIDE
    unit = hit_unit(spec, block_size)
    entries = [cache for cache in spec.caches if cache.kind != "state" and not cache.window]
    if entries:
        kept = sum(block_bytes(cache, unit, dtype) for cache in entries)  # of one unit of positions
        positions = max(positions, -(-snapshot * unit // kept))
    return -(-positions // unit) * unit


def blocks_for_one(cache: CacheSpec, block_size: int, max_model_len: int, scheduler: SchedulerSection) -> int:
    """Blocks, of ``block_size``, that a sequence of ``max_model_len`` alone needs at most, in any chunks."""
    if cache.kind == "state":
        return 0
    full = -(-max_model_len // block_size)
    if not cache.window:
        return full
    # Positions held at once: those that the first token of a chunk sees, and the chunk. They need not begin
    # at a block's border, so they can touch one block more.
    return min(full, -(-(cache.window - 1 + longest_chunk(scheduler, max_model_len)) // block_size) + 1)


def longest_chunk(scheduler: SchedulerSection, max_model_len: int) -> int:
    """Most tokens that one sequence computes in one step."""
    chunk = min(scheduler.max_num_batched_tokens, max_model_len)
    return min(chunk, scheduler.long_prefill_token_threshold or chunk)


def state_bytes(spec: ModelSpec, dtype: str, num_slots: int, copies: int = 1) -> int:
    """Bytes of the recurrent state that slots have, ``copies`` each; one entry more than there are slots."""
    states = [cache for cache in spec.caches if cache.kind == "state"]
    return sum(t.nbytes for cache in states for t in slot_tensors(cache, num_slots, copies, dtype))


def live_bytes(spec: ModelSpec, dtype: str, scheduler: SchedulerSection, copies: int = 1) -> int:
    """``state_bytes`` of as many slots as ``scheduler`` has."""
    return state_bytes(spec, dtype, scheduler.max_num_seqs * max(scheduler.steps_in_flight, 1), copies)


@dataclass(frozen=True, slots=True)
class _Needs:
    """Of the caches of a model: bytes that do not depend on how many sequences there are, and the rest."""

    fixed: int
    sizes: list[int]
    """Bytes of a block of each kind."""
    blocks: list[int]
    """Of each kind, for one sequence."""

    @property
    def one(self) -> int:
        """Bytes for one sequence."""
        return sum(blocks * size for blocks, size in zip(self.blocks, self.sizes, strict=True))


def _needs(
    spec: ModelSpec,
    block_size: int,
    dtype: str,
    max_model_len: int,
    scheduler: SchedulerSection,
    copies: int,
    snapshots: bool,
    rooms: bool,
) -> _Needs:
    at = [kind_block(cache, block_size) for cache in spec.caches]
    sizes = [block_bytes(cache, size, dtype) for cache, size in zip(spec.caches, at, strict=True)]
    blocks = [
        blocks_for_one(cache, size, max_model_len, scheduler)
        for cache, size in zip(spec.caches, at, strict=True)
    ]
    fixed = live_bytes(spec, dtype, scheduler, copies) + sum(sizes)
    states = [number for number, cache in enumerate(spec.caches) if cache.kind == "state"]
    if states:
        snapshot = sum(sizes[number] for number in states)
        fixed += least_snapshots(scheduler, rooms) * snapshot
        if snapshots:
            share = _snapshots_for_one(spec, block_size, dtype, max_model_len)
            entries = sum(count * size for count, size in zip(blocks, sizes, strict=True))
            # Entries are what lets sequences run; snapshots only save them time. So never the larger part.
            share = min(share, entries // snapshot) if entries else share
            for number in states:
                blocks[number] = share
    return _Needs(fixed, sizes, blocks)


def least_snapshots(scheduler: SchedulerSection, rooms: bool) -> int:
    """Snapshots that a pool of them has in any case."""
    return MIN_SNAPSHOTS + (min(scheduler.max_num_seqs, ROOM_SNAPSHOTS) if rooms else 0)


def _snapshots_for_one(spec: ModelSpec, block_size: int, dtype: str, max_model_len: int) -> int:
    """Snapshots that a prompt of ``max_model_len`` leaves: see ``weft.kv.snapshots``."""
    return max_model_len // snapshot_stride(spec, block_size, dtype) + 2


def bytes_for(
    spec: ModelSpec,
    block_size: int,
    dtype: str,
    sequences: int,
    max_model_len: int,
    scheduler: SchedulerSection,
    *,
    copies: int = 1,
    snapshots: bool = False,
    rooms: bool = False,
) -> int:
    """Cache bytes for ``sequences`` of ``max_model_len`` in every kind; live states, null blocks included.

    ``copies``: of a slot's recurrent state. ``snapshots``: whether beyond the least there are some.
    ``rooms``: whether caches are sent to other groups or come from there.
    """
    needs = _needs(spec, block_size, dtype, max_model_len, scheduler, copies, snapshots, rooms)
    return needs.fixed + sequences * needs.one


def pools_for(
    spec: ModelSpec,
    block_size: int,
    dtype: str,
    num_bytes: int,
    max_model_len: int,
    scheduler: SchedulerSection,
    *,
    copies: int = 1,
    snapshots: bool = True,
    rooms: bool = False,
) -> tuple[PoolSpec, ...]:
    """The pools that ``num_bytes`` of cache make, one for each kind of ``spec``; see ``bytes_for``.

    Where bytes are short, or without ``snapshots``, there are ``least_snapshots``.

    Raises ConfigError naming --max-model-len and --kv-cache-memory (and --max-num-seqs, where slots have
    states), with values that would work, unless every kind can hold one sequence of ``max_model_len``.
    """
    needs = _needs(spec, block_size, dtype, max_model_len, scheduler, copies, snapshots, rooms)
    if num_bytes < needs.fixed + needs.one:
        needs = _needs(spec, block_size, dtype, max_model_len, scheduler, copies, False, rooms)
    usable = num_bytes - needs.fixed
    one = needs.one
    if usable < one:
        longest = longest_that_fits(
            spec, block_size, dtype, num_bytes, max_model_len, scheduler, copies=copies, rooms=rooms
        )
        live = live_bytes(spec, dtype, scheduler, copies)
        raise _too_small(num_bytes, needs.fixed + one, max_model_len, longest, live, scheduler)
    pools = []
    for cache, blocks in zip(spec.caches, needs.blocks, strict=True):
        count = usable * blocks // one if blocks else 0
        if cache.kind == "state":
            stride = snapshot_stride(spec, block_size, dtype)
            unit = hit_unit(spec, block_size)
            count += least_snapshots(scheduler, rooms)
            pools.append(PoolSpec(cache=cache, block_size=unit, num_blocks=count, stride=stride))
        else:
            pools.append(PoolSpec(cache=cache, block_size=kind_block(cache, block_size), num_blocks=count))
    return tuple(pools)


def _too_small(
    num_bytes: int, needed: int, max_model_len: int, longest: int, live: int, scheduler: SchedulerSection
) -> ConfigError:
    """``needed`` bytes for a sequence of ``max_model_len``, ``live`` of them for the states of all slots.

    ``longest``: max_model_len that ``num_bytes`` hold, or 0.
    """
    ways = [f"set --kv-cache-memory to at least {show_bytes(needed)}"]
    if longest:
        ways.append(f"--max-model-len to at most {longest}")
    if live:
        slots = scheduler.max_num_seqs * max(scheduler.steps_in_flight, 1)
        over = -(-(needed - num_bytes) * (slots + 1) // live)  # slots that must go
        fewer = (slots - over) // max(scheduler.steps_in_flight, 1)
        ways += [f"--max-num-seqs to at most {fewer}"] if fewer >= 1 else []
    states = ""
    if live:
        seqs = scheduler.max_num_seqs
        states = f", {show_bytes(live)} of it recurrent state of --max-num-seqs {seqs} sequences,"
    return ConfigError(
        f"one sequence of --max-model-len {max_model_len} needs {show_bytes(needed)} of KV cache{states} and "
        f"there are {show_bytes(max(num_bytes, 0))}: {', or '.join(ways)}",
        param="--max-num-seqs" if live and not longest else "--max-model-len",
    )


def longest_that_fits(
    spec: ModelSpec,
    block_size: int,
    dtype: str,
    num_bytes: int,
    most: int,
    scheduler: SchedulerSection,
    *,
    copies: int = 1,
    rooms: bool = False,
) -> int:
    """The largest max_model_len up to ``most`` of which ``num_bytes`` hold one sequence; 0 if none does."""
    low = 0
    high = most
    while low < high:
        middle = (low + high + 1) // 2
        needed = bytes_for(spec, block_size, dtype, 1, middle, scheduler, copies=copies, rooms=rooms)
        if needed <= num_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def weight_bytes(
    spec: ModelSpec,
    dtype: str,
    quantization: str = "none",
    layout: Layout = ALONE,
    redundant: int = 0,
    *,
    packed: bool = False,
) -> int:
    """Bytes of a rank's share of the parameters (an estimate: norms, biases and scales are left out).

    ``redundant``: further copies of experts that ranks have between them.

    ``quantization`` is of the matrices of layers, experts' included; with any, heads (and tables that are
    heads as well) have 8 bits; other tables and routers do not change. ``packed``: matrices that are
    published quantized stay so.
    """
    size = DTYPE_BYTES[dtype]
    spec = local_spec(spec, layout)
    recurrent = len(spec.delta.layers) if spec.delta is not None else 0
    matrices = (spec.layers - recurrent) * _attention_elements(spec)
    matrices += recurrent * _delta_elements(spec)
    dense = 3 * spec.hidden * spec.intermediate
    routers = 0
    routed = 0
    if spec.moe is None:
        matrices += spec.layers * dense
    else:
        moe = spec.moe
        routing = len(spec.moe.layers)
        matrices += (spec.layers - routing) * dense
        experts = -(-(moe.experts + redundant) // layout.ranks) if layout.expert else moe.experts
        matrices += routing * 3 * spec.hidden * moe.shared
        routed = routing * 3 * spec.hidden * experts * moe.intermediate
        routers = routing * moe.experts * spec.hidden * max(4, size)
    table = -(-spec.vocab_size // layout.tensor) * spec.hidden
    head = table * (size if quantization == "none" else 1)
    embeddings = head if spec.tied else table * size + head * spec.head
    tower = 0 if spec.vision is None else tower_bytes(spec.vision, dtype)
    bits = expert_bits = _BITS.get(quantization, 8.0 * size)
    if packed and quantization == "none" and spec.quantized is not None:
        bits = spec.quantized.bits or bits
        expert_bits = spec.quantized.expert_bits or bits
    return int((matrices * bits + routed * expert_bits) / 8) + routers + embeddings + tower


#: Of an element, with its share of scales.
_BITS = {"int8": 8.0, "w8a8": 8.0, "int4": 4 + 40 / 64, "w4a8": 4 + 40 / 64, "fp8": 8 + 32 / 128}


def tower_bytes(vision: VisionSpec, dtype: str) -> int:
    """Bytes of a vision tower's parameters, which every rank has whole (norms and biases are left out)."""
    joined = vision.hidden * vision.media.merge**2
    blocks = vision.layers * vision.hidden * (4 * vision.hidden + 2 * vision.intermediate)
    mergers = (1 + len(vision.levels)) * joined * (joined + vision.output)
    patch = 3 * vision.media.temporal * vision.media.patch**2 + vision.side**2
    return (blocks + mergers + patch * vision.hidden) * DTYPE_BYTES[dtype]


def _attention_elements(spec: ModelSpec) -> int:
    """Of one layer; where layers differ, their mean."""
    mla = spec.mla
    if spec.sparse is not None:
        return _sparse_elements(spec, spec.sparse)
    if mla is None:
        queries = spec.heads * (3 if spec.output_gate else 2)
        return spec.hidden * spec.head_dim * (queries + 2 * spec.kv_heads)
    queries = spec.heads * (mla.nope + mla.rope)
    inputs = spec.hidden + queries if mla.q_lora else queries
    return (
        (mla.q_lora or spec.hidden) * inputs
        + spec.hidden * (mla.kv_lora + mla.rope)
        + spec.heads * (mla.nope + mla.v) * mla.kv_lora
        + spec.hidden * spec.heads * mla.v
    )


def _delta_elements(spec: ModelSpec) -> int:
    delta = spec.delta
    if delta is None:
        return 0
    key = delta.k_heads * delta.k_dim
    value = delta.v_heads * delta.v_dim
    return spec.hidden * (2 * key + 3 * value + 2 * delta.v_heads) + delta.conv * (2 * key + value)


def _sparse_elements(spec: ModelSpec, sparse: SparseSpec) -> int:
    queries = spec.heads * spec.head_dim
    inputs = sparse.q_lora * (spec.hidden + queries) + spec.hidden * spec.head_dim
    outputs = queries * sparse.o_lora + sparse.o_groups * sparse.o_lora * spec.hidden
    index = sparse.index_heads * sparse.index_dim
    of_groups = {
        "window": 0,
        "chosen": 4 * spec.hidden * (spec.head_dim + sparse.index_dim) + sparse.q_lora * index,
        "all": 2 * spec.hidden * spec.head_dim,
    }
    return inputs + outputs + sum(of_groups[kind] for kind in sparse.types) // len(sparse.types)


def activation_bytes(spec: ModelSpec, dtype: str, scheduler: SchedulerSection) -> int:
    """Bytes of the largest step's intermediate results (an upper estimate, to divide memory at first)."""
    tokens = scheduler.max_num_batched_tokens
    wide = spec.intermediate
    if spec.moe is not None:
        wide = max(wide, spec.moe.intermediate * spec.moe.top_k + spec.moe.shared)
    inner = 2 * spec.head_dim * (spec.heads + spec.kv_heads)
    if spec.delta is not None:
        heads = spec.delta.k_heads * spec.delta.k_dim + spec.delta.v_heads * spec.delta.v_dim
        inner = max(inner, 4 * heads)
    row = 4 * spec.hidden + inner + _sparse_row(spec, DTYPE_BYTES[dtype]) + 3 * wide
    if spec.hyper is not None:
        row += 7 * spec.hyper.streams * spec.hidden  # the streams, and copies of them in float32
    tower = 0 if spec.vision is None else encoding_bytes(spec.vision, dtype)
    logits = scheduler.max_num_seqs * spec.vocab_size * 4 * 4
    logits += MAX_PROMPT_LOGITS * spec.vocab_size * DTYPE_BYTES[dtype]
    scores = _SCORES if _sparse_row(spec, 1) else 0
    return (tokens * row * DTYPE_BYTES[dtype] + logits) * scheduler.steps_in_flight + tower + scores


_SCORES = 2 * (4 << 22)
"""Bytes of an indexer's scores that are held at a time, and of their growing: for any context."""


def _sparse_row(spec: ModelSpec, size: int) -> int:
    """Elements, of ``size`` bytes, of a token's intermediate results in a layer that chooses what it
    reads.
    """
    if spec.mla is not None and spec.index is not None:
        mla = spec.mla
        absorbed = spec.heads * (3 * mla.kv_lora + 2 * mla.rope)
        return absorbed + 3 * spec.index.heads * spec.index.dim + 8 * spec.index.top // size
    if spec.sparse is not None and "chosen" in spec.sparse.types:
        return 3 * spec.sparse.index_heads * spec.sparse.index_dim + 8 * spec.sparse.index_top // size
    return 0


def encoding_bytes(vision: VisionSpec, dtype: str, together: int = 0) -> int:
    """Bytes of intermediate results while the largest image is encoded, alone, or as many that have
    ``together`` patches (likewise)."""
    media = vision.media
    patches = media.max_patches if media.kind == "patches" else media.max_pixels // media.patch**2
    patches = max(patches, together)
    size = DTYPE_BYTES[dtype]
    pixels = 2 * 3 * media.temporal * media.patch**2  # in colours, and cut
    learned = 3 * vision.hidden * max(4, size)
    block = (8 * vision.hidden + 2 * vision.intermediate) * size
    return patches * max(pixels * size, learned, block)
