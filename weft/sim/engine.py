"""One engine on virtual time, with a device that only takes time.

The ``Scheduler`` and the step loop are the product's code. Virtual time jumps from event to event, so that a
run costs only the real time of the scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.common.clock import VirtualClock
from weft.common.errors import ConfigError, Overloaded
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.sections.all import SchedulerSection, SpeculationSection
from weft.config.spec import CacheSpec
from weft.scheduler import Scheduler
from weft.scheduler.policy.step_cost import CostModel
from weft.sim.device import FakeDevice, FakeRanks
from weft.sim.latency_report import Latency, Report, Stream, gaps, prompt_window, rate
from weft.sim.simulated_store import SimulatedStore, StoreCosts, StoreLoop
from weft.sim.workload import Arrival, Prompts, in_order
from weft.types.messages import Submit, TokenEvent, ids_to_bytes
from weft.types.sampling import TokenParams

VOCABULARY = 32000
CACHE_DTYPE = "bfloat16"
"""Type of the cache's entries. Only a KV tier uses the type."""

Progress = Callable[[int, int, float], None]
"""Called repeatedly with (requests done or refused, requests, virtual seconds)."""


def kv_config(
    section: SchedulerSection,
    max_model_len: int,
    *,
    tokens: int = 0,
    block_size: int = 64,
    caching: bool = True,
    drafts: int = 0,
    token_bytes: int = 4,
) -> KVConfig:
    """Return a cache of one pool of full attention with ``tokens`` positions; 0 for the largest possible
    need.

    ``drafts`` is the maximum number of drafts of a sequence in a step. ``token_bytes``: bytes of one position
    in ``CACHE_DTYPE``, rounded up to 4.
    """
    each = -(-max_model_len // block_size)
    blocks = tokens // block_size if tokens else each * section.max_num_seqs
    cache = CacheSpec(kind="full", layers=(0,), kv_heads=1, head_dim=-(-token_bytes // 4))
    return KVConfig(
        pools=(PoolSpec(cache=cache, block_size=block_size, num_blocks=blocks),),
        block_size=block_size,
        enable_prefix_caching=caching,
        max_model_len=max_model_len,
        num_slots=section.max_num_seqs * depth_of(section),
        copies=1 + drafts,
    )


def depth_of(section: SchedulerSection) -> int:
    """Return the number of steps in flight; 1 (as on a CPU) if the settings leave the number open."""
    return section.steps_in_flight or 1


class Simulation:
    """One run of one workload. Raises ConfigError for requests longer than the maximum model length."""

    def __init__(
        self,
        kv: KVConfig,
        section: SchedulerSection,
        cost: CostModel,
        arrivals: Sequence[Arrival],
        *,
        seed: int = 0,
        noise: float = 0.0,
        host: float = 0.0,
        shared: int = 0,
        speculation: SpeculationSection | None = None,
        acceptance: float = 1.0,
        retention: float = 0.0,
        device: FakeDevice | None = None,
        levels: Sequence[StoreCosts] = (),
    ) -> None:
        """Build the run. Raises ConfigError for requests longer than the maximum model length.

        ``host``: seconds for planning and committing one step; a device with one step in flight idles
        meanwhile. ``shared``: leading prompt tokens common to all requests. ``acceptance``: see
        ``FakeDevice``. ``retention``: session retention in seconds. ``device`` replaces the fake device.
        ``levels``: levels of a KV tier, the fastest first; () without a tier.
        """
        longest = max((a.prompt + max(a.output, a.restart_output) for a in arrivals), default=0)
        if longest > kv.max_model_len:
            raise ConfigError(
                f"the longest request has {longest} tokens, output included, and --max-model-len is "
                f"{kv.max_model_len}: raise --max-model-len, or lower --prompt-tokens or --output-tokens",
                param="--max-model-len",
            )
        self.clock = VirtualClock()
        self.scheduler = Scheduler(kv, section, VOCABULARY, speculation, retention=retention)
        self.device = device or FakeDevice(cost, VOCABULARY, noise, seed, acceptance)
        self.streams: list[Stream] = []
        self.refused = 0
        self.ended = 0
        """Number of requests done; background sequences are not counted."""
        self._depth = depth_of(section)
        ranks = FakeRanks(self.device, self.clock, host)
        self._loop = StoreLoop(self.scheduler, ranks, self.clock, self._depth)
        self.store: SimulatedStore | None = None
        if levels:
            loads = self.scheduler.use_tier(CACHE_DTYPE, levels[0].mode)
            self.store = SimulatedStore(loads, levels, self.clock)
            self._loop.store, self._loop.sources = self.store, [self.store]
        self._arrivals = deque(in_order(arrivals))
        self._requests = sum(not a.background for a in arrivals)
        self._prompts = Prompts(VOCABULARY, shared, seed)
        self._retries: list[Arrival] = []
        """Background sequences refused by a full queue, to be submitted again."""
        self._began = time.perf_counter()

    @property
    def finished(self) -> bool:
        """True if only background sequences are left to run."""
        gone = self.ended + self.refused >= self._requests
        return gone and (self._requests > 0 or not self.has_work())

    def run(self, most_seconds: float = float("inf"), progress: Progress | None = None) -> Report:
        """Run until every request has ended, or until ``most_seconds`` of virtual time. Return the report.

        Background sequences need not end. Raise ConfigError if the run would never end.
        """
        if not self._requests and self._arrivals and most_seconds == float("inf"):
            raise ConfigError("background sequences alone run for ever: give requests or a number of seconds")
        turns, more = 0, 2 + 2 * self._depth if self._requests else 0
        while (not self.finished or more) and self.clock.now() < most_seconds and self.has_work():
            more -= self.finished  # after the last request, background sequences get one more token
            self.turn()
            turns += 1
            if progress is not None and turns % 64 == 0:
                progress(self.ended + self.refused, self._requests, self.clock.now())
        if progress is not None:
            progress(self.ended + self.refused, self._requests, self.clock.now())
        return self.report()

    def has_work(self) -> bool:
        """Return True if anything runs, waits or will arrive."""
        return bool(self._arrivals or self._retries or self._loop.has_work() or self._loop.blocked)

    def turn(self) -> None:
        """Submit arrivals and run one step, or move the clock to the next arrival or tier report."""
        self._take_arrivals(self.clock.now())
        if self._loop.has_work():
            self._record(self._loop.step())
            return
        events: list[TokenEvent] = []
        next_at = self._arrivals[0].at if self._arrivals else float("inf")
        if self._loop.wait_for_store(next_at, events):
            self._record(events)
        elif self._arrivals:
            self.clock.advance_to(next_at)

    def report(self) -> Report:
        """Return the results so far."""
        requests = [s for s in self.streams if not s.arrival.background]
        beside = [s for s in self.streams if s.arrival.background]
        # The prompt window runs from the first arrival to the last first token. Requests disturb background
        # sequences only within the window.
        begin, end = prompt_window(requests)
        stats, now = self.scheduler.stats(), self.clock.now()
        started = [s for s in requests if s.times]
        return Report(
            seconds=now,
            requests=self._requests,
            done=sum(s.done for s in requests),
            refused=self.refused,
            ttft=Latency.of([s.times[0] - s.arrival.at for s in started]),
            itl=Latency.of(gaps(requests)),
            background_itl=Latency.of(gaps(beside, begin, end)) if requests else Latency.of(gaps(beside)),
            quiet_itl=Latency.of(gaps(beside, begin / 2, begin)),
            prompt_rate=rate(sum(s.arrival.prompt for s in started), end - begin),
            output_rate=rate(sum(len(s.times) for s in self.streams), now),
            steps=stats.steps,
            mixed_steps=stats.mixed_steps,
            preemptions=stats.preemptions,
            prefix_hits=stats.prefix_hits,
            drafts=sum(stats.drafts),
            drafts_accepted=sum(stats.drafts_accepted),
            device_share=min(self.device.busy / now, 1.0) if now > 0 else 0.0,
            wall_seconds=time.perf_counter() - self._began,
        )

    def _take_arrivals(self, now: float) -> None:
        """Submit the refused background sequences again, and all requests due by ``now``."""
        again, self._retries = self._retries, []
        for arrival in again:
            self._submit(arrival)
        while self._arrivals and self._arrivals[0].at <= now:
            self._submit(self._arrivals.popleft())

    def _submit(self, arrival: Arrival) -> None:
        """Submit a request.

        With a full queue, count the request as refused, or retry a background sequence later.
        """
        submit = self._submit_of(len(self.streams), arrival)
        try:
            events = self._loop.submit(submit)
        except Overloaded:
            if arrival.background:
                self._retries.append(arrival)
            else:
                self.refused += 1
            return
        self.streams.append(Stream(arrival))
        self._record(events)

    def _submit_of(self, number: int, arrival: Arrival) -> Submit:
        """Return the Submit of sequence ``number``. Call once per sequence: the call draws the random
        prompt."""
        return Submit(
            sequence=number,
            request=number,
            seed=number,
            prompt_ids=ids_to_bytes(self._prompts.make(arrival.prompt)),
            params=TokenParams(max_tokens=arrival.output),
            priority=-1 if arrival.background else 0,
        )

    def _record(self, events: list[TokenEvent]) -> None:
        """Record the times of tokens and the ends of sequences."""
        now = self.clock.now()
        for event in events:
            stream = self.streams[event.sequence]
            stream.times += [now] * len(event.token_ids)
            if event.finish is not None:
                stream.finish = event.finish
                self._end(stream.arrival)

    def _end(self, arrival: Arrival) -> None:
        if arrival.background:
            self._submit(replace(arrival, at=self.clock.now(), output=arrival.restart_output))
        else:
            self.ended += 1


def simulate(
    kv: KVConfig,
    section: SchedulerSection,
    cost: CostModel,
    arrivals: Sequence[Arrival],
    *,
    most_seconds: float = float("inf"),
    progress: Progress | None = None,
    seed: int = 0,
    noise: float = 0.0,
    host: float = 0.0,
    shared: int = 0,
    speculation: SpeculationSection | None = None,
    acceptance: float = 1.0,
) -> Report:
    """Run a workload to the end and return the report; see ``Simulation``. Raise ConfigError."""
    simulation = Simulation(
        kv,
        section,
        cost,
        arrivals,
        seed=seed,
        noise=noise,
        host=host,
        shared=shared,
        speculation=speculation,
        acceptance=acceptance,
    )
    return simulation.run(most_seconds, progress)
