"""Runs requests through a real engine in float64. All memory that must not be read is overwritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft.attention.registry import choose
from weft.config.families import load_spec
from weft.config.resolve import with_cache_dtype
from weft.config.resolved import EngineConfig, KVConfig, PoolSpec
from weft.config.sections.all import (
    CacheSection,
    MediaSection,
    ModelSection,
    RunnerSection,
    SchedulerSection,
    SpeculationSection,
)
from weft.config.sections.events_section import EventsSection
from weft.config.sections.lora_section import LoraSection
from weft.config.sizing.media_limits import media_limits
from weft.config.sizing.memory import hit_unit, kind_block
from weft.config.spec import ModelSpec
from weft.engine.core import EngineCore
from weft.engine.grammars import GrammarSource
from weft.engine.start import alone
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.parallel.launcher import Launcher
from weft.runner.graphs.graphs import GraphOptions
from weft.runner.runner import Runner
from weft.runner.step_handle import StepHandle
from weft.speculation.base import Drafter
from weft.types.messages import EngineStats, Submit, TokenEvent, ids_to_bytes
from weft.types.plan import StepPlan, StepResult, TokenMasks
from weft.types.sampling import TokenParams

BLOCK = 8
MAX_LEN = 96
CPU = torch.device("cpu")


def replaying(drafts: int) -> GraphOptions:
    """Return options that run steps and drafting through the fixed tensors of a capture, called again for
    a replay."""

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    return GraphOptions(max_rows=48, capture=capture, lazy=True, most_each=1 + drafts)


@cache
def model_of(folder: Path, mtp: int = 0, kv_cache_dtype: str = "auto") -> Decoder:
    spec = spec_of(folder, mtp, kv_cache_dtype)
    return load_model(str(folder), spec, torch.float64, CPU, progress=False)


def spec_of(folder: Path, mtp: int = 0, kv_cache_dtype: str = "auto") -> ModelSpec:
    section = CacheSection(kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]
    return with_cache_dtype(load_spec(str(folder), None, mtp=mtp), section)


class Recorder(Runner):
    """A runner that records plans, masks of steps, and the largest number of steps in flight."""

    plans: list[StepPlan]
    masks: list[tuple[StepPlan, TokenMasks]]
    in_flight: int
    deepest: int

    def forward(self, plan: StepPlan) -> StepHandle:
        if not hasattr(self, "plans"):
            self.plans, self.masks, self.in_flight, self.deepest = [], [], 0, 0
        self.plans.append(plan)
        self.in_flight += 1
        self.deepest = max(self.deepest, self.in_flight)
        return super().forward(plan)

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        if masks is not None:
            self.masks.append((handle.plan, masks))
        super().sample(handle, masks)

    def read(self, handle: StepHandle) -> StepResult:
        self.in_flight -= 1
        return super().read(handle)


def make_pools(spec: ModelSpec, blocks: int, window_blocks: int) -> tuple[PoolSpec, ...]:
    """Return pools with equal numbers of positions in every KV cache group, and snapshots at every
    boundary."""
    pools = []
    for one in spec.caches:
        size = hit_unit(spec, BLOCK) if one.kind == "state" else kind_block(one, BLOCK)
        count = (window_blocks if one.window else blocks) * BLOCK // size
        if one.kind == "state":
            count = 64
        pools.append(PoolSpec(cache=one, block_size=size, num_blocks=count))
    return tuple(pools)


def make_engine(
    folder: Path,
    *,
    blocks: int = 256,
    window_blocks: int | None = None,
    chunk: int = 0,
    depth: int = 1,
    policy: str = "mixed",
    caching: bool = True,
    max_num_seqs: int = 24,
    max_len: int = MAX_LEN,
    model: Decoder | None = None,
    speculation: SpeculationSection | None = None,
    drafter: Drafter | None = None,
    kv_cache_dtype: str = "auto",
    graphs: GraphOptions | None = None,
    launcher: Launcher | None = None,
    grammars: GrammarSource | None = None,
    media: MediaSection = MediaSection(),
    events: EventsSection = EventsSection(),
    lora: LoraSection = LoraSection(),
) -> tuple[EngineCore, Recorder]:
    """Return an engine with ``blocks`` blocks for each KV cache group, and caches full of NaN.

    Window groups get the needed blocks, or ``window_blocks``. ``drafter`` replaces the drafter of
    ``speculation``.
    """
    speculation = speculation or SpeculationSection()
    mtp = int(speculation.speculative_method == "mtp")
    spec = model.spec if model is not None else spec_of(folder, mtp, kv_cache_dtype)
    pools = make_pools(spec, blocks, window_blocks or max(blocks, 64))
    kv = KVConfig(
        pools=pools,
        block_size=BLOCK,
        enable_prefix_caching=caching,
        max_model_len=max_len,
        num_slots=max_num_seqs * depth,
        copies=1 + speculation.drafts,
        media=media_limits(spec, "float64", max_len, media),
    )
    scheduler = SchedulerSection(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=chunk,
        step_policy=policy,  # type: ignore[arg-type]
        steps_in_flight=depth,  # type: ignore[arg-type]
    )
    config = EngineConfig(
        model_path=str(folder),
        tokenizer_path=str(folder),
        served_names=("m",),
        spec=spec,
        dtype="float64",
        device="cpu",
        model=ModelSection(model=str(folder)),
        cache=CacheSection(block_size=BLOCK, enable_prefix_caching=caching),
        scheduler=scheduler,
        runner=RunnerSection(device="cpu"),
        kv=kv,
        speculation=speculation,
        media=media,
        events=events,
        lora=lora,
    )
    runner = Recorder(
        model or model_of(folder, mtp, kv_cache_dtype),
        choose("torch", spec, torch.float64, CPU, BLOCK),
        kv,
        vocab_size=spec.vocab_size,
        dtype=torch.float64,
        device=CPU,
        depth=depth,
        poison=True,
        step_timeout=60,
        speculation=speculation,
        graphs=graphs,
        launcher=launcher,
    )
    if drafter is not None:
        runner.drafter = drafter
    for tensor in (t for layer in runner.cache for tensors in layer.values() for t in tensors):
        tensor.fill_(float("nan"))
    return EngineCore(config, runner=alone(runner.kv, lambda kv: runner), grammars=grammars), runner


@dataclass
class Answer:
    """The output of one sequence."""

    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    num_cached: int = 0
    error: Any = None
    stop_id: int | None = None
    logprobs: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """(ids, values, rank) of each token with logprobs."""
    prompt_logprobs: list[tuple[Any, Any, Any]] = field(default_factory=list)
    accepted: int = 0
    rejected: int = 0
    embedding: bytes = b""

    def take(self, event: TokenEvent) -> None:
        """Add the content of ``event``."""
        self.tokens += event.token_ids
        self.num_cached = event.num_cached
        self.accepted += event.accepted
        self.rejected += event.rejected
        for columns, entries in (
            (event.logprobs, self.logprobs),
            (event.prompt_logprobs, self.prompt_logprobs),
        ):
            if columns is not None:
                ids, values, rank = columns.arrays()
                entries += zip(ids.tolist(), values.tolist(), rank.tolist(), strict=True)
        if event.finish is not None:
            self.ends.append(event.finish)
            self.error, self.stop_id = event.error, event.stop_id
            self.embedding = event.embedding


def submit(
    sequence: int, prompt: list[int], params: TokenParams, *, request: int, choice: int = 0, **more: Any
) -> Submit:
    return Submit(
        sequence=sequence,
        request=request,
        choice=choice,
        seed=1000 + request,
        prompt_ids=ids_to_bytes(prompt),
        params=params,
        **more,
    )


def run(
    engine: EngineCore,
    submits: list[list[Submit]],
    each_step: Callable[[int], list[TokenEvent]] | None = None,
    limit: int = 20_000,
) -> dict[int, Answer]:
    """Submit ``submits[i]`` before step i, run to the end, and check that nothing is left."""
    answers: dict[int, Answer] = {}

    def take(events: list[TokenEvent]) -> None:
        for event in events:
            answer = answers.setdefault(event.sequence, Answer())
            assert not answer.ends, "an event after the terminal one"
            answer.take(event)

    number = 0
    while number < len(submits) or engine.has_work() or engine.blocked:
        assert number < limit, "the engine does not come to an end"
        for one in submits[number] if number < len(submits) else []:
            answers[one.sequence] = Answer()
            take(engine.submit(one))
        if each_step is not None:
            take(each_step(number))
        take(engine.poll())
        if engine.has_work():
            take(engine.step())
        number += 1
    check_idle(engine)
    return answers


def check_idle(engine: EngineCore) -> EngineStats:
    """Check that pools and slots are back at their idle counts."""
    stats = engine.stats()
    kv = engine.runner.kv
    assert stats.free_blocks == tuple(pool.num_blocks for pool in kv.pools)
    assert stats.free_slots == kv.num_slots
    assert (stats.running, stats.waiting) == (0, 0)
    return stats
