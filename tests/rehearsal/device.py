"""A simulated GPU: the host computes, and the device only records operators.

Tensors on ``cuda`` are fake tensors of torch: shapes, dtypes, strides and devices, without values. Tensors on
the host are real, and so are plans, columns and staging buffers. Every operator call passes through
``Rehearsal``:

- An operator on the host runs.
- An operator on the device runs as a fake. Operands on two devices raise an error. So does every wait of the
  host for the device (``item``, ``nonzero``, a boolean index, a copy through memory that is not pinned),
  except in the functions of ``WAITS``.
- The tensors read and written, and the stream, are added to a trace (``order.py``), which is checked for
  races.
- In a capture, an operator that a CUDA graph cannot hold raises an error. A replay checks the assumptions of
  the capture.

With ``values`` each fake tensor also has its values on the host (``shadow``), and operators run on these
values as well. The tokens of a rehearsed engine then equal the tokens of a real engine.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.calls import again, effects, here, label_of, mapped, reads_shape, tensors_of
from tests.rehearsal.memory import Memory, Piece
from tests.rehearsal.order import HOST, Checker, Entry, Free, Use

Tensor = torch.Tensor
aten = torch.ops.aten

_MOVES = (aten.to, aten.pin_memory)
_COPIES_NUMBERS = (aten.index_put_, aten.index_put, aten._index_put_impl_)
"""Operators that copy a host number to the device. Other operators get the number with the launch."""
_FACTS = {torch.ops.prim.device.default, aten.is_pinned.default, aten.record_stream.default}
COMPUTE = "compute"
"""The name of the initial stream."""

#: (file, function) -> why the host may wait for the device there.
WAITS: dict[tuple[str, str], str] = {
    (
        "weft/moe/dispatch.py",
        "throughput",
    ): "sizes of an exact exchange: the host must know how many rows come",
    ("weft/ops/moe.py", "by_expert"): "torch's routed block, for float64 and where there are no kernels",
    ("weft/moe/balance.py", "rebalance"): "experts move, once in many steps: the host plans where to",
    ("weft/moe/balance.py", "_move"): "experts move: each rank writes down which go and which come",
    ("weft/moe/parallel.py", "set"): "experts have moved: the new map is written once",
    ("weft/moe/dispatch.py", "gather"): "a drafter's pass, of whose rows replicas have not agreed",
}


class HiddenWait(AssertionError):
    """The host would wait for the device."""


class OnHost(AssertionError):
    """An operator on the device has an operand on the host."""


class NotCapturable(AssertionError):
    """A CUDA graph cannot hold this call."""


class Races(AssertionError):
    """The trace has accesses without an order."""


@dataclass(slots=True)
class Capture:
    """The memory and calls of a graph during its capture."""

    born: int
    """Number of the first piece of memory that belongs to the graph."""
    reads: dict[str, Piece] = field(default_factory=dict)
    writes: dict[str, Piece] = field(default_factory=dict)
    calls: list[Callable[[], None]] = field(default_factory=list)
    """Calls that a replay runs again on the shadows."""
    saved: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Written shadows, with their values before the capture: a capture computes nothing."""
    own: dict[str, Piece] = field(default_factory=dict)
    """Pieces of memory made in the capture."""
    uses: int = 0
    """Number of captured accesses: kernels, copies and collectives."""
    checker: Checker = field(default_factory=Checker)
    """The checker for the captured streams, because captured work does not run yet."""


_active = threading.local()


def current() -> Rehearsal:
    """Return the rehearsal of this thread. Fail without an open rehearsal."""
    made: Rehearsal | None = getattr(_active, "rehearsal", None)
    assert made is not None, "a CUDA object is used outside a rehearsal"
    return made


