"""Runner: executes step plans on one device.

    forward(plan)   slot updates, staging, drive(model.steps(batch))   launched, not waited for
    sample(handle)  ids go into history[slot]; num_computed grows by   launched, not waited for
                    the number of accepted tokens; new drafts
    read(handle)    StepResult                                         the only wait, with a deadline

The order for each step is forward, then sample. Steps are launched in plan order, and several steps may be in
flight. A step reads the ids and lengths of the previous step on the device, so launching never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from weft.attention.base import Backends, LayerCache
from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.common.progress import progress_bar
from weft.config.resolved import KVConfig
from weft.config.sections.all import SpeculationSection
from weft.models.decoder import Model
from weft.overlap.times import StepTimes, Stretch
from weft.parallel.comm import drive
from weft.parallel.launcher import Launcher
from weft.runner.batch.batch import BatchBuilder, StepRows
from weft.runner.batch.micro_batches import MicroBatchedSteps
from weft.runner.batch.staging import StagingBuffer, StagingRing, even, most_each
from weft.runner.device_queue import DeviceQueue, result_of
from weft.runner.drafting import DraftedParts, make_drafter
from weft.runner.expert_routes import ExpertRoutes
from weft.runner.exports import Exports, LayerDone, RankTransfers, Reports, TransferThread
from weft.runner.graphs.graphs import DecodeGraphs, GraphOptions
from weft.runner.graphs.mixed import MixedGraphs
from weft.runner.graphs.towers import captured_tower
from weft.runner.images.image_store import MediaStore
from weft.runner.images.media_departures import media_store
from weft.runner.kv_tensors import by_layer, stacked
from weft.runner.pooling import Pooler, classifier
from weft.runner.result import Drawn, HostCopy, synchronize, to_result
from weft.runner.sampling.sampler import NO_MASKS, End, Sampler
from weft.runner.slot_state import SlotState, States
from weft.runner.step_handle import NOT_YET, StepHandle
from weft.runner.step_trace import StepTrace, labelled
from weft.runner.tier_thread import TierThread
from weft.runner.verify import accept
from weft.runner.warm_up import plans
from weft.speculation.base import Drafter, Sampled
from weft.types.plan import AllocSlot, Export, FreeSlot, Rebalance, StepPlan, StepResult, TokenMasks
from weft.types.transfer import Endpoint

log = get_logger(__name__)

Tensor = torch.Tensor
RowsLeft: TypeAlias = Callable[[], StepRows]
"""Callable that returns the ``StepRows`` of a step. Call before the next step's forward reuses the
buffers."""


class Runner:
    """One rank's share of every step. Callers must follow the call order in the module docstring."""

    tier: TierThread | None = None
    """Copies blocks to and from a KV tier; None without a tier. Set before the first step, and closed by
    ``close``."""

    weights: Any = None
    """Weights that updates fill (``weft.engine.weights.rank_weights``). Set before the first step, and closed
    by ``close``."""

    _failed = False
    """True while a step is launched, and after a failed step until ``reset``."""

    def __init__(
        self,
        model: Model,
        backends: Backends,
        kv: KVConfig,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        depth: int,
        trace: StepTrace | None = None,
        step_timeout: float = 600.0,
        poison: bool = False,
        graphs: GraphOptions | None = None,
        speculation: SpeculationSection | None = None,
        launcher: Launcher | None = None,
        transfers: RankTransfers | None = None,
        embeddings: RankTransfers | None = None,
        processed: bool = False,
    ) -> None:
        """Allocate the caches and, with ``graphs``, set up (unless lazy: run) the capture of decode steps.

        ``depth``: number of steps that may be in flight. ``poison``: overwrite recycled staging buffers
        (tests). ``processed``: see ``Sampler``. ``speculation``: selects the drafter. ``launcher``: runs the
        collectives of the model. ``transfers`` and ``embeddings``: transfers of KV and of image embeddings;
        the caches lie in the memory of these transfers. ``close`` closes the launcher and both transfers.
        """
        self.kv = kv
        self._model, self._backends, self._device, self.adapters = model, backends, device, model.adapters
        self._state = SlotState(kv, device)
        self._transfers, self.embeddings = transfers, embeddings
        layers, name = model.spec.layers, str(dtype).removeprefix("torch.")
        self._exports = None if transfers is None else Exports(kv, layers, name, transfers.transfer)
        blocks = None if transfers is None else transfers.memory
        self._cache, self._memory = by_layer(kv, memory := stacked(kv, dtype, device, blocks)), memory
        self._states = States(kv, memory, self._state.live, dtype, blocks)
        self._vocab_size, self._sampler = vocab_size, Sampler(kv.num_slots, vocab_size, device, processed)
        self._pooler = Pooler(kv.num_slots, model.spec.hidden, device, classifier(model))
        self._routes = ExpertRoutes(kv.num_slots, model.routed_layers, device)
        self._ring = StagingRing(device, depth, poison=poison)
        self._media = self._make_media(dtype, embeddings, graphs)
        self._builder = BatchBuilder(self._state, kv, backends, dtype, self._media)
        self._launcher = launcher or Launcher()
        self._launcher.recording = launcher is not None
        self._micro_batched = MicroBatchedSteps(
            model,
            self._cache,
            backends,
            self._builder,
            self._launcher,
            StagingRing(device, 2 * depth, poison=poison),
        )
        self._queue = DeviceQueue(threaded=device.type == "cpu" and _overlaps(depth, transfers))
        self._trace, self._timeout, self._next_step = trace, step_timeout, -1  # -1: any step
        self._has_state = any(pool.cache.kind == "state" for pool in kv.pools)
        self.drafter = self._make_drafter(speculation, graphs)
        """Proposes drafts; None without speculation."""
        self.graphs = None if graphs is None else self._make_graphs(graphs)
        """Captured decode steps; None if decode steps are not captured."""
        self.mixed = self._make_mixed(graphs)
        """Captured steps with prompts; None if such steps are not captured."""

    @property
    def cache(self) -> Sequence[LayerCache]:
        """Caches of each layer. Tests overwrite the caches; other callers only read."""
        return self._cache

    @property
    def memory(self) -> list[list[Tensor]]:
        """Tensors of the blocks of each KV cache group, [layer, block, ...]; of a state: the snapshots."""
        kinds = enumerate(self.kv.pools)
        return [
            list(self._states.snapshots(number) if pool.cache.kind == "state" else self._memory[number])
            for number, pool in kinds
        ]

    def freeable(self) -> list[Tensor]:
        """Return the tensors of the KV cache. Their contents are not needed while no sequence is open. The KV
        tier stops preparing memory for loads."""
        if self.tier is not None:
            self.tier.stop_preparing()
        slots = (self._memory[n] for n, pool in enumerate(self.kv.pools) if pool.cache.kind == "state")
        return [tensor for kind in (*self.memory, *slots) for tensor in kind]

    @property
    def transfer(self) -> TransferThread | None:
        """Transfers of KV caches to and from other groups; None in a unified group."""
        return None if self._transfers is None else self._transfers.transfer

    @property
    def reports(self) -> Reports | None:
        """Reports of ``transfer`` for the engine process of this rank; None without transfers."""
        return None if self._transfers is None else self._transfers.reports

    @property
    def endpoint(self) -> Endpoint | None:
        """Address at which ranks of other groups reach ``transfer``; None without transfers."""
        return None if self._transfers is None else self._transfers.endpoint

    @property
    def varying(self) -> tuple[str, ...]:
        """Names of the parts that make logits depend on the batch; empty if logits are bitwise invariant."""
        attention = [b for b in self._backends if not b.invariant]
        return (*(f"attention ({type(b).__name__})" for b in attention), *self._model.varying)

    def forward(self, plan: StepPlan) -> StepHandle:
        """Launch a step up to its logits and return a handle.

        An invalid plan raises EngineDead later, in ``read``.
        """
        handle = StepHandle(plan=plan, launched=time.monotonic(), forwarded=NOT_YET)
        handle.forwarded = self._queue.submit(self._forward, handle)
        return handle

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        """Launch the sampling of a step: ids go into history, lengths advance, the copy to the host starts.

        ``masks``: token masks, only for a plan with ``constrained``. Masks may be made after ``forward`` was
        called.
        """
        handle.sampled = self._queue.submit(self._sample, handle, masks)

    def behind_steps(self, work: Callable[..., object], *args: object) -> None:
        """Call ``work(*args)`` when all steps launched so far have ended; on a GPU, when the work of the
        steps is on the compute stream."""
        self._queue.submit(work, *args)

    def done(self, handle: StepHandle) -> bool:
        """Return True if ``read`` would return or raise without waiting; False if the step is not sampled
        yet. Raises nothing."""
        if handle.sampled is None or not (handle.forwarded.done() and handle.sampled.done()):
            return False
        if handle.sampled.exception() is not None or handle.forwarded.exception() is not None:
            return True
        copy: HostCopy | Drawn = handle.sampled.result()
        return copy.is_complete()

    def read(self, handle: StepHandle) -> StepResult:
        """Wait for the step, return its staging buffers to the rings, write the trace, and return the result.

        Raises EngineDead after the deadline or if the step was not sampled, and every exception of the step.
        After an interrupt the call may be repeated.
        """
        deadline = time.monotonic() + self._timeout
        result_of(handle.forwarded, deadline)
        if handle.sampled is None:
            raise EngineDead(f"step {handle.plan.step} was not sampled")
        copy: HostCopy | Drawn = result_of(handle.sampled, deadline)
        copy.wait(deadline, self._launcher.check)
        if handle.timing is not None and handle.times is not None:
            handle.times = replace(handle.times, device=handle.timing.seconds())
        result = to_result(handle.plan, copy)
        assert handle.buffer is not None
        self._ring.release(handle.buffer)
        if handle.micro_batches:
            self._micro_batched.release(handle.micro_batches)
        if self._trace is not None:
            self._trace.step(handle.plan, handle.launched, time.monotonic(), handle.times)
        return result

    @torch.inference_mode()
    def warm_up(self, most: int, progress: bool = False) -> None:
        """Compute prompts of up to ``most`` tokens and wait for the results, before any sequence exists.

        The prompts use slot 0, which has no blocks yet, so all cache writes go to the null block. See
        ``weft.runner.warm_up``.
        """
        began = time.monotonic()
        computed = self._state.num_computed[:1]
        prompts = plans(most, self.kv.max_model_len)
        for plan in progress_bar(prompts, title="warming up", unit="step", shown=progress):
            handle = StepHandle(plan=plan, launched=began, forwarded=NOT_YET, buffer=self._ring.acquire())
            assert handle.buffer is not None
            computed.fill_(int(plan.prefill.start[0]))
            self._compute(plan, handle, None)
            synchronize(self._device, self._timeout)
            self._ring.release(handle.buffer)
        computed.zero_()
        self._sampler.warm_up(self._model.dtype, self._model.spec.vocab_size)
        log.info("%d prompts computed to warm up, in %.1f s", len(prompts), time.monotonic() - began)

    def reset(self) -> None:
        """Forget every sequence and every step in flight: all slots are free, and any step number may come
        next.

        Weights and allocated memory stay. Raises EngineDead if launched work does not end within the step
        timeout.
        """
        result_of(self._queue.submit(self._clear), time.monotonic() + self._timeout)

    def _clear(self) -> None:
        """Forget all sequences, slots, bound images, staged buffers, drafts and lazily captured graphs.
        Afterwards any step number may come first. Raises EngineDead if a GPU does not synchronize in time."""
        if self._device.type == "cuda":
            synchronize(self._device, self._timeout)
        slots = self._sampler.slots
        for part in (self._state, slots, self._pooler, self._routes, self._media, self._ring):
            part.clear()
        self._micro_batched.clear()
        if self.adapters is not None:
            self.adapters.forget()
        self._launcher.take()
        if self.graphs is not None:
            self.graphs.forget()
        if self.drafter is not None:
            self.drafter.reset()
        self._next_step = -1
        self._failed = False

    def close(self) -> None:
        """Close the device thread, the transfers, the launcher and the trace."""
        self._queue.close()
        for transfers in (self._transfers, self.embeddings):
            if transfers is not None:
                transfers.close()
        if self.tier is not None:
            self.tier.close()
        if self.weights is not None:
            self.weights.close()
        self._launcher.close()
        if self.graphs is not None and self._device.type == "cuda":
            self.graphs.forget()  # captured collectives must go before the communicators end
        if self._trace is not None:
            self._trace.close()

    def _forward(self, handle: StepHandle) -> tuple[RowsLeft, Tensor]:
        """Run ``_forward_step``. After an error, every further step raises EngineDead until ``reset``."""
        # No step may run after a failed step: its collectives would pair with the collectives that other
        # ranks still run for the failed step.
        if self._failed:
            raise EngineDead("an earlier step failed")
        self._failed = True
        with labelled(handle.plan):
            result = self._forward_step(handle)
        self._failed = False
        return result

    @torch.inference_mode()
    def _forward_step(self, handle: StepHandle) -> tuple[RowsLeft, Tensor]:
        """Apply the slot updates of a plan and compute the logits. Return (function for the sampled rows,
        logits).

        Takes a staging buffer and fills ``buffer``, ``encode_seconds`` and ``times`` of ``handle``. Raises
        EngineDead for a step out of order or a plan that contradicts the slot table.
        """
        plan = handle.plan
        # -1 as ``_next_step`` means that any step number may come first.
        if plan.step != self._next_step >= 0:
            raise EngineDead(f"step {plan.step} follows step {self._next_step - 1}")
        self._next_step = plan.step + 1
        # The drafter must read the slots and blocks before the slot updates change them.
        if self.drafter is not None:
            self.drafter.prepare(plan.ops)
        done = self._apply(plan, handle)
        self._state.validate(plan.prefill)
        self._state.validate(plan.decode)
        handle.buffer = self._ring.acquire()
        began = time.monotonic()
        # Two kinds of steps are never replayed: steps with exported rows, because a replay calls no layer
        # hook, and steps with routes, because a replay does not store routes.
        replayed = self._replay(plan, handle) if done is None and not self._routes.wants(plan) else None
        if replayed is not None or plan.micro_batches == 1:
            rows, logits = replayed or self._compute(plan, handle, done)
            stretches = [Stretch(0, began, time.monotonic())]
        else:
            rows, logits, stretches = self._compute_micro_batches(plan, handle, done)
        if self._launcher.recording:
            handle.times = StepTimes(
                micro_batches=plan.micro_batches,
                seconds=time.monotonic() - began,
                stretches=stretches,
                flights=self._launcher.take(),
            )
        return rows, logits

    def _apply(self, plan: StepPlan, handle: StepHandle) -> LayerDone | None:
        """Apply the slot updates of a plan. Sets ``encode_seconds`` of ``handle``. For the result and the
        errors see ``_export``."""
        for op in plan.ops:
            self._state.apply(op)
            if isinstance(op, AllocSlot):
                self._sampler.slots.alloc(op)
                if self.drafter is not None:
                    self.drafter.enter(op.slot)
            elif isinstance(op, FreeSlot):
                self._sampler.slots.free(op.slot)
            elif isinstance(op, Rebalance) and self._model.experts is not None:
                drive(self._model.experts.rebalance())
                if self.adapters is not None:
                    self.adapters.experts_moved()
        if self.adapters is not None and (plan.ops or self.adapters.stale):
            self.adapters.apply(plan.ops)
        if plan.ops:
            # Only SaveState and LoadState change recurrent states, so other slot updates may run first.
            self._states.apply(plan.ops)
            self._pooler.apply(plan.ops)
            self._routes.apply(plan.ops)
        handle.encode_seconds = self._media.apply(plan.ops)
        return self._export(plan)

    def _export(self, plan: StepPlan) -> LayerDone | None:
        """Return the hook to call after each layer of a plan with exported rows; None if no row is exported.

        Raises EngineDead if the plan exports positions and this rank has no transfers.
        """
        if self._exports is not None:
            return self._exports.begin(plan.ops)
        if any(isinstance(op, Export) for op in plan.ops):
            raise EngineDead(f"step {plan.step} exports positions, and this rank has no transfers")
        return None

    def _replay(self, plan: StepPlan, handle: StepHandle) -> tuple[RowsLeft, Tensor] | None:
        """Run the step as a captured graph and return its rows and logits; None if the step must run op by
        op.

        Sets ``uncaptured`` of ``handle``, and after a replay ``hidden``, ``each``, ``drawn`` and ``timing``.
        """
        assert handle.buffer is not None
        if plan.prefill.rows:
            return self._replay_mixed(plan, handle, handle.buffer)
        if plan.agreed is not None and plan.agreed.adapted:
            return None
        present = self._state.adapters(plan.decode.slot)
        adapts = bool(present)
        if self.graphs is None or (adapts and (self.adapters is None or not self.adapters.captures(present))):
            return None
        # A captured step may also sample, if no row needs drafts, masks or anything beyond a plain draw.
        drafter, drafts = self.drafter, plan.decode.next_k.any()
        drafter_is_idle = drafter is None or (drafter.skips_idle_steps and not drafts)
        draws = drafter_is_idle and not plan.constrained and self._sampler.slots.draws(plan.decode.slot)
        key = self.graphs.find(plan, draws, adapts)
        if key is None:
            handle.uncaptured = self.graphs.uncaptured
            return None
        replayed = self.graphs.run(key, plan, handle.buffer, draws)
        handle.drawn, handle.timing = replayed.drawn, replayed.timing
        if self.drafter is not None:
            handle.hidden = self.graphs.hidden(key, plan.rows)
        handle.each = key.each
        handle.uncaptured = self.graphs.uncaptured
        return replayed.rows, replayed.logits

    def _replay_mixed(
        self, plan: StepPlan, handle: StepHandle, buffer: StagingBuffer
    ) -> tuple[RowsLeft, Tensor] | None:
        """Run a step with prompts as a captured graph, which draws the tokens, and set ``drawn`` of
        ``handle``; None if the step must run op by op."""
        prefill, decode, slots = plan.prefill, plan.decode, self._sampler.slots
        if self.mixed is None or plan.constrained or self._pooler.wants(plan):
            return None
        if prefill.next_k.any() or decode.next_k.any() or self._state.adapters(prefill.slot, decode.slot):
            return None
        if not (slots.draws(prefill.slot) and slots.draws(decode.slot)):
            return None
        key = self.mixed.find(plan)
        if key is None:
            return None
        handle.drawn = self.mixed.run(key, plan, buffer)
        return _drawn_already, handle.drawn.drawn

    def _compute_micro_batches(
        self, plan: StepPlan, handle: StepHandle, done: LayerDone | None
    ) -> tuple[RowsLeft, Tensor, list[Stretch]]:
        """Compute the step as two micro-batches. Return (function for the rows, logits, times of the parts).
        Adds the staging buffers to ``handle``. Hands hidden states to drafter and pooler if needed."""
        assert handle.buffer is not None
        rows, logits_index, adapters = self._builder.rows(plan, handle.buffer)
        whole = self._reads_hidden(plan)
        hidden, stretches, routes = self._micro_batched.hidden(
            plan, handle.micro_batches, self._routes.begin, whole=whole, done=done
        )
        if routes is not None:
            handle.routes = self._routes.take(plan, routes)
        # Drafter and pooler read the hidden states of all tokens; the head needs only the rows with logits.
        if whole:
            self._store_hidden(handle, hidden)
            hidden = hidden[logits_index]
        return lambda: rows, drive(self._model.logits(hidden, adapters)), stretches

    def _compute(self, plan: StepPlan, handle: StepHandle, done: LayerDone | None) -> tuple[RowsLeft, Tensor]:
        """Compute the step op by op. Return (function for the rows, logits). Hands hidden states to drafter
        and pooler if needed."""
        assert handle.buffer is not None
        build = self._builder.build_even if even(plan, most_each(plan)) else self._builder.build
        batch = build(plan, handle.buffer)
        if not self._reads_hidden(plan):
            return lambda: batch, drive(self._model.steps(batch.step, self._cache, self._backends, done))
        step = replace(batch.step, routes=self._routes.begin(plan, batch.step.positions))
        wanted = drive(self._model.hidden(step, self._cache, self._backends, done=done))
        self._store_hidden(handle, wanted)
        if step.routes is not None:
            handle.routes = self._routes.take(plan, step.routes.made())
        index = step.logits_index if len(step.logits_index) < len(wanted) else None
        if index is not None:
            wanted = wanted[index]
        return lambda: batch, drive(self._model.logits(wanted, step.adapters_at(index)))

    def _reads_hidden(self, plan: StepPlan) -> bool:
        """Return True if the drafter or the pooler reads the hidden states of all tokens of the plan, or if
        routes of all tokens are needed."""
        reads = self.drafter is not None and self.drafter.reads_hidden
        return reads or self._pooler.wants(plan) or self._routes.wants(plan)

    def _store_hidden(self, handle: StepHandle, hidden: Tensor) -> None:
        """Store ``hidden``, [T, model.width] of all tokens of the step, for the pooler and the drafter."""
        # A drafter may read more columns than the hidden size. The pooler reads the model's hidden states.
        model_hidden = hidden[:, : self._model.spec.hidden]
        wants = self._pooler.wants(handle.plan)
        handle.pooled = self._pooler.take(handle.plan, model_hidden) if wants else None
        if self.drafter is not None and self.drafter.reads_hidden:
            handle.hidden = hidden

    def _sample(self, handle: StepHandle, masks: TokenMasks | None) -> HostCopy | Drawn:
        """Return the tokens drawn by the captured step, or sample now. After an error in sampling, every
        further step fails until ``reset``. Raises EngineDead if masks arrive for tokens that are already
        drawn."""
        if handle.drawn is not None:
            if masks is not None:
                raise EngineDead(
                    f"token masks arrived for step {handle.plan.step} after its tokens were sampled"
                )
            self._sampled(handle)
            return handle.drawn
        failed = self._failed
        self._failed = True
        result = self._sample_step(handle, masks)
        self._failed = failed
        return result

    @torch.inference_mode()
    def _sample_step(self, handle: StepHandle, masks: TokenMasks | None) -> HostCopy:
        """Sample the step, write the tokens into the history, advance the slots, and propose drafts. Return
        the running copies of the result to the host. Raises EngineDead if a constrained step has no masks."""
        rows_left, logits = handle.forwarded.result()
        state = self._state
        if masks is not None:
            masks.check(handle.plan, self._vocab_size)
        elif handle.plan.constrained:
            raise EngineDead(f"step {handle.plan.step} is constrained, and has no masks")
        step = rows_left()
        rows = step.sample_rows
        output = self._sampler.sample(
            logits, rows, state.history, state.num_prompt, NO_MASKS if masks is None else masks
        )
        # Samples are on the device; accepted drafts decide how far each slot advances.
        accepted = None if step.verify is None else accept(step.verify, output)
        state.history[rows.slot, rows.position] = output.tokens.to(state.history.dtype)
        state.advance(step.slots, step.counts, accepted, moves=self._has_state)
        drafts = None if self.drafter is None else self._propose(self.drafter, handle, step)
        self._sampled(handle)
        return HostCopy(output, accepted, drafts, handle.pooled, handle.routes)

    def _sampled(self, handle: StepHandle) -> None:
        """Handle the end of sampling, when the ids and drafts of the step are in the history: notify the
        transfers, and store the times of the drafter in ``handle``."""
        if self._exports is not None:
            self._exports.drafted(handle.plan)
        if handle.times is not None:
            handle.times = replace(handle.times, drafting=self._launcher.take())

    def _propose(self, drafter: Drafter, handle: StepHandle, step: StepRows) -> Tensor | None:
        """Propose drafts and write them into history. Return int64 [rows with next_k > 0, most drafts]; None
        if no row wants drafts. Clears ``hidden`` and may set ``uncaptured`` of ``handle``."""
        state = self._state
        # True if ``hidden_sink`` has passed the hidden states to the drafter within the replay.
        stored = handle.each == 1 and self.graphs is not None and self.graphs.has_hidden_sink
        if stored and drafter.is_idle(handle.plan):
            handle.hidden = None
            return None
        sampled = Sampled(
            plan=handle.plan,
            slots=step.slots,
            starts=step.starts,
            num_computed=state.num_computed,
            hidden=handle.hidden,
            each=handle.each,
            stored=stored,
        )
        drafts = drafter.propose(sampled)
        handle.uncaptured = handle.uncaptured or drafter.uncaptured
        handle.hidden = None
        if drafts is not None:
            state.draft(sampled.slots, sampled.ends, drafts, sampled.next_k)
        return drafts

    def _make_graphs(self, options: GraphOptions) -> DecodeGraphs:
        """Return the captured decode steps. Sampling is captured too if the drafter (or its absence) allows;
        hidden states go to the drafter inside the capture on a CPU."""
        parts = (self._model, self._cache, self._backends, self._builder, self._state)
        drafter = self.drafter if self._device.type == "cpu" else None
        hidden_sink = None if drafter is None else drafter.hidden_sink()
        end = self._make_end()
        return DecodeGraphs(*parts, self.kv.max_model_len, options, self._launcher, hidden_sink, end)

    def _make_end(self) -> End | None:
        """Return the function that ends a captured step; None if the drafter needs every step, or if neither
        the CPU extension nor the kernels can draw from the logits of the model."""
        if self.drafter is not None and not self.drafter.skips_idle_steps:
            return None
        like = torch.empty(1, 1, dtype=self._model.dtype, device=self._device)
        return self._sampler.end(self._state, self._has_state, like)

    def _make_mixed(self, options: GraphOptions | None) -> MixedGraphs | None:
        """Return the captured steps with prompts; None if there are none, see ``MixedGraphs``."""
        if (
            options is None
            or not options.prompt_tokens
            or (self.graphs is not None and not self.graphs.works)
            or not self._backends.ragged_context(self._model.spec, 1)
        ):
            return None
        end = self._make_end()
        if end is None:
            return None
        parts = (self._model, self._cache, self._backends, self._builder, self._state)
        return MixedGraphs(*parts, self.kv.max_model_len, options, end)

    def _make_media(
        self, dtype: torch.dtype, embeddings: RankTransfers | None, graphs: GraphOptions | None
    ) -> MediaStore:
        """Return the store of embeddings, with a captured tower if ``graphs`` allow."""
        capture = None if graphs is None else graphs.capture
        tower = captured_tower(self._model.vision, self.kv.media, capture)
        return media_store(self._model, tower, self.kv.media, self._device, dtype, embeddings)

    def _make_drafter(
        self, speculation: SpeculationSection | None, graphs: GraphOptions | None
    ) -> Drafter | None:
        parts = DraftedParts(
            self._model,
            self._cache,
            self._backends,
            self._builder,
            self._state,
            self._vocab_size,
            self.kv,
        )
        return make_drafter(parts, speculation, graphs)


def _overlaps(depth: int, transfers: RankTransfers | None) -> bool:
    """Return True if another step, or a transfer report, must be handled while a step computes."""
    return depth > 1 or (transfers is not None and transfers.reports_during_steps)


def _drawn_already() -> StepRows:
    """Placeholder for the rows of a step whose capture has drawn the tokens. Always raises EngineDead."""
    raise EngineDead("the tokens of the step are drawn already")
