"""The engine of one group: ``weft.engine.loop`` over the ranks of the group.

The engine adds to the loop

    _agree    balance, overlap and the expert-parallel group set fields of each step before the freeze
    _learn    records the seconds of encoding and the times of communication
    sources   external input: grammars, transfers, ends of steps, adapters, weights, a KV tier
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from weft.common.clock import Clock, SystemClock
from weft.common.errors import InvalidRequest
from weft.common.log import get_logger
from weft.config.fingerprint import fingerprint, tower_fingerprint
from weft.config.resolved import EngineConfig
from weft.engine.adapters import EngineAdapters
from weft.engine.cpu_threads import take_threads
from weft.engine.event_sources import sources_of
from weft.engine.expert_group import ExpertGroup
from weft.engine.grammars import GrammarSource, ModelGrammars
from weft.engine.group import GroupExecutor
from weft.engine.kv_events import start_kv_events
from weft.engine.loop import EngineLoop, InFlight
from weft.engine.ranks.processes import start_receiver
from weft.engine.start import start_executor
from weft.engine.step_scheduler import make_scheduler
from weft.engine.tier_start import make_engine_tier
from weft.engine.transfer_start import make_embeddings, make_transfers
from weft.engine.weights.engine_weights import EngineWeights
from weft.group.types import GroupLost
from weft.overlap.overlap_policy import OverlapPolicy, mode_of
from weft.runner.step_handle import StepHandle
from weft.runner.wakeup_descriptor import WakeupDescriptor
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.scheduler import Scheduler
from weft.tracing.writer import SpanWriter
from weft.types.messages import OLDEST, VERSION, EngineStats, TokenEvent, Welcome
from weft.types.plan import AdapterUpdate, Rebalance, StepPlan, TokenMasks
from weft.types.tier_flush import FlushTier

log = get_logger(__name__)


class EngineCore(EngineLoop[StepHandle]):
    """The engine of one group: the step loop, with the parts that a configuration asks for."""

    runner: GroupExecutor
    grammars: GrammarSource

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = True,
        clock: Clock | None = None,
        runner: GroupExecutor | None = None,
        expert_group: ExpertGroup | None = None,
        spans: SpanWriter | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        """Load the model, unless a ``runner`` is given, and start the scheduler and the sources.

        ``progress``: show a progress bar on stderr. ``expert_group``: the expert-parallel group (default: the
        runner's). ``spans``: writer for traced sequences, closed by ``close``. ``grammars``: default: the
        model tokenizer's.

        Raises ConfigError for an unusable configuration.
        """
        self._fingerprint = "" if config.transfer.role in ("unified", "encode") else fingerprint(config)
        self._tower = tower_fingerprint(config)
        runner = runner or _start_alone(config, progress)
        super().__init__(
            make_scheduler(config, runner.kv),
            runner,
            clock or SystemClock(),
            config.scheduler.steps_in_flight,
            spans,
        )
        self.config = config
        self.expert_group = expert_group or runner.expert_group
        rows = config.transfer.role != "encode"
        self.overlap = _overlap(mode_of(config.parallel if rows else None, config.device), runner)
        """Decides which steps run in micro-batches."""
        self.balance = Balance(config.parallel.eplb_interval)
        """Decides before which steps experts move between ranks."""
        self.incarnation = secrets.randbits(64)
        """Random 64-bit number of the engine. Distinguishes restarts for the peers of transfers."""
        self.transfers = make_transfers(config, runner, self.incarnation, self._clock)
        self.embeddings = make_embeddings(config, runner, self.incarnation, self._clock)
        self._stages.follow(transfers.tally for transfers in self.all_transfers)
        self.grammars = grammars or GrammarSource(lambda: ModelGrammars(config))
        # A prefill group on a CPU handles transfers during a step, so the loop must not block in `read`.
        sleeps = config.transfer.role == "prefill" and config.device == "cpu" and self.expert_group is None
        self._wakeup = runner.wakeup or (WakeupDescriptor() if sleeps else None)
        self._kv_events = start_kv_events(config, self.scheduler)
        book = self.scheduler.adapters if isinstance(self.scheduler, Scheduler) else None
        self.adapters = EngineAdapters(config.lora, book, runner.runner.adapters)
        """LoRA adapters: loaded and dropped by messages of API servers."""
        # Complete before a server starts: a server reads `sockets` once.
        parts = self.grammars, self.transfers, self.embeddings, self._wakeup, self._kv_events
        self.sources = sources_of(*parts)
        if book is not None and config.lora.max_loras:
            self.sources.append(self.adapters)
        self.weights = self._make_weights()
        self.sources.append(self.weights)
        self.tier = make_engine_tier(config, self.scheduler, runner, self._clock)
        """KV tier; None without a tier."""
        if self.tier is not None:
            self.sources.append(self.tier)
        self._encode_seconds = 0.0

    @property
    def deterministic(self) -> bool:
        """True if the logits of a sequence are bitwise invariant: batch, chunks, cache hits, preemptions and
        steps in flight do not change one bit. True with --deterministic, and wherever every operation is
        invariant.
        """
        return not self.runner.varying

    def describe_determinism(self) -> str:
        """Return ``deterministic: yes``, or ``deterministic: no, by`` and the names of the varying
        operations.
        """
        varying = self.runner.varying
        return f"deterministic: no, by {', '.join(varying)}" if varying else "deterministic: yes"

    def describe_speculation(self) -> str | None:
        """Return a sentence with the share of accepted drafts, overall and by draft position; None without
        drafts.
        """
        stats = self.scheduler.stats()
        verified = sum(stats.drafts)
        accepted = sum(stats.drafts_accepted)
        if not verified:
            return None
        places = zip(stats.drafts_accepted, stats.drafts, strict=True)
        shares = ", ".join(f"{right / count:.0%}" for right, count in places if count)
        return f"drafts: {accepted} of {verified} accepted; by position {shares}"

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets and descriptors to poll while there is no work. Replicas of the expert-parallel group and
        the sources wake the engine through these sockets.
        """
        expert_group = () if self.expert_group is None else self.expert_group.sockets
        return [*expert_group, *(socket for source in self.sources for socket in source.sockets)]

    def sleep(self, seconds: float) -> None:
        """Block until a socket of ``sockets`` is readable, at most for ``seconds``.

        Does not read the sockets.
        """
        if not self.sockets:  # zmq returns at once if no socket is registered
            time.sleep(seconds)
            return
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(max(round(seconds * 1e3), 1))

    def has_work(self) -> bool:
        """Return True if ``step`` has work. A replica of an expert-parallel group also steps for the other
        replicas.
        """
        return super().has_work() or (self.expert_group is not None and self.expert_group.awake)

    def _lose(self, lost: GroupLost) -> None:
        super()._lose(lost)
        self.overlap.lose()
        if isinstance(scheduler := self.scheduler, Scheduler):
            error = InvalidRequest("the files of the LoRA adapter changed: load the adapter again").info()
            self.adapters.lost(lambda digest: scheduler.fail_adapter(digest, error))

    def _make_weights(self) -> EngineWeights:
        """Return the handler of new weights. API servers send the messages that stage and use the weights."""
        group, work = self.runner.weights, self._open_work
        forget = functools.partial(self.flush, FlushTier(disk=False))
        parts = self.config, group, self.scheduler, self._drain, work, self._lose, forget, start_receiver
        return EngineWeights(*parts, stepping=lambda: self._steps_together, held=lambda: self._weights_differ)

    @property
    def _weights_differ(self) -> bool:
        """True if replicas of the expert-parallel group may have different versions of the weights."""
        return self.expert_group is not None and self.expert_group.held(self.weights.version)

    @property
    def _steps_together(self) -> bool:
        """True while the replicas of the expert-parallel group step together."""
        return self.expert_group is not None and self.expert_group.awake and not self._weights_differ

    def _drain(self) -> list[TokenEvent] | None:
        """Commit all steps in flight and return the events; None while the group recovers. Raises
        GroupLost."""
        if self.recovering:
            return None
        events: list[TokenEvent] = []
        while self._in_flight:
            self.commit(events)
        return events

    def _open_work(self) -> bool:
        """Return True while a sequence, a transfer or a copy of the KV tier is open.

        ``self.transferring`` does not serve here. Its part about the tier becomes False at a deadline, but a
        copy may still read the caches then.
        """
        copying = self.tier is not None and self.tier.copying
        return self._unfinished() or super().transferring or copying

    def _recover(self, lost_at: float) -> list[TokenEvent]:
        events = super()._recover(lost_at)
        if self.tier is not None and not self.recovering:
            self.tier.regain()
        return events

    @property
    def transferring(self) -> bool:
        """True while a transfer may still complete, or blocks of ended sequences are still to be stored."""
        return super().transferring or (self.tier is not None and self.tier.moving)

    def _plan(self, now: float) -> StepPlan | None:
        """See ``EngineLoop._plan``. No plan is made while the replicas of an expert-parallel group may have
        weights of different versions: a plan that was made must run."""
        if self.expert_group is not None and self._weights_differ:
            self.expert_group.compare(self._unfinished(), self.weights.version)
            return None
        return super()._plan(now)

    def _agree(self, builder: PlanBuilder | None) -> PlanBuilder | None:
        if builder is not None:
            self.balance.ask(builder)
            self.overlap.ask(builder)
        # All replicas of an expert-parallel group must launch the same step. `settle` may replace an absent
        # builder by an idle step, or hold the local builder back.
        if self.expert_group is not None:
            # Each rank answers for rows of all replicas, so all ranks need the adapters of all replicas.
            updates: Sequence[AdapterUpdate] = ()
            if self.config.lora.lora_experts and isinstance(self.scheduler, Scheduler):
                updates = self.scheduler.adapter_updates
            unfinished, version = self._unfinished(), self.weights.version
            builder = self.expert_group.settle(builder, unfinished, self.scheduler.idle, updates, version)
        return builder

    def _launch(self, plan: StepPlan, began: float) -> None:
        """Launch the plan's forward pass, and its sampling unless masks are due.

        Append the step to the steps in flight, with ``began``, the start of its planning. Raises GroupLost.
        """
        self.balance.launched(plan)
        super()._launch(plan, began)

    def _sample(self, step: InFlight[StepHandle], masks: TokenMasks | None = None) -> None:
        super()._sample(step, masks)
        # A wake-up socket of the runner is signalled by the runner.
        wakeup, sampled = self._wakeup, step.handle.sampled
        if wakeup is not None and wakeup is not self.runner.wakeup and sampled is not None:
            sampled.add_done_callback(lambda _: wakeup.ring())

    def _learn(self, handle: StepHandle, seconds: float) -> None:
        self._encode_seconds += handle.encode_seconds
        # Encoding, captures and trials of micro-batches take time that the tokens of the step do not explain.
        atypical = handle.uncaptured or handle.encode_seconds > 0 or self.overlap.tries(handle.plan)
        self.scheduler.observe(handle.plan, seconds, atypical)
        self.overlap.observe(handle.plan, handle.times)

    def stats(self) -> EngineStats:
        """Return counters and gauges of the scheduler, the transfers, the grammars and overlap."""
        return msgspec.structs.replace(
            super().stats(),
            encode_seconds=self._encode_seconds,
            grammars_compiled=self.grammars.compiled,
            overlapped_steps=self.overlap.steps,
            communication_seconds=self.overlap.communication,
            communication_hidden_seconds=self.overlap.hidden,
            overlap_choices=tuple(one.message(bucket) for bucket, one in self.overlap.choices.items()),
        )

    def flush(self, command: FlushTier) -> None:
        """Empty the prefix cache, and remove the records that ``command`` names from the KV tier, if there is
        a tier. Running sequences continue."""
        # Prefixes first: otherwise the tier could store a block again.
        if isinstance(self.scheduler, Scheduler):
            self.scheduler.forget_prefixes()
        if self.tier is not None:
            self.tier.flush(command)

    def welcome(self, incarnation: int) -> Welcome:
        """Return the ``Welcome`` message, a description of the engine for API servers.

        ``incarnation``: the value of the field ``incarnation``.
        """
        kv = self.runner.kv
        return Welcome(
            versions=(OLDEST, VERSION),
            vocab_size=self.config.spec.vocab_size,
            max_model_len=kv.max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            num_blocks=tuple(pool.num_blocks for pool in kv.pools),
            incarnation=incarnation,
            deterministic=self.deterministic,
            block_size=kv.block_size,
            role=self.config.transfer.role,
            fingerprint=self._fingerprint,
            transfer_address="" if self.transfers is None else self.transfers.address,
            embeddings="" if self.embeddings is None else self.embeddings.address,
            tower=kv.media is not None and kv.media.tower,
            tower_fingerprint=self._tower,
            weights=self.weights.version,
            weights_name=self.weights.name,
            ranks=self.config.parallel.tensor_parallel_size,
            max_loras=self.config.lora.max_loras if self.config.transfer.role != "encode" else 0,
        )

    def close(self, failed: bool = False) -> None:
        """Wait for the steps in flight, drop the results, and release the ranks, the transfers and the trace.

        Logs the shares of accepted drafts and of overlap. Errors of steps in flight are logged, not raised.
        ``failed``: another engine will take over the supervised ranks, so leave the ranks running.
        """
        if (report := self.describe_speculation()) is not None:
            log.info("%s", report)
        if (report := self.overlap.describe()) is not None:
            log.info("%s", report)
        if self.tier is not None and not failed:
            self.tier.finish()
        self.weights.close(failed)
        self.grammars.close()
        # Transfers end before the ranks: a transfer uses the memory of the ranks.
        for transfers in self.all_transfers:
            transfers.close()
        while self._in_flight:
            try:
                self.runner.read(self._in_flight.popleft().handle)
            except Exception as error:
                log.warning("a step in flight failed while closing: %s", error)
        self.runner.close(leave=failed)
        if self._wakeup is not None:
            self._wakeup.close()
        if self.expert_group is not None:
            self.expert_group.close()
        self.adapters.close()
        if self._kv_events is not None:
            self._kv_events.close()
        self._stages.close()


def _start_alone(config: EngineConfig, progress: bool) -> GroupExecutor:
    """Set the CPU threads of this process, start the group and return the group."""
    take_threads(config)
    return start_executor(config, progress=progress)


def _overlap(mode: str, runner: GroupExecutor) -> OverlapPolicy:
    """Return the policy for ``mode``. On GPUs, trials need captured decode steps of rank 0."""
    if mode != "measured":
        return OverlapPolicy(mode)
    graphs = runner.graphs
    if graphs is None:
        log.info("overlap: off, because decode steps are not captured as graphs")
        return OverlapPolicy("off")
    log.info("overlap: captured decode steps are timed whole and in micro-batches, per bucket of rows")
    return OverlapPolicy(mode, graphs.bucket_of)


class Balance:
    """Rebalance timer of one engine. The first replica with an expired interval decides for the
    expert-parallel group.
    """

    def __init__(self, interval: int) -> None:
        """``interval``: steps between two rebalances; 0 disables rebalancing."""
        self._interval = interval
        self._steps = 0
        self.asked = 0
        """Number of launched steps with a ``Rebalance``."""

    def ask(self, builder: PlanBuilder) -> None:
        """Set ``builder.rebalance`` if the interval has passed."""
        builder.rebalance = 0 < self._interval <= self._steps

    def launched(self, plan: StepPlan) -> None:
        """Count the launched step. A step with a ``Rebalance`` restarts the interval."""
        self._steps += 1
        if any(isinstance(op, Rebalance) for op in plan.ops):
            self._steps = 0
            self.asked += 1
