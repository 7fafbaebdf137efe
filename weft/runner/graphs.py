"""Decode steps captured and replayed: one launch in place of hundreds, CUDA graphs on a GPU.

A step of equally many tokens of each row is a function of the rows' slots alone: ids, positions, block tables
and writes are derived on the device. So one column is all that a graph reads from outside, and its address
never changes:

    slots      [most rows]   filled before each replay; rows beyond the step's name the spare slot
    logits     [most tokens, vocab], and the like of hidden states, ids and positions: what a replay leaves,
               read before the next one

Everything is ordered by the stream: a replay follows the sampling of the step before it. Graphs are captured
at start for buckets of rows and of context (which bound the launches' grids); any other step, and any with a
prompt in it, is launched op by op.

Where ranks meet over NCCL, a graph holds the communicator of one epoch: it is captured when a step first
needs it, by all ranks in the same step, and dropped with the epoch, before the communicator can end.

On a CPU they are captured calls (weft/runner/programs.py), each made when it is first needed.

INVARIANT of ranks, which meet in the middle of a step: what a step computes, and with it the order, kinds and
sizes of its collectives, follows from its plan, the settings, and the plans before it in its epoch, on every
rank alike. So ``find`` asks nothing else (what a rank captured already, say). Whether a rank then replays the
step, captures it or launches the same calls one by one is its own affair. Captures name the epoch's memory
and end with it.

A spare row is at position 0 of a sequence without blocks: it reads and writes the null block, which nobody
else reads, and its logits are dropped.
"""

from __future__ import annotations

import itertools
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.common.log import get_logger
from weft.common.progress import progress_bar
from weft.common.recent import Recent
from weft.models.base import Model
from weft.overlap.drive import drive
from weft.overlap.interleave import interleave
from weft.parallel.launcher import Launcher
from weft.runner.batch import BatchBuilder, StepRows
from weft.runner.plan_columns import even, most_each
from weft.runner.programs import CannotCapture
from weft.runner.result import Drawn
from weft.runner.sampler import End
from weft.runner.slot_state import SlotState
from weft.runner.staging import StagingBuffer
from weft.types.exchange import PADS, UNAGREED, Exchange
from weft.types.plan import Segment, StepPlan, column

log = get_logger(__name__)

Tensor = torch.Tensor


class Key(NamedTuple):
    """The bucket of steps that one capture serves."""

    rows: int
    each: int
    """Tokens of a row."""
    context: int
    """Positions, at most."""
    micro_batches: int = 1
    """2 for a step in micro-batches."""
    padded: int = 0
    """What replicas agreed on: ``Agreement.padded_tokens``; 0: nothing."""
    ends: bool = False
    """Whether the step draws its tokens and moves its slots on, too."""


class Replayed(NamedTuple):
    """A step that was replayed, or launched in place of that."""

    logits: Tensor
    """[tokens, vocab], valid until the next step."""
    rows: Callable[[], StepRows]
    """What is left to do for its rows; to be asked before the next step."""
    drawn: Drawn | None
    """What it drew, where its key ``ends``: then nothing is left to do."""


Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""From a function of fixed tensors to one that does the same again. Tests pass the identity."""

MOST_ROWS = 512
"""Steps of more rows are launched op by op: launching costs them little."""
MOST_EXACT = 64
"""The same for lazy captures, of which there is one for each number of rows."""
MOST_PADDED = PADS[-1]
"""Most tokens of a replica in a step that others have a part in: there is a capture for each number that they
may agree on. In a step with more somebody computes a prompt."""
WORTH_CAPTURING = 2
"""Steps of a bucket after which a lazy capture is made, where there are many buckets: as rows with drafts
come and go, some are met once, and to capture takes about what two steps op by op take more than replayed."""
MOST_KEPT = 512
"""Captures of a runner. Each takes half a kilobyte a call, or tens to hundreds in all."""
FIRST_CONTEXT = 2048


def row_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ... up to ``most``, which is the last; coarser from 128 on."""
    most = min(most, MOST_ROWS)
    fine = [1, 2, 4, *range(8, 128, 8), *range(128, MOST_ROWS + 1, 32)]
    return [rows for rows in fine if rows < most] + [most]


