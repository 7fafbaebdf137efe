"""``weft bench serve`` without the command line: one run of load against a server, and a report."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from weft.bench.client import Endpoint, ServerTarget, http_client, prepare
from weft.bench.load import Limits, LoadRun, run_load
from weft.bench.report import make_report
from weft.bench.schedule import LengthRange, Planned, random_plan
from weft.bench.workloads import Workload, prompts
from weft.common.client_tls import versioned_url
from weft.common.errors import WeftError

METRICS_S = 10.0
"""Seconds that a server gets to return its metrics."""
_UP = re.compile(r'^weft:engine_up\{[^}]*role="(\w+)"[^}]*\} 1\.0$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """All settings of a run."""

    url: str
    model: str | None = None
    endpoint: Endpoint = "completions"
    prompts: Literal["auto", "ids", "text"] = "auto"
    vocab_size: int = 16_384
    key: str | None = None
    limits: Limits
    rate: float | None = None
    burstiness: float = 1.0
    input_len: LengthRange = field(default_factory=lambda: LengthRange(256, 256))
    output_len: LengthRange = field(default_factory=lambda: LengthRange(64, 64))
    trace: Sequence[Planned] = ()
    workload: Workload | None = None
    repetition: int = 0
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    warmup: int = 1
    levels: dict[str, float] = field(default_factory=dict)
    progress: bool = True
    keep_alive: bool = True
    """True if requests share connections."""

    def plan(self) -> Iterator[Planned]:
        """Return the requests in sending order."""
        if self.trace:
            return iter(self.trace)
        if self.workload is not None:
            made = prompts(self.workload, self.repetition, self.vocab_size)
            output = self.workload.output_tokens
            return iter([Planned(None, len(ids), output, ids=ids) for ids in made])
        return random_plan(self.input_len, self.output_len, self.rate, self.burstiness, self.repetition)

    def facts(self, target: ServerTarget) -> dict[str, Any]:
        """Return the settings part of the report: name to value, None for unused settings."""
        return {
            "model": target.model,
            "endpoint": self.endpoint,
            "prompts": target.prompts,
            "workload": None if self.workload is None else self.workload.name,
            "trace_requests": len(self.trace) or None,
            "request_rate": self.rate,
            "burstiness": self.burstiness if self.rate is not None else None,
            "concurrency": self.limits.concurrency,
            "input_len": [self.input_len.low, self.input_len.high],
            "output_len": [self.output_len.low, self.output_len.high],
            "ignore_eos": self.ignore_eos,
            "repetition": self.repetition,
            "warmup": self.warmup,
            "keep_alive": self.keep_alive,
        }


def measure(asked: RunSettings) -> dict[str, Any]:
    """Run the load and return the report. Raise WeftError if the server can't be queried at all."""
    return asyncio.run(measure_async(asked))


async def measure_async(asked: RunSettings, title: str = "requests") -> dict[str, Any]:
    """Run ``measure`` inside a running event loop: warm up, send the load, and return the report.

    Raise WeftError if the server can't be queried or the warm-up fails.
    """
    base = versioned_url(asked.url, "--base-url")
    connections = None if asked.limits.concurrency is None else asked.limits.concurrency
    async with http_client(base, asked.key, connections, keep_alive=asked.keep_alive) as client:
        timeout = asked.limits.request_timeout
        # Ask the server before the clock starts: model, form of prompts, words per token.
        model, kind, words = await prepare(
            client, base, asked.model, asked.endpoint, asked.prompts, asked.vocab_size, timeout
        )
        target = ServerTarget(
            base_url=base,
            model=model,
            endpoint=asked.endpoint,
            prompts=kind,
            vocab_size=asked.vocab_size,
            words_per_token=words,
            ignore_eos=asked.ignore_eos,
            extra=asked.extra,
        )
        plan = _sendable(asked, target)
        if asked.warmup:
            await _warm_up(client, asked, target)
        key = f"load {asked.repetition}"
        run: LoadRun = await run_load(
            client, target, plan, asked.limits, key=key, title=title, progress=asked.progress
        )
        heads = await heads_by_role(client, base)
    return make_report(run, asked.levels, asked.facts(target), heads)


async def heads_by_role(client: httpx.AsyncClient, base: str) -> dict[str, int]:
    """Return role -> number of live engines, from the metrics of a Weft server; empty if unavailable."""
    try:
        async with asyncio.timeout(METRICS_S):
            answer = await client.get(f"{base.removesuffix('/v1')}/metrics")
    except (httpx.HTTPError, TimeoutError):
        return {}
    return dict(Counter(_UP.findall(answer.text))) if answer.status_code == 200 else {}


def _sendable(asked: RunSettings, target: ServerTarget) -> Iterator[Planned]:
    """Return the plan. Raise WeftError if the plan has token ids and the server takes none.

    A workload is sent as text of the same lengths instead.
    """
    plan = asked.plan()
    if target.prompts == "ids" and target.endpoint == "completions":
        return plan
    first = next(plan, None)
    if first is not None and first.ids is not None:
        if asked.workload is None:
            raise WeftError("the trace holds token ids, and this endpoint takes text only")
        # drop the ids: the client makes words of the same length for the server
        rest = itertools.chain([first], plan)
        return (dataclasses.replace(one, ids=None) for one in rest)
    return itertools.chain([] if first is None else [first], plan)


async def _warm_up(client: Any, asked: RunSettings, target: ServerTarget) -> None:
    """Send requests like the measured ones, all at once, and drop the records.

    Raise WeftError if all fail, KeyboardInterrupt after Ctrl-C.
    """
    like = next(asked.plan())
    planned = Planned(None, like.input_len, min(like.output_len, 16))
    count = asked.warmup
    # All warm-up requests run at once, but within the run's concurrency.
    limits = dataclasses.replace(
        asked.limits, requests=count, duration=None, concurrency=min(count, asked.limits.concurrency or count)
    )
    run = await run_load(
        client,
        target,
        itertools.repeat(planned, count),
        limits,
        key=f"warm-up {asked.repetition}",
        title="warm-up",
        progress=asked.progress,
    )
    if run.interrupted:
        raise KeyboardInterrupt
    failed = [record for record in run.records if record.outcome != "ok"]
    if len(failed) == len(run.records):
        raise WeftError(f"the warm-up failed: {failed[0].outcome}: {failed[0].message}")
