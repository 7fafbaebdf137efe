"""Metrics of the KV tier. The label ``tier`` is the level, or ``all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from weft.types.messages import EngineStats
from weft.types.tiers import LevelStats, TierStats

_Row = tuple[tuple[str, ...], float]
_Stats = TypeVar("_Stats")
ALL = "all"
"""Label of numbers that belong to no single level."""
_GAUGES: dict[str, tuple[str, Callable[[TierStats], float]]] = {
    "kv_tier_waiting": ("Sequences that wait for blocks of the KV tier.", lambda s: s.waiting),
    "kv_tier_blocks_on_hold": (
        "KV cache blocks pinned by copies to or from the KV tier.",
        lambda s: s.pinned,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[TierStats], float]]] = {
    "kv_load_seconds": (
        "Seconds for which sequences waited for blocks of the KV tier, summed.",
        lambda s: s.load_seconds,
    ),
    "prompt_tokens_saved": (
        "Prompt tokens that were not computed because of the KV tier.",
        lambda s: s.saved_tokens,
    ),
}
_BY: dict[str, tuple[str, str, Callable[[TierStats], Mapping[str, int]]]] = {
    "kv_loads": (
        "Prompts with blocks in the KV tier, by the outcome of the load.",
        "outcome",
        lambda s: s.loads,
    ),
    "kv_stores_skipped": ("Blocks not stored in the KV tier, by reason.", "reason", lambda s: s.skipped),
}
_LEVEL_GAUGES: dict[str, tuple[str, Callable[[LevelStats], float]]] = {
    "kv_tier_bytes": (
        "Bytes in a level of the KV tier: of the disk all bytes in the folder, of all processes.",
        lambda s: s.nbytes,
    ),
    "kv_tier_blocks": ("KV cache blocks of the model in a level of the KV tier.", lambda s: s.blocks),
    "kv_tier_off": ("1 while a level of the KV tier is off or does not answer, else 0.", lambda s: s.away),
}
_LEVEL_COUNTERS: dict[str, tuple[str, Callable[[LevelStats], float]]] = {
    "kv_load_bytes": ("Bytes requested from a level of the KV tier, of one rank.", lambda s: s.load_bytes),
    "kv_loaded_blocks": ("KV cache blocks loaded from a level of the KV tier.", lambda s: s.loaded),
    "kv_tier_corrupt": ("Records of a level of the KV tier with a wrong digest.", lambda s: s.corrupt),
    "kv_tier_evictions": (
        "Records that this process removed from a level for room or for age.",
        lambda s: s.evicted + s.expired,
    ),
}
_LEVEL_BY: dict[str, tuple[str, str, Callable[[LevelStats], Mapping[str, int]]]] = {
    "kv_stores": ("Blocks stored in a level of the KV tier, by reason.", "reason", lambda s: s.stores),
}


class TierFamily(NamedTuple):
    """One metric of the tier."""

    gauge: bool
    name: str
    text: str
    rows: Iterable[_Row]
    labels: tuple[str, ...]


def tier_families(
    roles: Sequence[tuple[str, str]], stats: Sequence[tuple[str, EngineStats]]
) -> Iterator[TierFamily]:
    """Yield every metric. ``roles``: (name, role) of each engine process. ``stats``: (name, counters) in the
    same order. Engine processes without a tier have no rows."""
    each = [(who, its.tier) for who, (_, its) in zip(roles, stats, strict=True) if its.tier]
    tiers = [((*who, ALL), one) for who, one in each]
    levels = [((*who, level), found) for who, one in each for level, found in one.levels.items()]
    # A tier that is off as a whole reports no level.
    off = [((*who, ALL), float(one.off)) for who, one in each]
    for family in _families(levels, _LEVEL_GAUGES, _LEVEL_COUNTERS, _LEVEL_BY):
        more = off if family.name == "kv_tier_off" else []
        yield family._replace(rows=[*family.rows, *more])
    yield from _families(tiers, _GAUGES, _COUNTERS, _BY)


def _families(
    tiers: Sequence[tuple[tuple[str, ...], _Stats]],
    gauges: Mapping[str, tuple[str, Callable[[_Stats], float]]],
    counters: Mapping[str, tuple[str, Callable[[_Stats], float]]],
    by: Mapping[str, tuple[str, str, Callable[[_Stats], Mapping[str, int]]]],
) -> Iterator[TierFamily]:
    """Yield the metrics of one kind of statistics. ``tiers``: (labels, statistics)."""
    common = ("head", "role", "tier")
    for gauge, table in ((True, gauges), (False, counters)):
        for name, (text, read) in table.items():
            yield TierFamily(gauge, name, text, [(who, float(read(one))) for who, one in tiers], common)
    for name, (text, label, parts) in by.items():
        rows = [((*who, part), float(n)) for who, one in tiers for part, n in sorted(parts(one).items())]
        yield TierFamily(False, name, text, rows, (*common, label))


def describe() -> list[str]:
    """Return one line per metric: name, type, labels."""
    return [
        f"weft:{one.name} gauge model_name,{','.join(one.labels)}"
        if one.gauge
        else f"weft:{one.name}_total counter model_name,{','.join(one.labels)}"
        for one in tier_families((), ())
    ]
