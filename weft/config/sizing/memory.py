"""Memory need of a model and its caches, and the division of bytes into block pools.

A sequence needs blocks of every KV cache group. So bytes are divided in proportion to the need of one
sequence of ``max_model_len``: every group can then hold the same number of such sequences. Each pool has one
block more than the scheduler can allocate, the null block. The sizes here include the null block.

Recurrent states are not in a pool: every slot has its own copies, subtracted first. The pool of a state group
holds snapshots. Snapshots are optional for a sequence, so the pool gets ``MIN_SNAPSHOTS`` plus a share. In
groups that send or receive caches, each transfer passes the state through a snapshot, so the pool gets more
(``TRANSFER_SNAPSHOTS``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weft.common.errors import ConfigError
from weft.config.cache_layout import block_bytes, slot_tensors
from weft.config.resolved import PoolSpec
from weft.config.sections.all import SchedulerSection
from weft.config.sharding import local_spec
from weft.config.sizing.layer_elements import (
    counted_elements,
    dense_elements,
    grouped_elements,
    input_table_elements,
    latent_elements,
    layer_elements,
    mixer_elements,
    recurrent_elements,
    recurrent_layers,
    recurrent_row,
)
from weft.config.spec import DTYPE_BYTES, CacheSpec, ModelSpec, SparseSpec, VisionSpec
from weft.types.layout import ALONE, Layout
from weft.types.plan import MAX_PROMPT_LOGITS

GIB = 1 << 30

MIN_SNAPSHOTS = 4
"""Minimum number of snapshots in a pool of recurrent states."""
TRANSFER_SNAPSHOTS = 32
"""Maximum number of extra snapshots for transfers: one per sequence that can run."""
MIN_STRIDE = 1024
"""Minimum number of positions between two snapshots of one prompt."""


def show_bytes(count: int) -> str:
    """Return ``count`` as a value for --kv-cache-memory, rounded up: ``3M``, ``12G``."""
    for unit, scale in (("G", GIB), ("M", 1 << 20), ("K", 1 << 10)):
        if count >= 10 * scale or (count >= scale and count % scale == 0):
            return f"{-(-count // scale)}{unit}"
    return str(count)


def kind_block(cache: CacheSpec, block_size: int) -> int:
    """Return the positions per block of a KV cache group if a base block has ``block_size`` positions.

    The result is the smallest common multiple of ``block_size`` and ``ratio``, even if a block then holds one
    entry. Reason: a prefix hit ends at a block border of every group. With eight entries of 128 positions per
    block, no hit below 1,024 tokens would survive. Small blocks cost little: compressed entries are read one
    by one, and blocks are allocated less often than base blocks.
    """
    return math.lcm(block_size, cache.ratio)


def hit_unit(spec: ModelSpec, block_size: int) -> int:
    """Return the number of positions that divides the length of every prefix hit."""
    return math.lcm(block_size, *(kind_block(cache, block_size) for cache in spec.caches))


def snapshot_stride(spec: ModelSpec, block_size: int, dtype: str) -> int:
    """Return the positions between two snapshots of a long prompt: a multiple of ``hit_unit``.

    The stride is at least ``MIN_STRIDE``, because a snapshot ends a chunk early. A snapshot takes at most as
    many bytes as the stride's entries in all groups without a window.
    """
    states = [cache for cache in spec.caches if cache.kind == "state"]
    snapshot = sum(block_bytes(cache, block_size, dtype) for cache in states)
    positions = MIN_STRIDE
    unit = hit_unit(spec, block_size)
    entries = [cache for cache in spec.caches if cache.kind != "state" and not cache.window]
    if entries:
        kept = sum(block_bytes(cache, unit, dtype) for cache in entries)  # bytes of ``unit`` positions
        positions = max(positions, -(-snapshot * unit // kept))
    return -(-positions // unit) * unit


def blocks_for_one(cache: CacheSpec, block_size: int, max_model_len: int, scheduler: SchedulerSection) -> int:
    """Return the maximum number of blocks that one sequence of ``max_model_len`` needs, with any chunking.

    ``block_size``: positions per block of this group. Recurrent states need no block: the result is 0.
    """
    if cache.kind == "state":
        return 0
    full = -(-max_model_len // block_size)
    if not cache.window:
        return full
    # Positions in use at once: the window of the chunk's first token, plus the chunk. The positions need not
    # begin at a block border, so one more block may be touched.
    return min(full, -(-(cache.window - 1 + longest_chunk(scheduler, max_model_len)) // block_size) + 1)


def longest_chunk(scheduler: SchedulerSection, max_model_len: int) -> int:
    """Return the maximum number of tokens of one sequence in one step."""
    chunk = min(scheduler.max_num_batched_tokens, max_model_len)
    return min(chunk, scheduler.long_prefill_token_threshold or chunk)


def state_bytes(spec: ModelSpec, dtype: str, num_slots: int, copies: int = 1) -> int:
    """Return the bytes of the recurrent states of all slots and the spare slot, with ``copies`` per slot."""
    states = [cache for cache in spec.caches if cache.kind == "state"]
    return sum(t.nbytes for cache in states for t in slot_tensors(cache, num_slots, copies, dtype))


def live_bytes(spec: ModelSpec, dtype: str, scheduler: SchedulerSection, copies: int = 1) -> int:
    """Return ``state_bytes`` for the number of slots that ``scheduler`` has."""
    return state_bytes(spec, dtype, scheduler.max_num_seqs * max(scheduler.steps_in_flight, 1), copies)


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes that the caches of a model need: a fixed part, and a part per sequence."""

    fixed: int
    """Bytes independent of the number of sequences."""
    sizes: list[int]
    """Bytes per block, for each KV cache group."""
    blocks: list[int]
    """Blocks per sequence, for each KV cache group."""

    @property
    def one(self) -> int:
        """Bytes per sequence."""
        return sum(blocks * size for blocks, size in zip(self.blocks, self.sizes, strict=True))


