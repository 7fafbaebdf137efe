"""A table of the work and the waits of each stream in a step, with a proof that nothing races.

    host         plans, stages columns, launches, reads results
    compute      the current stream: copies up, model, sampling, copies down
    collectives  collectives of steps in micro-batches, over NCCL (``StreamLauncher``)
    capture      compiles and captures decode steps (``CudaCapture``)
    copies       copies between caches and host memory, for transfers between groups (``CudaCopies``)

``EVENTS`` states for each event the recording stream and its work, and the waiting stream and its work.
Rehearsed engines must match the table edge by edge (``test_streams.py``). ``trace`` returns any number of
steps by the table, and ``races`` (``order.py``) proves that the waits are enough. Without any single
``needed`` wait the steps race. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from tests.rehearsal.order import HOST, Entry, Free, Record, Use, Wait

COMPUTE, COLLECTIVES, CAPTURE, COPIES = "compute", "collectives", "capture", "copies"
Place = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One kind of event: work of ``after`` is complete before ``before`` continues."""

    after: str
    before: str
    recorded: Place
    """File and function."""
    waited: Place
    needed: bool = True
    """False if something else orders the same work in every completed step; ``why`` explains the event."""
    why: str


_STAGING, _RESULT = "weft/runner/batch/staging.py", "weft/runner/result.py"
_LAUNCHER = "weft/parallel/launcher.py"
_GRAPHS, _STAGE = "weft/runner/graphs/graphs.py", "weft/parallel/host_stage.py"
_COPIES = "weft/disagg/transport/copies.py"

EVENTS: dict[str, Event] = {
    "staged": Event(
        after=COMPUTE,
        before=HOST,
        recorded=(_STAGING, "upload"),
        waited=(_STAGING, "wait"),
        needed=False,
        why="the host writes columns again when the last copy out of the buffer is over; a buffer goes back "
        "when its step's result was read, and that copy came later on the same stream",
    ),
    "copied": Event(
        after=COMPUTE,
        before=HOST,
        recorded=(_RESULT, "__init__"),
        waited=(_RESULT, "is_complete"),
        why="the host reads a step's result when the copies have arrived",
    ),
    "forked": Event(
        after=COMPUTE,
        before=COLLECTIVES,
        recorded=(_LAUNCHER, "launch"),
        waited=(_LAUNCHER, "launch"),
        why="a collective reads what a micro-batch computed",
    ),
    "joined": Event(
        after=COLLECTIVES,
        before=COMPUTE,
        recorded=(_LAUNCHER, "launch"),
        waited=(_LAUNCHER, "result"),
        why="a micro-batch goes on with what the collective made, and its operand's memory may be used again",
    ),
    "down": Event(
        after=COMPUTE,
        before=HOST,
        recorded=(_STAGE, "down"),
        waited=(_STAGE, "_wait"),
        why="a collective on the host reads what the device computed",
    ),
    "before capture": Event(
        after=COMPUTE,
        before=CAPTURE,
        recorded=(_GRAPHS, "__call__"),
        waited=(_GRAPHS, "__call__"),
        why="a step is computed once before it is captured, on what came before it",
    ),
    "after capture": Event(
        after=CAPTURE,
        before=COMPUTE,
        recorded=(_GRAPHS, "__call__"),
        waited=(_GRAPHS, "__call__"),
        why="later steps read what that step wrote",
    ),
    "computed": Event(
        after=COMPUTE,
        before=COPIES,
        recorded=(_COPIES, "mark"),
        waited=(_COPIES, "_after"),
        why="what leaves for another group is copied out of the caches when a pass has written it",
    ),
    "out": Event(
        after=COPIES,
        before=HOST,
        recorded=(_COPIES, "_recorded"),
        waited=(_COPIES, "ended"),
        why="the host digests and sends what is in the ring when the copy has arrived; until then the block "
        "is not free, and until its receiver has answered the slot is not written again",
    ),
    "in": Event(
        after=COPIES,
        before=HOST,
        recorded=(_COPIES, "_recorded"),
        waited=(_COPIES, "_wait"),
        why="a room has landed, and steps read its blocks, when what came is in them; only then is the inbox "
        "written again",
    ),
}

MOVES = frozenset({"computed", "out", "in"})
"""Events of transfers between groups. Engines without a role have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of the steps of a trace."""

    depth: int = 2
    """Steps in flight, and staging buffers."""
    form: str = "whole"
    """"whole", "micro-batches", "host" (collectives through host memory) or "captured"."""
    layers: int = 2


def trace(steps: int, shape: Shape, without: str = "") -> list[Entry]:
    """Return ``steps`` steps as the engine launches and reads them, without the waits for the event
    ``without``."""
    return [
        e
        for e in _steps(steps, shape)
        if not (isinstance(e, Wait) and str(e.event).startswith(f"{without}:") and without)
    ]


def _steps(steps: int, shape: Shape) -> Iterator[Entry]:
    reading = 0
    for step in range(steps):
        yield from _launch(step, shape)
        if step - reading + 1 >= shape.depth:
            yield from _read(reading)
            reading += 1
    for step in range(reading, steps):
        yield from _read(step)


