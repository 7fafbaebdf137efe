"""Decode steps captured and replayed: one launch replaces hundreds. On a GPU the captures are CUDA graphs.

If every row of a decode step has the same number of tokens, the step is a function of the slots of its rows:
ids, positions, block tables and cache writes are derived on the device. Rows with fewer drafts are padded. So
a graph reads one external column, at a fixed address:

    columns    slots [most rows], filled before each replay; rows beyond the step's rows name the spare slot.
               On a GPU the element after the last row is a flag: the step draws its tokens. One copy per
               step fills the slots, the flag and the other columns of the step
    logits     [most tokens, vocab]; likewise hidden states, ids and positions: outputs of a replay,
               read before the next replay

The stream orders everything: a replay follows the sampling of the previous step. Graphs are captured at start
for buckets of rows and of context; both bound the launch grids. ``weft/runner/graphs/mixed.py`` captures
small steps with prompts. Other steps are launched op by op.

With NCCL collectives, a graph holds the communicator of one epoch. All ranks capture such a graph in the same
step, when a step first needs the graph. The graph is dropped with the epoch, before the communicator ends.

On a CPU, a capture is a list of operator calls (weft/runner/graphs/programs.py), made when a step first needs
the capture.

INVARIANT for ranks that communicate within a step: on every rank, the plan, the settings and the earlier
plans of the epoch determine the computation of a step, and the order, kinds and sizes of its collectives. So
``find`` must not depend on anything else, for example on the captures of one rank. A rank decides alone only
between replay, capture and launch of the same calls. Captures name the memory of the epoch and end with the
epoch.

On a GPU every capture with one token per row also draws (``Key.ends``): the flag after the slots decides
whether the draw has an effect. So a step that cannot draw, for example with logprobs, uses the same capture.
On a CPU captures that draw are separate.

A spare row is at position 0 of a sequence without blocks. The row reads and writes the null block, which no
real row reads, and its logits are dropped.
"""

from __future__ import annotations

import itertools
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.common.log import get_logger
from weft.common.progress import progress_bar
from weft.common.recent import Recent
from weft.models.decoder import Model
from weft.ops.draw import DRAWS
from weft.ops.low_rank import AdapterRows
from weft.overlap.bucket_trials import MOST, Bucket
from weft.overlap.interleave import interleave
from weft.parallel.comm import drive
from weft.parallel.launcher import Launcher
from weft.runner.batch.batch import BatchBuilder, StepRows
from weft.runner.batch.staging import StagingBuffer, even, most_each
from weft.runner.graphs.programs import CannotCapture
from weft.runner.graphs.timing import Timing, Timings
from weft.runner.result import Drawn
from weft.runner.sampling.sampler import End
from weft.runner.slot_state import SlotState
from weft.types.exchange import PADS, UNAGREED, Exchange
from weft.types.plan import PlannedRows, Segment, StepPlan, column

log = get_logger(__name__)

Tensor = torch.Tensor


class Key(NamedTuple):
    """Bucket of steps that share one capture."""

    rows: int
    each: int
    """Tokens per row."""
    context: int
    """Maximum number of positions of a row."""
    micro_batches: int = 1
    """2 for a step in micro-batches."""
    padded: int = 0
    """Token count that the replicas agreed on (``Agreement.padded_tokens``); 0 without an agreement."""
    ends: bool = False
    """True if the captured step also samples its tokens and advances its slots; on a GPU only if flagged."""
    adapts: bool = False
    """True if rows may have LoRA adapters."""