def _needs(
    spec: ModelSpec,
    block_size: int,
    dtype: str,
    max_model_len: int,
    scheduler: SchedulerSection,
    copies: int,
    snapshots: bool,
    transfers: bool,
) -> _Needs:
    """Return the needs of sequences of ``max_model_len``. For the parameters see ``bytes_for``."""
    at = [kind_block(cache, block_size) for cache in spec.caches]
    sizes = [block_bytes(cache, size, dtype) for cache, size in zip(spec.caches, at, strict=True)]
    blocks = [
        blocks_for_one(cache, size, max_model_len, scheduler)
        for cache, size in zip(spec.caches, at, strict=True)
    ]
    # sum(sizes) pays for the null block of each group.
    fixed = live_bytes(spec, dtype, scheduler, copies) + sum(sizes)
    states = [number for number, cache in enumerate(spec.caches) if cache.kind == "state"]
    if states:
        snapshot = sum(sizes[number] for number in states)
        fixed += least_snapshots(scheduler, transfers) * snapshot
        if snapshots:
            share = _snapshots_for_one(spec, block_size, dtype, max_model_len)
            entries = sum(count * size for count, size in zip(blocks, sizes, strict=True))
            # Sequences cannot run without entries; snapshots only save time. So snapshots never get the
            # larger part.
            share = min(share, entries // snapshot) if entries else share
            for number in states:
                blocks[number] = share
    return _Needs(fixed, sizes, blocks)


def least_snapshots(scheduler: SchedulerSection, transfers: bool) -> int:
    """Return the minimum number of snapshots in a pool.

    ``transfers``: True if the group sends or receives caches.
    """
    return MIN_SNAPSHOTS + (min(scheduler.max_num_seqs, TRANSFER_SNAPSHOTS) if transfers else 0)


def _snapshots_for_one(spec: ModelSpec, block_size: int, dtype: str, max_model_len: int) -> int:
    """Return the number of snapshots that a prompt of ``max_model_len`` leaves: see ``weft.kv.snapshots``."""
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
    transfers: bool = False,
) -> int:
    """Return the cache bytes for ``sequences`` of ``max_model_len``, with live states and null blocks.

    ``copies``: copies of the recurrent state per slot. ``snapshots``: True to add snapshots beyond the
    minimum. ``transfers``: True if the group sends caches to other groups or receives caches.
    """
    needs = _needs(spec, block_size, dtype, max_model_len, scheduler, copies, snapshots, transfers)
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
    transfers: bool = False,
) -> tuple[PoolSpec, ...]:
    """Return the pools that fit into ``num_bytes``, one per KV cache group of ``spec``; see ``bytes_for``.

    Pools of states have only ``least_snapshots`` if memory is short or ``snapshots`` is False.

    Raise ConfigError unless every group can hold one sequence of ``max_model_len``. The error names
    --max-model-len and --kv-cache-memory (and --max-num-seqs if slots have states), with values that work.
    """
    needs = _needs(spec, block_size, dtype, max_model_len, scheduler, copies, snapshots, transfers)
    # Not enough for one sequence: give up the optional snapshots before the length.
    if num_bytes < needs.fixed + needs.one:
        needs = _needs(spec, block_size, dtype, max_model_len, scheduler, copies, False, transfers)
    usable = num_bytes - needs.fixed
    one = needs.one
    if usable < one:
        longest = longest_that_fits(
            spec, block_size, dtype, num_bytes, max_model_len, scheduler, copies=copies, transfers=transfers
        )
        live = live_bytes(spec, dtype, scheduler, copies)
        raise _too_small(num_bytes, needs.fixed + one, max_model_len, longest, live, scheduler)
    if snapshots and not one:  # no group has entries, so all memory is for snapshots
        needs = replace(needs, blocks=[1] * len(needs.blocks))
        one = needs.one
    pools = []
    for cache, blocks in zip(spec.caches, needs.blocks, strict=True):
        count = usable * blocks // one if blocks else 0
        if cache.kind == "state":
            stride = snapshot_stride(spec, block_size, dtype)
            unit = hit_unit(spec, block_size)
            count += least_snapshots(scheduler, transfers)
            pools.append(PoolSpec(cache=cache, block_size=unit, num_blocks=count, stride=stride))
        else:
            pools.append(PoolSpec(cache=cache, block_size=kind_block(cache, block_size), num_blocks=count))
    return tuple(pools)