def _launch(step: int, shape: Shape) -> Iterator[Entry]:
    ring = step % shape.depth
    if step >= shape.depth:
        yield Wait(HOST, f"staged:{ring}")
    host, device = f"columns {ring}", f"columns {ring} on the device"
    if shape.form == "captured":
        device = "the graphs' columns"  # one address for all steps; the stream orders its users
    yield Use(HOST, "stage", writes=(host,))
    yield Use(COMPUTE, "copy up", reads=(host,), writes=(device,))
    yield Record(COMPUTE, f"staged:{ring}")
    yield from _forward(step, shape, device)
    yield Use(COMPUTE, "sample", reads=("logits", device), writes=("slot state", f"output {step}"))
    yield Use(COMPUTE, "copy down", reads=(f"output {step}",), writes=(f"result {step}",))
    yield Free(f"output {step}", COMPUTE)
    yield Record(COMPUTE, f"copied:{step}")


def _read(step: int) -> Iterator[Entry]:
    yield Wait(HOST, f"copied:{step}")
    yield Use(HOST, "read", reads=(f"result {step}",))


def _forward(step: int, shape: Shape, columns: str) -> Iterator[Entry]:
    reads, writes = ("weights", "slot state", columns), ("caches", "logits")
    if shape.form == "whole":
        yield Use(COMPUTE, "model", reads=reads, writes=writes)
    elif shape.form == "captured":
        if step == 0:
            yield Record(COMPUTE, "before capture:")
            yield Wait(CAPTURE, "before capture:")
            yield Use(CAPTURE, "first", reads=reads, writes=(*writes, "the graphs' memory"))
            yield Record(CAPTURE, "after capture:")
            yield Wait(COMPUTE, "after capture:")
        yield Use(COMPUTE, "replay", reads=reads, writes=(*writes, "the graphs' memory"))
    else:
        yield from _layers(step, shape, reads, writes)


def _layers(step: int, shape: Shape, reads: tuple[str, ...], writes: tuple[str, ...]) -> Iterator[Entry]:
    """Yield layers with a collective each: two micro-batches in turn, or the whole step by the host."""
    parts = (0, 1) if shape.form == "micro-batches" else (0,)
    sums: dict[int, str] = {}
    flying: dict[int, tuple[str, str, str]] = {}
    for layer in range(shape.layers):
        for part in parts:
            if part in flying:
                yield from _join(*flying.pop(part))
            of = f"{step}.{layer}.{part}"
            before = (sums[part],) if part in sums else ()
            yield Use(COMPUTE, f"layer {of}", reads=(*reads, *before), writes=("caches", f"partial {of}"))
            sums[part] = f"sum {of}"
            if shape.form == "host":
                yield from _through_host(of)
                continue
            yield Record(COMPUTE, f"forked:{of}")
            yield Wait(COLLECTIVES, f"forked:{of}")
            yield Use(COLLECTIVES, "sum", reads=(f"partial {of}",), writes=(f"sum {of}",))
            yield Record(COLLECTIVES, f"joined:{of}")
            flying[part] = (f"joined:{of}", f"partial {of}", f"sum {of}")
    for one in flying.values():
        yield from _join(*one)
    yield Use(COMPUTE, "head", reads=tuple(sums.values()), writes=writes)
    for made in sums.values():
        yield Free(made, COLLECTIVES, frozenset({COMPUTE}))


def moves(transfers: int, without: str = "") -> list[Entry]:
    """Return ``transfers`` transfers of one step each through one slot, without the waits for ``without``."""
    return [
        e
        for transfer in range(transfers)
        for e in _moves(transfer)
        if not (isinstance(e, Wait) and without and str(e.event).startswith(f"{without}:"))
    ]


def _moves(transfer: int) -> Iterator[Entry]:
    yield Use(COMPUTE, "pass", reads=("weights",), writes=("caches",))
    yield Record(COMPUTE, f"computed:{transfer}")
    yield Wait(COPIES, f"computed:{transfer}")
    yield Use(COPIES, "copy out", reads=("caches",), writes=("through", "slot"))
    yield Record(COPIES, f"out:{transfer}")
    yield Wait(HOST, f"out:{transfer}")
    yield Use(HOST, "digest and send", reads=("slot",))
    yield Use(HOST, "take in", reads=("slot",), writes=("inbox",))
    yield Use(COPIES, "copy in", reads=("inbox",), writes=("through", "other caches"))
    yield Record(COPIES, f"in:{transfer}")
    yield Wait(HOST, f"in:{transfer}")
    yield Use(COMPUTE, "pass", reads=("other caches",), writes=("caches",))


def _join(event: str, partial: str, made: str) -> Iterator[Entry]:
    yield Wait(COMPUTE, event)
    yield Free(partial, COMPUTE)


def _through_host(of: str) -> Iterator[Entry]:
    yield Use(COMPUTE, "copy down", reads=(f"partial {of}",), writes=(f"pinned {of}",))
    yield Record(COMPUTE, f"down:{of}")
    yield Wait(HOST, f"down:{of}")
    yield Use(HOST, "sum", reads=(f"pinned {of}",), writes=(f"summed {of}",))
    yield Use(COMPUTE, "copy up", reads=(f"summed {of}",), writes=(f"sum {of}",))
    yield Free(f"partial {of}", COMPUTE)


def names_of(edges: Set[tuple[str, tuple[str, str], str, tuple[str, str]]]) -> set[str]:
    """Return the names in the table of a rehearsal's waits ``edges``. Every wait must be in the table."""
    known = {(e.after, e.recorded, e.before, e.waited): name for name, e in EVENTS.items()}
    assert not edges - known.keys(), "the table lacks these"
    return {known[edge] for edge in edges}