class Replayed(NamedTuple):
    """Outputs of a step that was replayed, captured or launched by ``DecodeGraphs.run``."""

    logits: Tensor
    """[tokens, vocab], valid until the next step."""
    rows: Callable[[], StepRows]
    """Callable that returns the rows for sampling. Call before the next step."""
    drawn: Drawn | None
    """Sampled tokens, if the step drew tokens: the step needs no further sampling. Else None."""
    timing: Timing | None
    """Time of the replay on the device. None if the step was not replayed, or is not measured."""


Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Maps a function over fixed tensors to a function that repeats the same work. Tests pass the identity."""

MOST_ROWS = 512
"""Largest number of rows to capture. In larger steps the cost of launches is small."""
MOST_EXACT = 64
"""Largest number of rows with exact captures, one per number of rows."""
MOST_DRAFTED = 32
"""Largest number of rows with several tokens each to capture on a GPU. Larger steps compute long enough to
hide their launches, and would need more captures."""
MOST_PADDED = PADS[-1]
"""Largest agreed token count of a replica for which steps are captured. Each agreed count has its own
capture. A step above this limit contains a prompt on some replica."""
WORTH_CAPTURING = 2
"""Number of steps of a bucket before a lazy capture, for settings with many buckets. With drafts some buckets
occur only once, and a capture costs about as much as two replays save."""
MOST_KEPT = 512
"""Maximum captures of a runner on a CPU. A capture takes half a kilobyte per operator call: tens to hundreds
of kilobytes in total."""
FIRST_CONTEXT = 2048
"""Smallest context bucket, in positions."""
MORE_MEMORY = "if memory is short, lower --gpu-memory-utilization"
"""Advice in the log after a failed capture."""


def row_buckets(most: int) -> list[int]:
    """Return bucket sizes 1, 2, 4, 8, 16, 24, 32, ..; steps of 32 from 128 on. The last bucket is ``most``,
    limited to ``MOST_ROWS``."""
    most = min(most, MOST_ROWS)
    fine = [1, 2, 4, *range(8, 128, 8), *range(128, MOST_ROWS + 1, 32)]
    return [rows for rows in fine if rows < most] + [most]


def context_buckets(most: int) -> list[int]:
    """Return context buckets in positions: ``FIRST_CONTEXT``, four times as many, and so on. The last bucket
    is ``most``, the longest sequence."""
    buckets = []
    context = FIRST_CONTEXT
    while context < most:
        buckets.append(context)
        context *= 4
    return [*buckets, most]


def each_buckets(most: int) -> list[int]:
    """Return buckets of tokens per row: powers of two, and ``most``."""
    return [1 << bits for bits in range(most.bit_length()) if 1 << bits < most] + [most]


def obstacle(model: Model, backends: Backends) -> str | None:
    """Return the reason why decode steps of this model cannot be captured; None if capture is possible."""
    if model.device.type != "cpu" and model.mesh.obstacle is not None:
        return model.mesh.obstacle
    if model.asking:
        return f"{', '.join(model.asking)} reads a value from the device in the middle of a step"
    if not backends.capturable:
        return "the attention backend needs the host in every step"
    return None


class CudaCapture:
    """Captures functions as CUDA graphs in one shared memory pool, so at most one graph may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run ``run`` once uncaptured and capture ``run`` as a CUDA graph on a separate stream. Return the
        replay.

        Raises CannotCapture if the capture fails, for example for lack of memory. Errors of the run itself
        pass through.
        """
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                run()  # compiles kernels and allocates workspaces, which is impossible inside a capture
        finally:
            here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # If the end of a capture fails, ``torch.cuda.graph`` leaves its stream current: the outer context
            # restores the stream. Other threads may use the device meanwhile, so only calls of this thread
            # are captured and checked.
            with (
                torch.cuda.stream(here),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                run()
        except RuntimeError as error:
            raise CannotCapture(str(error)) from error
        return graph.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Options for the capture of decode steps."""

    max_rows: int
    """Maximum rows of a step."""
    capture: Capture
    progress: bool = False
    """True to show a progress bar on stderr."""
    most_each: int = 1
    """Maximum tokens of a row."""
    keeps_hidden: bool = True
    """True if the drafter reads the hidden states of a step."""
    micro_batches: bool = False
    """True to capture steps in two micro-batches as well, both in one graph. Requires collectives that can be
    captured."""
    lazy: bool = False
    """True to capture when a step first needs the graph. ``capture`` must then compute the step too, even if
    capture fails with CannotCapture."""
    exact: bool = False
    """True to capture for exact row counts instead of buckets (CPU)."""
    timing: Callable[[], Timing] | None = None
    """Makes the measurement of a replay; None: no replay is measured."""
    prompt_tokens: int = 0
    """Most prompt tokens of captured steps with prompts (``weft.runner.graphs.mixed``); 0: none."""