def context_buckets(most: int) -> list[int]:
    """2,048 and fourfold upwards; the last is ``most``, a sequence's greatest length."""
    buckets = []
    context = FIRST_CONTEXT
    while context < most:
        buckets.append(context)
        context *= 4
    return [*buckets, most]


def obstacle(model: Model, backends: Backends) -> str | None:
    """Why decode steps of this model cannot be captured, in words; None when they can."""
    layout = model.mesh.layout
    if layout.expert and layout.data > 1 and model.device.type != "cpu":
        return "replicas agree on how rows travel in each step"
    if model.device.type != "cpu" and model.mesh.obstacle is not None:
        return model.mesh.obstacle
    if model.asking:
        return f"{', '.join(model.asking)} asks the device for a value in the middle of a step"
    if not backends.capturable:
        return "the attention backend needs the host in every step"
    return None


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool: at most one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and makes workspaces, which a capture cannot
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of others may use the device meanwhile; only this one's calls are captured and checked.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How a runner captures its decode steps."""

    max_rows: int
    """Most rows of a step."""
    capture: Capture
    progress: bool = False
    """Show a bar on stderr."""
    most_each: int = 1
    """Most tokens of a row."""
    keeps_hidden: bool = True
    """Whether somebody reads the hidden states of a step."""
    micro_batches: bool = False
    """Capture steps in micro-batches, too: the pair as one graph. For ranks whose collectives can be
    captured.
    """
    lazy: bool = False
    """Capture when a step first needs it: ``capture`` then computes that step, too, also if it raises
    CannotCapture."""
    exact: bool = False
    """Capture for exactly a step's rows, not for the bucket that holds them. On a CPU."""


