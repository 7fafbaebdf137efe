"""A rank's share of the model: shares of heads and sizes, and the model spec of one rank.

Heads, and all sizes made of heads, are divided in rank order. If there are fewer KV heads than ranks, heads
are replicated: rank r has head ``r * kv_heads // ranks``. Intermediate sizes are divided evenly. The
vocabulary is divided in equal shares; the last shares may be short or empty. Latents, compressed entries and
indexers are whole on every rank. A ``ModelSpec`` describes the whole model, except for the result of
``local_spec``.
"""

from __future__ import annotations

import msgspec

from weft.common.errors import ConfigError
from weft.config.parts.mixers import MambaSpec
from weft.config.spec import CacheSpec, ModelSpec
from weft.types.layout import Layout


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (begin, end) of the share of rank ``rank`` in ``size`` items.

    The last shares may be short or empty.
    """
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def balanced_share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (begin, end) of the share of rank ``rank`` in ``size`` items. Shares differ by at most 1.

    The first ranks have the larger shares.
    """
    each, left = divmod(size, ranks)
    begin = rank * each + min(rank, left)
    return begin, begin + each + (rank < left)


def share_of_kv(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's KV heads: at least one head per rank."""
    if heads >= ranks:
        return share(heads, rank, ranks)
    # Fewer heads than ranks: ranks // heads neighbouring ranks share a replicated head.
    head = rank * heads // ranks
    return head, head + 1


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError with --tensor-parallel-size if the ranks do not divide all sizes of ``spec``."""
    ranks = layout.tensor
    problems = [f"{size} {what}" for what, size in _divided(spec, layout) if size % ranks]
    for kv in _kv_heads(spec):
        if kv % ranks and ranks % kv:
            problems.append(f"{kv} KV heads (nor do they divide it)")
    if problems:
        # The error lists smaller sizes that would work.
        works = [n for n in range(1, ranks) if _fits(spec, layout, n)]
        raise ConfigError(
            f"--tensor-parallel-size {ranks} does not divide the model's {' and '.join(problems)}; "
            f"{' or '.join(map(str, works))} would work",
            param="--tensor-parallel-size",
        )


def _fits(spec: ModelSpec, layout: Layout, ranks: int) -> bool:
    """Return True if ``ranks`` ranks divide the model evenly."""
    kv = all(heads % ranks == 0 or ranks % heads == 0 for heads in _kv_heads(spec))
    return kv and all(size % ranks == 0 for _, size in _divided(spec, layout))


def rank_counts(spec: ModelSpec) -> tuple[int, ...]:
    """Return the numbers of ranks, out of 2, 4 and 8, that can divide the model, with or without expert
    parallelism."""
    return tuple(ranks for ranks in (2, 4, 8) if _fits(spec, Layout(expert=True), ranks))


def _kv_heads(spec: ModelSpec) -> list[int]:
    """Return the different numbers of KV heads in KV cache groups."""
    return sorted({cache.kv_heads for cache in spec.caches if cache.kv_heads})


def _divided(spec: ModelSpec, layout: Layout) -> list[tuple[str, int]]:
    """Return (name, size) of everything that must be divided evenly."""
    found = [("attention heads", spec.heads)]
    if spec.layer.inputs:
        found.append(("dims of layer inputs", spec.layer.inputs))
    if spec.delta is not None:
        found += [("delta net key heads", spec.delta.k_heads), ("delta net value heads", spec.delta.v_heads)]
    if spec.conv is not None:
        found.append(("parts of the short convolution", spec.conv.heads))
    if spec.mamba is not None:
        found += [("Mamba heads", spec.mamba.heads), ("Mamba groups", spec.mamba.places)]
        # A single norm over all channels is summed over the ranks.
        if spec.mamba.norm != "none" and spec.mamba.norm_groups > 1:
            found.append(("norm groups of Mamba", spec.mamba.norm_groups))
    if spec.mamba1 is not None:
        found.append(("parts of the channels of Mamba", spec.mamba1.heads))
    if spec.sparse is not None:
        found.append(("groups of heads (o_groups)", spec.sparse.o_groups))
    routing = 0 if spec.moe is None or spec.moe.beside else len(spec.moe.layers)
    if routing + len(spec.bare_layers) < spec.layers + spec.mtp_layers:
        found.append(("intermediate size", spec.intermediate))
    if spec.moe is not None and not layout.expert:
        found.append(("expert intermediate size", spec.moe.intermediate))
        found.append(("shared expert size", spec.moe.shared))
    return found


def local_spec(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """Return the model spec of one rank: heads, sizes and caches of a share of ``layout.tensor``. Ranks are
    alike.

    Vocabulary, experts and everything that is whole on every rank stay unchanged, and so do expert sizes with
    ``layout.expert``. Raise ConfigError: see ``check``.
    """
    check(spec, layout)
    ranks = layout.tensor
    if ranks == 1:
        return spec
    if spec.draft is not None:
        spec = msgspec.structs.replace(spec, draft=local_spec(spec.draft, layout))
    moe = spec.moe
    delta = spec.delta
    sparse = spec.sparse
    # Without expert parallelism every rank has a slice of each expert.
    if moe is not None and not layout.expert:
        moe = msgspec.structs.replace(moe, intermediate=moe.intermediate // ranks, shared=moe.shared // ranks)
    if delta is not None:
        delta = msgspec.structs.replace(delta, k_heads=delta.k_heads // ranks, v_heads=delta.v_heads // ranks)
    conv = spec.conv
    if conv is not None:
        conv = msgspec.structs.replace(conv, heads=conv.heads // ranks)
    mamba1 = spec.mamba1
    if mamba1 is not None:
        mamba1 = msgspec.structs.replace(mamba1, heads=mamba1.heads // ranks)
    if sparse is not None:
        sparse = msgspec.structs.replace(sparse, o_groups=sparse.o_groups // ranks)
    return msgspec.structs.replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=max(spec.kv_heads // ranks, 1),
        intermediate=spec.intermediate // ranks,
        moe=moe,
        delta=delta,
        conv=conv,
        mamba=None if spec.mamba is None else _local_mamba(spec.mamba, ranks),
        mamba1=mamba1,
        sparse=sparse,
        counted=spec.counted_whole + (spec.counted - spec.counted_whole) // ranks,
        caches=tuple(_local_cache(cache, ranks) for cache in spec.caches),
    )


def _local_mamba(mamba: MambaSpec, ranks: int) -> MambaSpec:
    """Return the part of one rank: heads, groups and norm groups are divided; at least one group."""
    return msgspec.structs.replace(
        mamba,
        heads=mamba.heads // ranks,
        groups=max(mamba.groups // ranks, 1),
        norm_groups=max(mamba.norm_groups // ranks, 1),
    )


def _local_cache(cache: CacheSpec, ranks: int) -> CacheSpec:
    """Return the KV cache group of one rank: KV heads and the first dim of state parts are divided; at least
    one head.
    """
    # The first dim of every part of a state counts heads.
    parts = tuple(
        msgspec.structs.replace(part, shape=(part.shape[0] // ranks, *part.shape[1:])) for part in cache.parts
    )
    kv_heads = max(cache.kv_heads // ranks, 1) if cache.kv_heads else 0
    return msgspec.structs.replace(cache, parts=parts, kv_heads=kv_heads)