def _too_small(
    num_bytes: int, needed: int, max_model_len: int, longest: int, live: int, scheduler: SchedulerSection
) -> ConfigError:
    """Return the error for too little cache memory, with every change that would help.

    ``needed``: bytes for one sequence of ``max_model_len``. ``live``: the part of ``needed`` for the states
    of all slots. ``longest``: the max_model_len that fits into ``num_bytes``, or 0.
    """
    ways = [f"set --kv-cache-memory to at least {show_bytes(needed)}"]
    if longest:
        ways.append(f"--max-model-len to at most {longest}")
    if live:
        slots = scheduler.max_num_seqs * max(scheduler.steps_in_flight, 1)
        over = -(-(needed - num_bytes) * (slots + 1) // live)  # number of slots to remove
        fewer = (slots - over) // max(scheduler.steps_in_flight, 1)
        ways += [f"--max-num-seqs to at most {fewer}"] if fewer >= 1 else []
    states = ""
    if live:
        seqs = scheduler.max_num_seqs
        states = f", {show_bytes(live)} of it recurrent state of --max-num-seqs {seqs} sequences,"
    return ConfigError(
        f"one sequence of --max-model-len {max_model_len} needs {show_bytes(needed)} of KV "
        f"cache{states} and {show_bytes(max(num_bytes, 0))} are available: {', or '.join(ways)}",
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
    transfers: bool = False,
) -> int:
    """Return the largest max_model_len up to ``most`` for one sequence in ``num_bytes``; 0 if none fits."""
    low = 0
    high = most
    # Binary search: the need grows with the length.
    while low < high:
        middle = (low + high + 1) // 2
        needed = bytes_for(spec, block_size, dtype, 1, middle, scheduler, copies=copies, transfers=transfers)
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
    """Return the estimated bytes of a rank's share of the parameters, without norms, biases and channel
    scales. A draft model counts, too.

    ``redundant``: extra copies of experts over all ranks. ``quantization`` applies to the matrices of layers
    and experts. With any quantization, output heads (and tables used as output heads) have 8 bits; other
    tables and routers keep their type. ``packed``: True if matrices published in quantized form stay
    quantized.
    """
    size = DTYPE_BYTES[dtype]
    other = spec.draft
    draft = 0 if other is None else weight_bytes(other, dtype, quantization, layout, packed=packed)
    spec = local_spec(spec, layout)
    matrices = (spec.layers - recurrent_layers(spec)) * _attention_elements(spec)
    matrices += recurrent_elements(spec) + latent_elements(spec) + layer_elements(spec)
    dense = dense_elements(spec)
    routers = routed = 0
    feeding = spec.layers - len(spec.bare_layers)
    if spec.counted:
        matrices, routed = counted_elements(spec, layout, redundant)
    elif spec.moe is None:
        matrices += feeding * dense
    else:
        moe = spec.moe
        routing = len(spec.moe.layers)
        matrices += (feeding if moe.beside else feeding - routing) * dense
        # Expert parallelism divides whole experts over all ranks; otherwise each expert is divided.
        experts = -(-(moe.experts + redundant) // layout.ranks) if layout.expert else moe.experts
        each = 3 if moe.gated else 2
        matrices += routing * each * spec.hidden * moe.shared
        routed = routing * each * (moe.latent or spec.hidden) * experts * moe.intermediate
        routers = routing * moe.experts * spec.hidden * max(4, size)
    table = -(-spec.vocab_size // layout.tensor) * spec.hidden
    head = table * (size if quantization == "none" else 1)
    more = input_table_elements(spec, layout.tensor) * size
    embeddings = more + (head if spec.tied else table * size + head * spec.head)
    tower = 0 if spec.vision is None else tower_bytes(spec.vision, dtype)
    # Bits per element of the matrices. A checkpoint's own quantization counts only without --quantization.
    bits = expert_bits = _BITS.get(quantization, 8.0 * size)
    if packed and quantization == "none" and spec.quantized is not None:
        bits = spec.quantized.bits or bits
        expert_bits = spec.quantized.expert_bits or bits
    return int((matrices * bits + routed * expert_bits) / 8) + routers + embeddings + tower + draft


_BITS = {
    "int8": 8.0,
    "w8a8": 8.0,
    "int4": 4 + 40 / 64,
    "w4a8": 4 + 40 / 64,
    "fp8": 8 + 32 / 128,
    "w8a8-fp8": 8.25,
}
"""Bits per element, with the element's share of the scales."""


def tower_bytes(vision: VisionSpec, dtype: str) -> int:
    """Return the bytes of a vision tower's parameters, without norms and biases.

    Every rank has the whole tower.
    """
    joined = vision.hidden * vision.media.merge**2
    blocks = vision.layers * vision.hidden * (4 * vision.hidden + (2 + vision.gated) * vision.intermediate)
    mergers = (1 + len(vision.levels)) * joined * (joined + vision.output)
    patch = 3 * vision.media.temporal * vision.media.patch**2 + vision.side**2
    return (vision.parameters or blocks + mergers + patch * vision.hidden) * DTYPE_BYTES[dtype]


def _attention_elements(spec: ModelSpec) -> int:
    """Return the parameters of one attention layer; the mean if layers differ."""
    mla = spec.mla
    if spec.sparse is not None:
        return _sparse_elements(spec, spec.sparse)
    if mla is None:
        return grouped_elements(spec)
    queries = spec.heads * (mla.nope + mla.rope)
    inputs = spec.hidden + queries if mla.q_lora else queries
    return (
        (mla.q_lora or spec.hidden) * inputs
        + spec.hidden * (mla.kv_lora + mla.rope)
        + spec.heads * (mla.nope + mla.v) * mla.kv_lora
        + spec.hidden * spec.heads * (mla.v + mla.head_gate)
    )


def _sparse_elements(spec: ModelSpec, sparse: SparseSpec) -> int:
    """Return the mean number of parameters of a sparse attention layer."""
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
    """Return an upper estimate of the bytes of intermediate results in the largest step.

    The estimate serves the first division of memory, before weights are loaded.
    """
    tokens = scheduler.max_num_batched_tokens
    wide = 3 * spec.intermediate * (2 if spec.layer.double else 1)
    if (moe := spec.moe) is not None:
        # Every chosen expert has a row of results before the sum.
        each = moe.top_k * (3 * moe.intermediate + (moe.latent or spec.hidden))
        wide = max(wide, each + 3 * moe.shared)
    size = max([spec.head_dim, *(cache.head_dim for cache in spec.caches)])
    inner = 2 * size * (spec.heads + spec.kv_heads)
    inner = max(inner, recurrent_row(spec))
    # The inputs of all layers exist three times: rows of the table, their projection, and the sum.
    inputs = 3 * spec.layers * spec.layer.inputs
    row = inputs + 4 * spec.hidden + inner + _sparse_row(spec, DTYPE_BYTES[dtype]) + wide
    if spec.draft is not None and spec.draft.eagle is not None:
        # The streams of three layers, twice; the input of the head beside the states; the states of the head.
        row += 12 * spec.hidden
    if spec.wide_stream:
        row += 6 * spec.hidden  # the stream, its next sum and the norm, float32
    if spec.hyper is not None:
        row += 7 * spec.hyper.streams * spec.hidden  # the streams, and float32 copies
    tower = 0 if spec.vision is None else encoding_bytes(spec.vision, dtype)
    # Four float32 arrays of logits per sampled row.
    logits = scheduler.max_num_seqs * spec.vocab_size * 4 * 4
    logits += MAX_PROMPT_LOGITS * spec.vocab_size * DTYPE_BYTES[dtype]
    alone = mixer_elements(spec, tokens, scheduler.max_num_seqs) * max(4, DTYPE_BYTES[dtype])
    alone += _SCORES if _sparse_row(spec, 1) else 0
    return (tokens * row * DTYPE_BYTES[dtype] + logits) * scheduler.steps_in_flight + tower + alone


_SCORES = 2 * (4 << 22)
"""Bytes of an indexer's scores in memory at a time, with room for growth; independent of the context."""


def _sparse_row(spec: ModelSpec, size: int) -> int:
    """Return the elements of a token's intermediate results in a layer with an indexer, 0 without one.

    ``size``: bytes per element.
    """
    if spec.mla is not None and spec.index is not None:
        mla = spec.mla
        absorbed = spec.heads * (3 * mla.kv_lora + 2 * mla.rope)
        return absorbed + 3 * spec.index.heads * spec.index.dim + 8 * spec.index.top // size
    if spec.sparse is not None and "chosen" in spec.sparse.types:
        return 3 * spec.sparse.index_heads * spec.sparse.index_dim + 8 * spec.sparse.index_top // size
    return 0


def encoding_bytes(vision: VisionSpec, dtype: str, together: int = 0) -> int:
    """Return the bytes of intermediate results while images are encoded.

    The estimate covers the largest image alone, or ``together`` patches if that is more.
    """
    return _encoded(vision, dtype, max(vision.media.most_patches, together))


CAPTURED_PATCHES = 4096
"""Largest image that a CUDA graph encodes, in patches of one frame."""
CAPTURED_TOKENS = 1024
"""Largest captured embedding, in rows. A larger image computes long enough to hide its launches."""
CAPTURED_GROWTH = 2 * CAPTURED_PATCHES
"""Sum of the patches of the captured images that took new memory. Other captured images are no larger than an
earlier one, and their graphs fit into the memory of its graph."""


def captured_encoding_bytes(vision: VisionSpec, dtype: str) -> int:
    """Return the bytes of intermediate results in all CUDA graphs that encode images."""
    return _encoded(vision, dtype, CAPTURED_GROWTH)


def captured_buffer_bytes(vision: VisionSpec, dtype: str) -> int:
    """Return the bytes of the fixed buffers of these graphs: pixels and rows."""
    pixels = 3 * CAPTURED_PATCHES * vision.media.patch**2
    return pixels + (1 + len(vision.levels)) * CAPTURED_TOKENS * vision.output * DTYPE_BYTES[dtype]


def _encoded(vision: VisionSpec, dtype: str, patches: int) -> int:
    """Return the bytes of intermediate results while ``patches`` patches are encoded."""
    media = vision.media
    size = DTYPE_BYTES[dtype]
    wide = max(4, size)
    # In colours, again cut into patches, and indices of a colour.
    colours = 3 * media.temporal * media.patch**2
    pixels = 2 * colours * size + 4 * colours // 3
    # The stream, and learned positions: a sum, an entry of the table, and the products of up to 16 entries.
    learned = vision.hidden * (2 * size + 3 * wide) + 16 * 2 * (8 + wide)
    # The stream and q, k and v. Queries and keys are rotated in float32; transformers copies the stream into
    # windows, too.
    rotated = vision.hidden * (6 * size + 6 * wide + (4 * size if vision.settings else 0))
    fed = (4 * vision.hidden + (2 + vision.gated) * vision.intermediate) * size
    # Places (integers of 8 bytes) and angles of the patches.
    angles = 2 * wide * vision.hidden // vision.heads + 192
    return patches * (angles + max(pixels, learned, rotated, fed))