class DecodeGraphs:
    """The captured decode steps of one runner, used from its thread only."""

    def __init__(
        self,
        model: Model,
        cache: list[LayerCache],
        backends: Backends,
        builder: BatchBuilder,
        state: SlotState,
        max_len: int,
        options: GraphOptions,
        launcher: Launcher | None = None,
        hidden_sink: Callable[[Tensor, Tensor, Tensor], None] | None = None,
        end: End | None = None,
    ) -> None:
        """Captures everything, unless lazy: runs each bucket on spare rows.

        ``max_len``: a sequence's greatest length. ``launcher``: of the model's collectives. ``hidden_sink``:
        called at the end of steps of one token a row, see ``Drafter.hidden_sink``. ``end``: of such steps,
        too, where nobody drafts; part of what is captured where a step ``draws`` (``find``).
        """
        self.keeps = hidden_sink is not None
        """Whether it is called."""
        self._hidden_sink = hidden_sink
        self.replayed = 0
        """Steps that ran as a graph."""
        self.uncaptured = False
        """Whether a step like the last one will be replayed, which that was not."""
        self._model = model
        self._cache = cache
        self._backends = backends
        self._builder = builder
        exact = list(range(1, min(options.max_rows, MOST_EXACT) + 1))
        self._rows = exact if options.exact else row_buckets(options.max_rows)
        self._launcher = launcher or Launcher()
        self._contexts = context_buckets(max_len)
        self._options = options
        most = self._rows[-1]
        device = model.device
        self._spare = state.spare
        self._slots = torch.full((most,), state.spare, dtype=torch.int64, device=device)
        self._on_host = self._slots.numpy() if device.type == "cpu" else None
        """The memory of ``_slots``, where the host may write it: the step before has been sampled."""
        tokens = most * options.most_each
        self._logits = torch.empty((tokens, model.spec.vocab_size), dtype=model.dtype, device=device)
        self._hidden = torch.empty((tokens, model.spec.hidden), dtype=model.dtype, device=device)
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        # Rows that fill a step up have no sequence to move on, so steps of exactly their rows end.
        self._end = end if options.exact else None
        self._drawn = torch.zeros(most, dtype=torch.int64, device=device)
        self._wrong = torch.zeros(most, dtype=torch.bool, device=device)
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """By rows and tokens of each: their slots, and their logits."""
        # Behind a GPU's graph there may be work of its own under way: none is dropped but with its epoch.
        self._replays: Recent[Key, Callable[[], None]] = Recent(
            MOST_KEPT if device.type == "cpu" else sys.maxsize
        )
        self._met: dict[Key, int] = {}
        self._captures = True
        if not options.lazy:
            self._capture(options)

    @torch.inference_mode()
    def _capture(self, options: GraphOptions) -> None:
        began = time.monotonic()
        before = _reserved(self._slots.device)
        # The largest first: the others then fit in its memory.
        each = reversed(range(1, options.most_each + 1))
        micro_batches = (1, 2) if options.micro_batches else (1,)
        buckets = itertools.product(reversed(self._rows), each, reversed(self._contexts), micro_batches)
        keys = [Key(*key) for key in buckets if key[0] >= key[3]]
        for key in progress_bar(keys, title="capturing decode", unit="graph", shown=options.progress):
            self._replays.put(key, options.capture(self._closure(key)))
        log.info(
            "%d CUDA graphs for decode, up to %d rows, captured in %.1f s; they take %d MiB",
            len(keys),
            self._rows[-1],
            time.monotonic() - began,
            (_reserved(self._slots.device) - before) >> 20,
        )

    def _closure(self, key: Key) -> Callable[[], None]:
        rows, each, context, micro_batches, padded, ends = key
        tokens = slice(rows * each)
        slots = self._slots[:rows]
        logits = self._logits[tokens]
        positions = self._positions[tokens]
        hidden = self._hidden[tokens]
        ids = self._ids[tokens]
        parts = slots.chunk(
            micro_batches
        )  # as with ``split``, rows by their number; those that fill up are last
        bounds = [_bound(len(part), each, context) for part in parts]
        exchange = Exchange(rows=padded) if padded else UNAGREED

        def run() -> None:
            steps = [
                replace(self._builder.decode(part, of), exchange=exchange)
                for part, of in zip(parts, bounds, strict=True)
            ]
            made = self._hidden_of(steps)
            if self._options.keeps_hidden:
                hidden.copy_(made)
            if each > 1:
                ids.copy_(torch.cat([step.ids for step in steps]))
            logits.copy_(drive(self._model.logits(made)))
            positions.copy_(torch.cat([step.positions for step in steps]))
            if self._hidden_sink is not None and each == 1:
                self._hidden_sink(slots, positions, made)
            if ends and self._end is not None:
                drawn, wrong = self._end(logits, slots)
                self._drawn[:rows].copy_(drawn)
                self._wrong[:rows].copy_(wrong)

        return run

    def _hidden_of(self, steps: list[StepInput]) -> Tensor:
        """Of a step, or of two micro-batches, whose collectives then go on under each other's compute."""
        parts = [self._model.hidden(step, self._cache, self._backends) for step in steps]
        if len(parts) == 1:
            return drive(parts[0])
        self._launcher.threaded(True)
        try:
            return torch.cat(interleave(parts[0], parts[1]))
        finally:
            self._launcher.threaded(False)

    def find(self, plan: StepPlan, draws: bool = False) -> Key | None:
        """The bucket that holds the plan's step; None when it must be launched op by op. Once a step.

        ``draws``: whether all its rows can be drawn by ``end``.
        """
        self.uncaptured = False
        rows = plan.decode
        padded = 0 if plan.agreed is None else plan.agreed.padded_tokens
        each = 1 if padded and not plan.rows else most_each(plan)  # without rows: other replicas have some
        if rows.rows > self._rows[-1] or not 1 <= each <= self._options.most_each:
            return None
        longest = int(rows.start.max(initial=0)) + each
        if longest > self._contexts[-1] or padded > MOST_PADDED:
            return None
        bucket = _bucket(self._rows, rows.rows) if rows.rows else 0
        ends = draws and each == 1 and bool(bucket) and self._end is not None
        key = Key(bucket, each, _bucket(self._contexts, longest), plan.micro_batches, padded, ends)
        if plan.micro_batches > 1 and not self._options.micro_batches:
            return None
        if not self._options.lazy:
            return key
        if padded:  # rows that are filled up may be more than were agreed on
            if bucket * each > padded or not self._model.capturable(padded):
                return None
        elif self._options.exact and not self._model.capturable(bucket * each):
            return None
        if each > 1 or padded:
            self._met[key] = met = self._met.get(key, 0) + 1
            if met < WORTH_CAPTURING:
                self.uncaptured = self._captures
                return None
        return key

    def run(self, key: Key, plan: StepPlan, buffer: StagingBuffer) -> Replayed:
        """Replays a step. What it gives is valid until the next call.

        Rows of fewer tokens than others are filled up; what is computed of the filling is nobody's.
        """
        rows = plan.decode.rows
        each = key.each
        if (views := self._views.get((rows, each))) is None:
            self._views[rows, each] = views = self._slots[:rows], self._logits[: rows * each]
        slots, logits = views
        if self._on_host is not None and each == 1:
            self._on_host[:rows] = plan.decode.slot
            self._on_host[rows : key.rows] = self._spare
            staged = [slots]
        else:
            staged = self._builder.stage_decode(plan, 0 if even(plan, each) else each, buffer)
            slots.copy_(staged[0])
            self._slots[rows : key.rows] = self._spare
        if key in self._replays:
            self.replay(key)
        elif self._captures and self._model.mesh.launcher.direct:
            self.uncaptured = True
            self._capture_now(key)
        else:
            self._closure(key)()

        def left() -> StepRows:
            ids, positions = self._ids[: rows * each], self._positions[: rows * each]
            return StepRows(**self._builder.decode_rows(plan, staged, ids, positions))

        drawn = None
        if key.ends:
            drawn = Drawn(self._drawn.numpy()[:rows].copy(), self._wrong.numpy()[:rows].copy())
        return Replayed(logits, left, drawn)

    def hidden(self, key: Key, rows: int) -> Tensor:
        """[rows * tokens of each, hidden] of the step replayed last, valid until the next."""
        return self._hidden[: rows * key.each]

    def replay(self, key: Key) -> None:
        """Launches the captured step of ``key`` on what its columns hold."""
        replay = self._replays.get(key)
        assert replay is not None, f"no capture of {key}"
        replay()
        self.replayed += 1

    def forget(self) -> None:
        """An epoch has ended: what was captured lazily may name its memory, and what was met is forgotten.

        No replay may be under way.
        """
        if self._options.lazy:
            self._replays.clear()
            self._met.clear()

    def _capture_now(self, key: Key) -> None:
        """Computes a step while capturing it. What cannot be captured was computed all the same."""
        try:
            self._replays.put(key, self._options.capture(self._closure(key)))
        except CannotCapture as error:
            log.warning("decode steps are launched op by op, and not replayed: %s", error)
            self._captures = self.uncaptured = False


def _bound(rows: int, each: int, context: int) -> Segment:
    """Rows of ``each`` tokens that end at ``context`` at most, as far as shapes depend on them."""
    zero = column([0] * rows)
    count = column([each] * rows)
    return Segment(slot=zero, gen=zero, start=column([context - each] * rows), count=count)


def _bucket(buckets: list[int], size: int) -> int:
    """The smallest that is not below ``size``."""
    return buckets[bisect_left(buckets, size)]


def _reserved(device: torch.device) -> int:
    """Bytes that torch holds of a GPU's memory."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