class Rehearsal(TorchDispatchMode):
    """A simulated device. Open it with ``with``; it is valid for the opening thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, *, values: bool = False) -> None:
        super().__init__()
        self.values = values
        self.fake = FakeTensorMode()
        self.memory = Memory()
        self.checker = Checker()
        self.stream = COMPUTE
        """The current stream."""
        self.capture: Capture | None = None
        self.loading = True
        """True while weights are loaded: the host may wait."""
        self.waited: dict[tuple[str, str], int] = {}
        """(file, function) -> number of allowed waits of the host."""
        self.stand_in: Callable[[Tensor], None] = torch.Tensor.zero_
        """Fills host memory in place of a copy from the device, when there are no values."""
        self.operators: set[str] = set()
        """Names of the operators that ran on the device."""
        self.narrow: set[str] = set()
        """Operators with 8-bit float operands. GPU kernels support fewer dtypes than fake kernels."""
        self.labels: set[str] = set()
        """Labels of all entries of the trace."""
        self.variants: dict[str, set[Any]] = {}
        """Kernel -> requested forms. Each form is compiled at its first use."""
        self.device_seconds = 0.0
        """Seconds of the replays so far."""
        self.replay_seconds: Callable[[Capture], float] = lambda captured: 1e-3
        """Returns the made-up time of a replay on the device."""
        self.edges: set[tuple[str, tuple[str, str], str, tuple[str, str]]] = set()
        """Waits: (stream, place of the recorded event, waiting actor, place of the wait)."""

    def __enter__(self) -> Any:
        self._before = getattr(_active, "rehearsal", None)
        _active.rehearsal = self
        self._lift = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lift)
        _active.rehearsal = self._before

    # ---- the trace

    def note(self, entry: Entry) -> None:
        """Add an entry to the trace, or to the trace of the open capture."""
        if self.capture is not None:
            self.capture.uses += isinstance(entry, Use)
            self.capture.checker.take(entry)
            return
        self.checker.take(entry)

    def check(self, checker: Checker | None = None) -> None:
        """Raise ``Races`` if the trace of ``checker`` (default: the trace so far) has races."""
        found = (checker or self.checker).races
        if found:
            raise Races("\n".join([f"{len(found)} races:", *found[:10]]))

    def use(
        self, label: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, actor: str | None = None
    ) -> None:
        """Record an access to tensors by the current stream, or by ``actor``."""
        actor = actor or self.stream
        self.labels.add(label)
        read = [self.memory.piece(tensor, actor) for tensor in reads]
        written = [self.memory.piece(tensor, actor) for tensor in writes]
        for gone in self.memory.freed():
            self.note(Free(gone.name, gone.home, frozenset(gone.known)))
        for piece in (*read, *written):
            self.memory.use(piece, actor)
        if self.capture is not None:
            self._captured(label, read, written)
        read_names, written_names = (tuple(piece.name for piece in pieces) for pieces in (read, written))
        self.note(Use(actor, label, read_names, written_names))

    def host_writes(self, label: str, *tensors: Tensor) -> None:
        self.use(label, (), tensors, actor=HOST)

    def host_reads(self, label: str, *tensors: Tensor) -> None:
        self.use(label, tensors, (), actor=HOST)

    def _captured(self, label: str, read: list[Piece], written: list[Piece]) -> None:
        assert self.capture is not None
        for pieces, touched in ((read, self.capture.reads), (written, self.capture.writes)):
            for piece in pieces:
                if piece.name.startswith("host"):
                    raise NotCapturable(f"{label} touches memory of the host in a capture")
                if piece.born >= self.capture.born:
                    self.capture.own[piece.name] = piece
                else:
                    touched[piece.name] = piece

    # ---- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_of((*args, *kwargs.values()))
        device = kwargs.get("device")
        there = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not there and (device is None or torch.device(device).type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func.overloadpacket in _MOVES and func is not aten._to_copy.default:
            with self:
                return func.decompose(*args, **kwargs)
        if func in (aten._to_copy.default, aten.copy_.default):
            crossing = self._crossing(func, args, kwargs)
            if crossing is not None:
                return crossing
        if func is aten.is_pinned.default:
            return False
        return self._on_device(func, types, args, kwargs, tensors)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        packet = func.overloadpacket
        if packet is aten.is_pinned:
            return self.memory.piece(args[0], HOST).pinned
        if packet in (aten.pin_memory, aten._pin_memory):
            return self.pin(args[0].clone(), write=True)
        if kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def pin(self, tensor: Tensor, *, write: bool = False) -> Tensor:
        """Mark ``tensor`` as pinned and return it. ``write``: the host writes its values."""
        if self.capture is not None:
            raise NotCapturable("pinned memory is allocated in a capture")
        self.memory.piece(tensor, HOST).pinned = True
        if write:
            self.host_writes("pin_memory", tensor)
        return tensor

    def _crossing(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Copy between host and device. Return None if both ends are on the device."""
        if func is aten.copy_.default:
            to, source = args[0], args[1]
            free = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            up, down = not isinstance(source, FakeTensor), not isinstance(to, FakeTensor)
            if not up and not down:
                return None
            return self._up(to, source, free) if up else self._down(to, source, free)
        source, free = args[0], bool(kwargs.get("non_blocking", False))
        target = torch.device(kwargs.get("device") or source.device)
        if isinstance(source, FakeTensor) and target.type == "cuda":
            return None
        dtype = kwargs.get("dtype") or source.dtype
        if isinstance(source, FakeTensor):
            self.wait("a copy to the host")
            return self.values_of(source).to(dtype, copy=True)
        made = self.like(torch.empty(source.shape, dtype=dtype))
        return self._up(made, source, free)

    def _up(self, to: FakeTensor, source: Tensor, free: bool) -> Tensor:
        pinned = self.memory.piece(source, HOST).pinned
        if source.numel() == 0:
            pinned = free = True
        if not (pinned and free):
            self.wait("a copy from pageable memory" if not pinned else "a copy that is not non_blocking")
        if self.capture is not None:
            raise NotCapturable("a copy from the host is captured: a replay would repeat it with old memory")
        reads = (source,) if self.memory.piece(source, HOST).pinned else ()
        self.use("copy from the host", reads, (to,))
        if self.values:
            self.values_of(to).copy_(source)
        return to

    def _down(self, to: Tensor, source: FakeTensor, free: bool) -> Tensor:
        pinned = self.memory.piece(to, HOST).pinned
        if not (pinned and free):
            self.wait("a copy to pageable memory" if not pinned else "a copy that is not non_blocking")
        if self.capture is not None:
            raise NotCapturable("a copy to the host is captured")
        self.use("copy to the host", (source,), (to,))
        if self.values:
            to.copy_(self.values_of(source))
        else:
            self.stand_in(to)
        return to

    def wait(self, why: str) -> None:
        """Record a wait of the host. Raise ``HiddenWait`` unless allowed, ``NotCapturable`` in a capture."""
        if self.capture is not None:
            raise NotCapturable(f"the host waits for the device in a capture: {why}")
        if self.loading:
            return
        place = here()
        if place not in WAITS:
            raise HiddenWait(f"the host waits for the device in {place[0]}, {place[1]}: {why}")
        self.waited[place] = self.waited.get(place, 0) + 1

    def _on_device(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        if func in _FACTS:
            return func(*args, **kwargs)
        given, named = args, kwargs
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                continue
            if tensor.dim() and not reads_shape(func):
                shape = tuple(tensor.shape)
                raise OnHost(f"{func} on the device is given a tensor of shape {shape} on the host")
            if func.overloadpacket in _COPIES_NUMBERS:
                self.wait("a number is copied to the device")
            given, named = mapped(self._as_fake, (args, kwargs))
        name = label_of(func)
        self.operators.add(name)
        if self.values and self.capture is not None:
            self._save(func, args, kwargs)
        try:
            made = self.fake.dispatch(func, types, given, named)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return self._ask(func, args, kwargs, error)
        if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors):
            self.narrow.add(name)
        reads, writes = effects(func, args, kwargs)
        leaves = tensors_of((made,))
        given_storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        fresh = [leaf for leaf in leaves if leaf.untyped_storage()._cdata not in given_storages]
        if writes or fresh:  # otherwise a view
            self.use(name, reads, [*writes, *fresh])
        if self.values:
            self._shadows(func, args, kwargs, leaves)
        return made

    def _as_fake(self, leaf: Any) -> Any:
        """Return a host number as a fake tensor, which is part of the launch."""
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            return self.fake.from_tensor(leaf)
        return leaf

    def _ask(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Handle an operator whose result depends on device values."""
        if not self.loading or self.capture is not None:
            self.wait(str(func))
        if not self.values and self.loading and func is aten.equal.default:
            return True  # weights that a checkpoint has twice
        if not self.values:
            raise HiddenWait(f"{func} is asked of a device that has no values") from error
        given, named = mapped(self.values_of, (args, kwargs))
        return mapped(
            lambda leaf: self.like(leaf) if isinstance(leaf, Tensor) else leaf, func(*given, **named)
        )

    # ---- values

    def like(self, real: Tensor) -> FakeTensor:
        """Return a new device tensor with the shape of ``real``, and its values if the rehearsal has
        values."""
        with self.fake:
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
        if self.values:
            made.shadow = real  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    def values_of(self, leaf: Any) -> Any:
        """Return the values of a fake tensor. Return anything else unchanged."""
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, FakeTensor):
            return leaf
        if not self.values:
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return leaf.shadow  # type: ignore[attr-defined]

    def _save(self, func: Any, args: Any, kwargs: Any) -> None:
        """Save the shadows that a captured call would overwrite, because a capture computes nothing."""
        assert self.capture is not None
        for tensor in effects(func, args, kwargs)[1]:
            if self.memory.piece(tensor, self.stream).born < self.capture.born:
                self.save(tensor)

    def save(self, tensor: Tensor) -> None:
        assert self.capture is not None
        storage = self.values_of(tensor).untyped_storage()
        if storage.data_ptr() not in self.capture.saved:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.capture.saved[storage.data_ptr()] = (whole, whole.clone())

    def _shadows(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        given, named = mapped(self.values_of, (args, kwargs))
        if "device" in named:
            named = {**named, "device": torch.device("cpu")}
        real = tensors_of((func(*given, **named),))
        assert len(real) == len(made), f"{func} makes other results on the host"
        for fake, shadow in zip(made, real, strict=True):
            assert fake.shape == shadow.shape, (
                f"{func}: {fake.shape} on the device, {shadow.shape} on the host"
            )
            assert fake.dtype == shadow.dtype, (
                f"{func}: {fake.dtype} on the device, {shadow.dtype} on the host"
            )
            fake.shadow = shadow  # type: ignore[attr-defined]
        if self.capture is not None:
            self.capture.calls.append(functools.partial(again, func, given, named, real))


@contextmanager
def running(rehearsal: Rehearsal) -> Iterator[None]:
    """Restrict waits of the host to ``WAITS`` inside the ``with`` block."""
    before, rehearsal.loading = rehearsal.loading, False
    try:
        yield
    finally:
        rehearsal.loading = before