class DecodeGraphs:
    """Captured decode steps of one runner. Used from the thread of the runner only."""

    works: bool
    """False after a failed capture: nothing more is captured."""
    splits: bool
    """False if steps in micro-batches are not captured, or after such a capture has failed."""

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
        """Capture all buckets on spare rows now, unless ``options.lazy``.

        ``max_len``: longest sequence. ``launcher``: launcher of the model's collectives. ``hidden_sink``:
        called at the end of steps with one token per row, see ``Drafter.hidden_sink``. ``end``: samples such
        steps inside the capture if the step ``draws`` (``find``); None if drafts are made after each step.
        """
        self.has_hidden_sink = hidden_sink is not None
        """True if replays call a ``hidden_sink``."""
        self._hidden_sink = hidden_sink
        self.replayed = 0
        """Number of steps that ran as a graph."""
        self.uncaptured = False
        """True if the last step was slower than later steps of the same bucket will be: the later steps are
        replayed."""
        self._model, self._cache, self._backends, self._builder = model, cache, backends, builder
        self._rows, self._drafted, self._each = _buckets(options)
        self._launcher = launcher or Launcher()
        self._options, self._contexts = options, context_buckets(max_len)
        most = self._rows[-1]
        device = model.device
        self._spare = state.spare
        tokens = max(most, self._drafted[-1] * options.most_each)
        width = _width(most, tokens, options) + 1 + state.most_appended  # 1: the flag
        self._columns = torch.full((width,), state.spare, dtype=torch.int64, device=device)
        """Columns of the step, at a fixed address. The first ones are the slots of the rows."""
        self._on_host = self._columns.numpy() if device.type == "cpu" else None
        """Host view of ``_columns``, on a CPU: the host may write, because the previous step is complete."""
        self._logits = torch.empty((tokens, model.spec.vocab_size), dtype=model.dtype, device=device)
        self._hidden = torch.empty((tokens, model.width), dtype=model.dtype, device=device)
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        # On a CPU an end also advances padding rows, which have no sequence: only exact captures have ends.
        self._flagged = device.type != "cpu"  # such an end skips padding rows, and steps without the flag
        self._end = end if options.exact or self._flagged else None
        self._drawn = torch.zeros(most, dtype=torch.int64, device=device)
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        """Views by (rows, tokens per row): slots, logits and drawn tokens."""
        self._written: tuple[np.ndarray, int] | None = None
        """Slots and number of rows in ``_columns``, on a CPU; None after other columns."""
        # On a GPU an evicted graph could still be running, so GPU graphs are dropped only with the epoch.
        kept = MOST_KEPT if device.type == "cpu" else sys.maxsize
        self._replays: Recent[Key, Callable[[], None]] = Recent(kept)
        self._seen: dict[Key, int] = {}
        self._timings: Timings[Key] = Timings(options.timing, MOST)
        self.works, self.splits = True, options.micro_batches
        if not options.lazy:
            self._capture(options)

    @property
    def adapts(self) -> bool:
        """True if steps with adapters can be captured."""
        adapters = self._model.adapters
        return adapters is not None and adapters.capturable

    @torch.inference_mode()
    def _capture(self, options: GraphOptions) -> None:
        """Capture every bucket with the spare slot, and log the time and the memory. After a failed capture,
        log a warning and capture nothing more: the steps of other buckets are launched op by op."""
        began = time.monotonic()
        before = reserved(self._columns.device)
        micro_batches = (1, 2) if options.micro_batches else (1,)
        buckets = itertools.product(self._rows, self._each, reversed(self._contexts), micro_batches)
        adapts = (False, True) if self.adapts else (False,)
        ends = self._end is not None
        keys = [
            Key(*key, ends=ends and key[1] == 1, adapts=one)
            for key in buckets
            for one in adapts
            if key[0] >= key[3]
        ]
        keys = [key for key in keys if key.each == 1 or key.rows <= self._drafted[-1]]
        # The largest graph comes first, so that the smaller graphs fit into its memory.
        keys.sort(key=lambda key: key.rows * key.each, reverse=True)
        for key in progress_bar(keys, title="capturing decode", unit="graph", shown=options.progress):
            try:
                self._replays.put(key, options.capture(self._closure(key)))
            except (CannotCapture, RuntimeError) as error:
                log.warning(
                    "decode steps of up to %d tokens are not captured as graphs: %s; %s",
                    key.rows * key.each,
                    error,
                    MORE_MEMORY,
                )
                self.works = False
                break
        log.info(
            "%d CUDA graphs for decode, up to %d rows, captured in %.1f s; they take %d MiB",
            len(self._replays),
            self._rows[-1],
            time.monotonic() - began,
            (reserved(self._columns.device) - before) >> 20,
        )

    def _closure(self, key: Key) -> Callable[[], None]:
        """Return a function that computes a step of bucket ``key`` for the slots in ``_columns``. The
        function writes logits, positions, hidden states, ids and, with ``key.ends``, sampled tokens into the
        buffers of this object, and calls ``hidden_sink``."""
        rows, each, context, micro_batches, padded, ends, adapts = key
        tokens = slice(rows * each)
        slots, flag = self._columns[:rows], self._columns[rows : rows + 1]
        logits = self._logits[tokens]
        positions = self._positions[tokens]
        hidden = self._hidden[tokens]
        ids = self._ids[tokens]
        # Micro-batches split rows by number, as ``split`` does. Padding rows come last.
        parts = slots.chunk(micro_batches)
        bounds = [bound(len(part), each, context) for part in parts]
        # Micro-batches of different size must use one form of dispatch.
        exchange = Exchange(rows=padded or _exchanged(key)) if padded or micro_batches > 1 else UNAGREED

        def run() -> None:
            # Build the inputs inside the captured function: slots change between replays, shapes do not.
            steps = [
                replace(self._builder.decode(part, of, adapts=adapts), exchange=exchange)
                for part, of in zip(parts, bounds, strict=True)
            ]
            states = self._hidden_of(steps)
            if self._options.keeps_hidden:
                hidden.copy_(states)
            if each > 1:
                ids.copy_(torch.cat([step.ids for step in steps]))
            logits.copy_(drive(self._model.logits(states, _adapters_of(steps))))
            positions.copy_(torch.cat([step.positions for step in steps]))
            if self._hidden_sink is not None and each == 1:
                self._hidden_sink(slots, positions, states)
            if ends and self._end is not None:
                self._drawn[:rows].copy_(self._end(logits, slots, flag))

        return run

    def _hidden_of(self, steps: list[StepInput]) -> Tensor:
        """Return the hidden states of a step, or of two interleaved micro-batches.

        With two micro-batches, the collectives of each overlap the compute of the other.
        """
        parts = [self._model.hidden(step, self._cache, self._backends) for step in steps]
        if len(parts) == 1:
            return drive(parts[0])
        self._launcher.threaded(True)
        try:
            return torch.cat(interleave(parts[0], parts[1]))
        finally:
            self._launcher.threaded(False)

    def find(self, plan: StepPlan, draws: bool = False, adapts: bool = False) -> Key | None:
        """Return the bucket for the step of ``plan``; None if the step must be launched op by op.

        Call exactly once per step: the call counts steps per bucket and sets ``uncaptured``. ``draws``: True
        if ``end`` can draw all rows. ``adapts``: True if a row has an adapter. With lazy captures, a bucket
        with padding or several tokens per row is returned from its ``WORTH_CAPTURING``-th step on.
        """
        self.uncaptured = False
        padded = 0 if plan.agreed is None else plan.agreed.padded_tokens
        # A replica without rows takes part in the step of the other replicas, with padding rows of one token.
        each = 1 if padded and not plan.rows else most_each(plan)
        found = self._bucket_of_rows(plan.decode, each)
        if found is None or padded > MOST_PADDED:
            return None
        bucket, each, _ = found
        ends = (draws or self._flagged) and each == 1 and bool(bucket) and self._end is not None
        key = Key(*found, plan.micro_batches, padded, ends, adapts)
        # With an agreement, a replica with few rows may have an empty micro-batch, which cannot be captured.
        if plan.micro_batches > 1 and (padded or not self._options.micro_batches):
            return None
        if not self._options.lazy:
            return key
        if padded:  # rounding up to the bucket may exceed the agreed token count
            if bucket * each > padded or not self._model.capturable(padded):
                return None
        elif not self._model.capturable(_exchanged(key)):
            return None
        if each > 1 or padded:
            self._seen[key] = seen = self._seen.get(key, 0) + 1
            if seen < WORTH_CAPTURING:
                self.uncaptured = self.works
                return None
        return key

    def bucket_of(self, plan: PlannedRows) -> Bucket | None:
        """Return the bucket of a plan for which both a whole step and a pair of micro-batches can be
        captured; None if there is none.

        The answer depends on the failed captures of this rank, so only the engine may ask: the frozen plan
        tells the other ranks about ``micro_batches``.
        """
        if not (self.works and self.splits):
            return None
        found = self._bucket_of_rows(plan.decode, most_each(plan))
        if found is None:
            return None
        forms = (_exchanged(Key(*found, micro_batches)) for micro_batches in (1, 2))
        return found if self._model.capturable(*forms) else None

    def _bucket_of_rows(self, rows: Segment, each: int) -> Bucket | None:
        """Return the bucket of decode rows with at most ``each`` tokens; None beyond the largest bucket."""
        if not 1 <= each <= self._each[-1]:
            return None
        each = _bucket(self._each, each)
        if rows.rows > (self._rows if each == 1 else self._drafted)[-1]:
            return None
        longest = int(rows.start.max(initial=0)) + each
        if longest > self._contexts[-1]:
            return None
        bucket = _bucket(self._rows, rows.rows) if rows.rows else 0
        return Bucket(bucket, each, _bucket(self._contexts, longest))

    def run(self, key: Key, plan: StepPlan, buffer: StagingBuffer, draws: bool = False) -> Replayed:
        """Run the step of ``plan`` as a replay; else capture the step while running it; else launch op by op.
        Sets ``uncaptured`` if the step was captured. Outputs stay valid until the next call.

        Rows with fewer than ``key.each`` tokens are padded; outputs of the padding are never read. ``key``,
        ``draws``: result and argument of ``find``. ``drawn`` of the result is None unless the step draws.
        """
        rows = plan.decode.rows
        each = key.each
        if (views := self._views.get((rows, each))) is None:
            views = self._columns[:rows], self._logits[: rows * each], self._drawn[:rows]
            self._views[rows, each] = views
        slots, logits, drawn = views
        draws = draws and key.ends
        # One token per row on a CPU: write the slots in place. Otherwise stage columns through ``buffer``.
        if self._on_host is not None and each == 1:
            self._write(self._on_host, plan.decode.slot, key.rows)
            staged = [slots]
        else:
            self._written = None
            padded, flag = 0 if even(plan, each) else each, DRAWS if draws else self._spare
            staged = self._builder.stage_decode(plan, padded, buffer, key.rows, flag, self._columns)
        # Every branch below launches the same calls in the same order, so ranks may take different branches.
        timing = None
        if key in self._replays:
            timing = self._timings.make(key)
            if timing is not None:
                timing.begin()
            self.replay(key)
            if timing is not None:
                timing.end()
        elif self.works and (self.splits or key.micro_batches == 1) and self._model.mesh.launcher.direct:
            self.uncaptured = True
            self._capture_now(key)
        else:
            self._closure(key)()

        def sampled_rows() -> StepRows:
            ids, positions = self._ids[: rows * each], self._positions[: rows * each]
            return StepRows(**self._builder.decode_rows(plan, staged, ids, positions))

        return Replayed(logits, sampled_rows, Drawn(drawn) if draws else None, timing)

    def _write(self, on_host: np.ndarray, slots: np.ndarray, rows: int) -> None:
        """Write ``slots``, padded with the spare slot to ``rows`` rows. Does nothing if ``slots`` is the
        array of the last call: a step that repeats the rows of the last step has the same array."""
        if self._written is None or self._written[0] is not slots or self._written[1] != rows:
            on_host[: len(slots)] = slots
            on_host[len(slots) : rows] = self._spare
            self._written = slots, rows

    def hidden(self, key: Key, rows: int) -> Tensor:
        """Return hidden states [rows * tokens per row, hidden] of the last replayed step, valid until the
        next step."""
        return self._hidden[: rows * key.each]

    def replay(self, key: Key) -> None:
        """Launch the captured step of ``key`` on the present contents of ``_columns``."""
        replay = self._replays.get(key)
        assert replay is not None, f"no capture of {key}"
        replay()
        self.replayed += 1

    def forget(self) -> None:
        """Drop lazy captures and step counts at the end of an epoch: captures may name memory of the epoch.

        No replay may be running.
        """
        if self._options.lazy:
            self._replays.clear()
            self._seen.clear()
            self._timings.clear()

    def _capture_now(self, key: Key) -> None:
        """Capture a step while computing the step. If capture is impossible, log once and capture nothing
        from now on; after a failure in micro-batches, only whole steps. The step is computed in all cases."""
        try:
            self._replays.put(key, self._options.capture(self._closure(key)))
        except CannotCapture as error:
            self.uncaptured = False
            if key.micro_batches > 1:
                self.splits = False
                log.warning("decode steps in micro-batches are not captured as graphs: %s", error)
                return
            self.works = False
            log.warning("decode steps are not captured as graphs: %s", error)


