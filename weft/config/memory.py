"""How much memory a model and its KV cache need, and how a number of bytes becomes block pools.

A pool is worth its weakest kind, so bytes are divided in proportion to what one sequence of
``max_model_len`` needs of each: every kind can then hold the same number of such sequences. Each pool has
one block more than it gives out, the null block; it is paid for here.
"""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.resolved import PoolSpec
from weft.config.sections import SchedulerSection
from weft.config.spec import DTYPE_BYTES, CacheSpec, ModelSpec
from weft.types.plan import MAX_PROMPT_LOGITS

GIB = 1 << 30


def show_bytes(count: int) -> str:
    """``count`` as a value for --kv-cache-memory that is not smaller: ``3M``, ``12G``."""
    for unit, scale in (("G", GIB), ("M", 1 << 20), ("K", 1 << 10)):
        if count >= 10 * scale or (count >= scale and count % scale == 0):
            return f"{-(-count // scale)}{unit}"
    return str(count)


def blocks_for_one(cache: CacheSpec, block_size: int, max_model_len: int, scheduler: SchedulerSection) -> int:
    """Blocks of one kind that a sequence of ``max_model_len`` alone needs at most, whatever its chunks."""
    full = -(-max_model_len // block_size)
    if cache.kind == "full":
        return full
    # Positions held at once: those that the first token of a chunk sees, and the chunk. They need not begin
    # at a block's border, so they can touch one block more.
    return min(full, -(-(cache.window - 1 + longest_chunk(scheduler, max_model_len)) // block_size) + 1)


def longest_chunk(scheduler: SchedulerSection, max_model_len: int) -> int:
    """Most tokens that one sequence computes in one step."""
    chunk = min(scheduler.max_num_batched_tokens, max_model_len)
    return min(chunk, scheduler.long_prefill_token_threshold or chunk)


def bytes_for(
    spec: ModelSpec,
    block_size: int,
    dtype: str,
    sequences: int,
    max_model_len: int,
    scheduler: SchedulerSection,
) -> int:
    """Cache bytes for ``sequences`` of ``max_model_len`` in every kind, null blocks included."""
    return sum(
        (blocks_for_one(cache, block_size, max_model_len, scheduler) * sequences + 1)
        * cache.block_bytes(block_size, dtype)
        for cache in spec.caches
    )


def pools_for(
    spec: ModelSpec,
    block_size: int,
    dtype: str,
    num_bytes: int,
    max_model_len: int,
    scheduler: SchedulerSection,
) -> tuple[PoolSpec, ...]:
    """The pools that ``num_bytes`` of cache make, one for each kind of ``spec``.

    Raises ConfigError naming --max-model-len and --kv-cache-memory, with values that would work, unless
    every kind can hold one sequence of ``max_model_len``.
    """
    need = [blocks_for_one(cache, block_size, max_model_len, scheduler) for cache in spec.caches]
    sizes = [cache.block_bytes(block_size, dtype) for cache in spec.caches]
    one = sum(blocks * size for blocks, size in zip(need, sizes, strict=True))
    usable = num_bytes - sum(sizes)
    if usable < one:
        fits = longest_that_fits(spec, block_size, dtype, num_bytes, max_model_len, scheduler)
        shorter = f", or --max-model-len to at most {fits}" if fits else ""
        needed = show_bytes(one + sum(sizes))
        raise ConfigError(
            f"one sequence of --max-model-len {max_model_len} needs {needed} of KV cache and there are "
            f"{show_bytes(max(num_bytes, 0))}: set --kv-cache-memory to at least {needed}{shorter}",
            param="--max-model-len",
        )
    return tuple(
        PoolSpec(cache=cache, block_size=block_size, num_blocks=usable * blocks // one)
        for cache, blocks in zip(spec.caches, need, strict=True)
    )


def longest_that_fits(
    spec: ModelSpec, block_size: int, dtype: str, num_bytes: int, most: int, scheduler: SchedulerSection
) -> int:
    """The largest max_model_len up to ``most`` of which ``num_bytes`` hold one sequence; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_for(spec, block_size, dtype, 1, middle, scheduler) <= num_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the model's parameters (an estimate: norms and biases are left out)."""
    attention = _attention_elements(spec)
    dense = 3 * spec.hidden * spec.intermediate
    routed = 0
    routing: tuple[int, ...] = ()
    if spec.moe is not None:
        routing = spec.moe.layers
        routed = spec.moe.experts * (3 * spec.hidden * spec.moe.intermediate + spec.hidden)
    layers = spec.layers * attention + (spec.layers - len(routing)) * dense + len(routing) * routed
    embeddings = spec.vocab_size * spec.hidden * (1 if spec.tied else 2)
    return (layers + embeddings) * DTYPE_BYTES[dtype]


def _attention_elements(spec: ModelSpec) -> int:
    mla = spec.mla
    if mla is None:
        return spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    queries = spec.heads * (mla.nope + mla.rope)
    inputs = spec.hidden + queries if mla.q_lora else queries
    return (
        (mla.q_lora or spec.hidden) * inputs
        + spec.hidden * (mla.kv_lora + mla.rope)
        + spec.heads * (mla.nope + mla.v) * mla.kv_lora
        + spec.hidden * spec.heads * mla.v
    )


def activation_bytes(spec: ModelSpec, dtype: str, scheduler: SchedulerSection) -> int:
    """Bytes of the largest step's intermediate results (an upper estimate, to divide memory at first)."""
    tokens = scheduler.max_num_batched_tokens
    wide = max(spec.intermediate, spec.moe.intermediate * spec.moe.top_k if spec.moe else 0)
    row = 4 * spec.hidden + 2 * spec.head_dim * (spec.heads + spec.kv_heads) + 3 * wide
    logits = scheduler.max_num_seqs * spec.vocab_size * 4 * 4
    logits += MAX_PROMPT_LOGITS * spec.vocab_size * DTYPE_BYTES[dtype]
    return (tokens * row * DTYPE_BYTES[dtype] + logits) * scheduler.steps_in_flight
