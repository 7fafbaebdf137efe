"""Creates the KV tier of an engine process."""

from __future__ import annotations

from weft.common.clock import Clock
from weft.config.resolved import EngineConfig
from weft.config.sizing.tier import write_rate
from weft.engine.group import GroupExecutor
from weft.engine.tiers.engine_tier import EngineTier
from weft.scheduler.scheduler import Scheduler


def make_engine_tier(
    config: EngineConfig, scheduler: object, group: GroupExecutor, clock: Clock
) -> EngineTier | None:
    """Return the KV tier of an engine process, and attach the tier to the scheduler. None without a tier."""
    if group.tier is None or not isinstance(scheduler, Scheduler):
        return None
    loads = scheduler.use_tier(config.dtype, config.tier.kv_store, write_rate(config.tier))
    return EngineTier(loads, group.tier, clock)