def _adapters_of(steps: Sequence[StepInput]) -> AdapterRows | None:
    """Return the adapters of the rows of all parts of a captured step."""
    numbers = [step.adapters.numbers for step in steps if step.adapters is not None]
    return AdapterRows(torch.cat(numbers) if len(numbers) > 1 else numbers[0], ()) if numbers else None


def _buckets(options: GraphOptions) -> tuple[list[int], list[int], list[int]]:
    """Return three lists of buckets: of rows, of rows with several tokens each, and of tokens per row. The
    second list is a prefix of the first list."""
    if options.exact:
        rows = [*range(1, min(options.max_rows, MOST_EXACT) + 1)]
        return rows, rows, [*range(1, options.most_each + 1)]
    drafted = row_buckets(min(options.max_rows, MOST_DRAFTED))
    return row_buckets(options.max_rows), drafted, each_buckets(options.most_each)


def _width(rows: int, tokens: int, options: GraphOptions) -> int:
    """Return the maximum total length of the columns of a step: the slots of ``rows`` rows and, with drafts,
    three columns of at most ``tokens`` numbers and two columns of drafts."""
    return rows + (6 * tokens if options.most_each > 1 else 0)


def bound(rows: int, each: int, context: int) -> Segment:
    """Return ``rows`` rows of ``each`` tokens that end at ``context``: upper bounds for shapes."""
    zero = column([0] * rows)
    count = column([each] * rows)
    return Segment(slot=zero, gen=zero, start=column([context - each] * rows), count=count)


def _exchanged(key: Key) -> int:
    """Return the tokens of the larger micro-batch, or of the whole step."""
    return -(-key.rows // key.micro_batches) * key.each


def _bucket(buckets: list[int], size: int) -> int:
    """Return the smallest bucket of at least ``size``."""
    return buckets[bisect_left(buckets, size)]


def reserved(device: torch.device) -> int:
    """Return the bytes of GPU memory reserved by torch; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
