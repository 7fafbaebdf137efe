"""The scheduler interface of an engine, and the choice of the scheduler by role."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from weft.common.errors import ErrorInfo
from weft.config.resolved import EngineConfig, KVConfig
from weft.engine.disagg.transfer_ends import TransferScheduler
from weft.kv.prefix_log import PrefixLog
from weft.scheduler.constraints import TokenMatcher
from weft.scheduler.encode.encode_scheduler import EncodeScheduler
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.scheduler import Scheduler
from weft.types.messages import EngineStats, Submit, TokenEvent
from weft.types.plan import StepPlan, StepResult, TokenMasks

REMEMBERED_BYTES = 64 << 20
"""Maximum bytes of earlier prompts kept to explain prefix cache misses."""


class StepScheduler(TransferScheduler, Protocol):
    """The methods of ``weft.scheduler.Scheduler`` for an engine and the engine's sources. See there."""

    @property
    def embeddings(self) -> TransferScheduler | None: ...

    @property
    def blocked(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def add(
        self, submit: Submit, now: float, blocked: bool = False, until: float | None = None
    ) -> list[TokenEvent]: ...

    def arrived(self, sequence: int) -> None: ...

    def constrain(self, sequence: int, matcher: TokenMatcher, end_ids: Iterable[int]) -> list[TokenEvent]: ...

    def fail(self, sequence: int, error: ErrorInfo) -> list[TokenEvent]: ...

    def finish(self, sequence: int) -> list[TokenEvent]: ...

    def expire(self, now: float) -> list[TokenEvent]: ...

    def lose(self) -> None: ...

    def requeue_all(self) -> list[TokenEvent]: ...

    def has_work(self) -> bool: ...

    def build(self, now: float) -> PlanBuilder | None: ...

    def idle(self) -> PlanBuilder: ...

    def freeze(self, builder: PlanBuilder) -> StepPlan: ...

    def admitted(self, plan: StepPlan) -> list[int]: ...

    def masks(self, plan: StepPlan) -> TokenMasks: ...

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]: ...

    def observe(self, plan: StepPlan, seconds: float, uncaptured: bool = False) -> None: ...

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None: ...

    def stats(self) -> EngineStats: ...


def make_scheduler(config: EngineConfig, kv: KVConfig) -> StepScheduler:
    """Return the scheduler for the group's role. ``kv``: the KV configuration of the group's ranks."""
    if config.transfer.role == "encode":
        assert kv.media is not None, "checked when the configuration was resolved"
        return EncodeScheduler(kv.media, config.scheduler, config.media.media_memory)
    return Scheduler(
        kv,
        config.scheduler,
        config.spec.vocab_size,
        config.speculation,
        config.transfer,
        0 if config.cache.explain_cache == "off" else REMEMBERED_BYTES,
        config.cache.session_retention,
        generates=config.spec.head,
        places=config.lora.max_loras,
        classifies=config.spec.classify is not None,
        routes=config.spec.routes,
    )
