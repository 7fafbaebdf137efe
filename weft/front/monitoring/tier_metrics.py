"""Metrics of the KV disk tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weft.types.messages import EngineStats
from weft.types.tiers import TierStats

_Row = tuple[tuple[str, ...], float]
TIER = "disk"
"""Label of the whole tier, also of a host level."""
_GAUGES: dict[str, tuple[str, Callable[[TierStats], float]]] = {
    "kv_tier_bytes": ("Bytes in the folder of the KV tier, of all processes.", lambda s: s.nbytes),
    "kv_tier_blocks": ("KV cache blocks of the model in the KV tier.", lambda s: s.blocks),
    "kv_tier_off": (
        "1 while the KV tier is off after an error, or while the disk does not answer, else 0.",
        lambda s: s.off,
    ),
    "kv_tier_waiting": ("Sequences that wait for blocks of the KV tier.", lambda s: s.waiting),
    "kv_tier_blocks_on_hold": (
        "KV cache blocks pinned by copies to or from the KV tier.",
        lambda s: s.pinned,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[TierStats], float]]] = {
    "kv_load_bytes": ("Bytes requested from the KV tier, of one rank.", lambda s: s.load_bytes),
    "kv_load_seconds": (
        "Seconds for which sequences waited for blocks of the KV tier, summed.",
        lambda s: s.load_seconds,
    ),
    "kv_tier_evictions": ("Records that this process removed for room or for age.", lambda s: s.evictions),
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
    "kv_stores": ("Blocks stored in the KV tier, by reason.", "reason", lambda s: s.stores),
    "kv_stores_skipped": ("Blocks not stored in the KV tier, by reason.", "reason", lambda s: s.skipped),
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
    tiers: list[tuple[tuple[str, ...], TierStats]] = [
        ((*who, TIER), its.tier) for who, (_, its) in zip(roles, stats, strict=True) if its.tier
    ]
    common = ("head", "role", "tier")
    for gauge, table in ((True, _GAUGES), (False, _COUNTERS)):
        for name, (text, read) in table.items():
            yield TierFamily(gauge, name, text, [(who, float(read(one))) for who, one in tiers], common)
    for name, (text, label, parts) in _BY.items():
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
