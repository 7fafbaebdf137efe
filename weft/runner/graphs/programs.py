"""Decode steps on a CPU without Python: operator calls captured once, replayed by the CPU extension.

All steps with one token per row and the same number of rows make the same sequence of operator calls. The
tensors of a call are either fixed (weights, caches, slot columns) or results of earlier calls.
``capture_calls`` runs the function of such a step once and records its calls below Python. The returned
function repeats the calls from C++ (csrc/program.h). A capture fixes all host values of the function
(shapes, slices, branches). So host values may depend only on the number of rows and on the context bucket.

Collectives in shared memory are recorded like other calls (csrc/collectives.cpp). Such calls name the memory
of one epoch, so the program is valid in that epoch only: later runs raise CommLost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.ops import cpu
from weft.ops.cpu import CannotCapture
from weft.parallel.launcher import CommLost, Launcher

__all__ = ["CannotCapture", "capture_calls"]

Tensor = torch.Tensor


@dataclass(slots=True)
class _ProgramCall:
    op: torch._ops.OpOverload
    arguments: list[Any]
    """Values in schema order."""
    results: list[Any]
    reads: list[int] = field(default_factory=list)
    """Registers of the arguments."""


class _Watch(TorchDispatchMode):
    """Records every operator call. Tensors stay alive during the capture, so that ids of tensors stay
    unique."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled. Without this method torch imports its compiler, which takes
        seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_ProgramCall] = []
        self.obstacle: CannotCapture | None = None
        """First call that a program cannot repeat. The function still runs to its end, because the step needs
        the results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator and return its result. Record calls with tensors. Set ``obstacle`` at the first
        call with a tensor that also returns a value to the host."""
        given = kwargs or {}
        signature = _signature(func)
        arguments = list(args)
        for name, default in signature.named[len(args) :]:
            arguments.append(given.get(name, default))
        returned = func(*args, **given)
        results = list(returned) if isinstance(returned, tuple | list) else [returned]
        if not any(isinstance(value, Tensor) for value in (*results, *tree_leaves(arguments))):
            return returned  # for example a query about types: the same result in every step
        if any(result is not None and not isinstance(result, Tensor) for result in results):
            self.obstacle = self.obstacle or CannotCapture(f"{func} gives the host a value")
        self.calls.append(_ProgramCall(func, arguments, results))
        return returned


def capture_calls(run: Callable[[], None], launcher: Launcher | None = None) -> Callable[[], None]:
    """Run ``run`` once and return a function that repeats the same operator calls without Python.

    Raises CannotCapture, after ``run`` has ended, if a call returned a value to the host. ``launcher``
    records the replayed collectives. The returned function raises CommLost if a collective fails, and
    otherwise the errors of its calls.
    """
    with _Watch() as watch:
        run()
    if watch.obstacle is not None:
        raise watch.obstacle
    program = _Builder(watch.calls).program()
    if not any(str(call.op).startswith("weft_cpu.ring_") for call in watch.calls):
        return program.run
    return functools.partial(_replay, program, launcher or Launcher())


def _replay(program: Any, launcher: Launcher) -> None:
    """Run a program with collectives, and report their times to ``launcher`` if the launcher records. Raises
    CommLost if a collective fails."""
    times = torch.ops.weft_cpu.ring_times.default
    if launcher.recording:
        times(True)
    try:
        program.run()
    except torch.distributed.DistError as error:
        raise CommLost(f"a collective of a replayed step failed: {str(error).splitlines()[0]}") from error
    finally:
        if launcher.recording:
            launcher.add_flights(times(False).tolist())


@dataclass(frozen=True, slots=True)
class _Signature:
    """Cached schema of an operator. Torch takes as long for one attribute of a schema as for a small
    operator."""

    named: tuple[tuple[str, Any], ...]
    """Name and default of each argument."""
    kinds: tuple[str, ...]
    """Type of each argument."""


@functools.cache
def _signature(op: torch._ops.OpOverload) -> _Signature:
    arguments = op._schema.arguments
    return _Signature(
        named=tuple((argument.name, argument.default_value) for argument in arguments),
        kinds=tuple(str(argument.type) for argument in arguments),
    )


class _Code:
    """Encoded program. The numbers equal those of ``Code`` in csrc/program.h."""

    NONE, TENSOR, READ, INT, FLOAT, BOOL, STRING, INTS, TYPE, DEVICE, OBJECT, TENSORS = range(12)

    def __init__(self) -> None:
        self.operators: dict[str, int] = {}
        self.numbers: list[int] = []
        self.tensors: list[Tensor] = []
        self.floats: list[float] = []
        self.strings: list[str] = []
        self.objects: list[torch.ScriptObject] = []

    def tensor(self, kind: int, value: Tensor) -> None:
        self.numbers += (kind, len(self.tensors))
        self.tensors.append(value)

    def program(self) -> Any:
        """Build the ``Program`` from the encoded calls."""
        program: Any = torch.classes.weft_cpu.Program()
        for value in self.objects:
            program.object(value)
        program.load(list(self.operators), self.numbers, self.tensors, self.floats, self.strings)
        return program


class _Builder:
    """Builds a ``Program`` from recorded calls."""

    def __init__(self, calls: list[_ProgramCall]) -> None:
        self._calls = calls
        self._register: dict[int, int] = {}
        """Register of each tensor made by a call, by ``id``."""
        self._code = _Code()

    def program(self) -> Any:
        """Build the program. Raises CannotCapture for an argument of an unsupported type."""
        results = [self._results(call) for call in self._calls]
        # Last call that uses each register: the program frees a register behind its last use.
        last: dict[int, int] = {}
        for number, (call, written) in enumerate(zip(self._calls, results, strict=True)):
            for register in (*self._reads(call.arguments), *written):
                last[register] = number
        dead: list[list[int]] = [[] for _ in self._calls]
        for register, at in last.items():
            if register >= 0:
                dead[at].append(register)
        code = self._code
        for call, written, freed in zip(self._calls, results, dead, strict=True):
            place = code.operators.setdefault(_name(call.op), len(code.operators))
            code.numbers += (place, len(call.arguments))
            for kind, value in zip(_signature(call.op).kinds, call.arguments, strict=True):
                self._argument(call, kind, value)
            code.numbers += (len(written), *written, len(freed), *freed)
        cpu.load()
        return code.program()

    def _results(self, call: _ProgramCall) -> list[int]:
        """Give each new tensor among the results a register. Return a register per result; -1 for other
        results (an argument written in place, or no tensor)."""
        registers = []
        for result in call.results:
            new = isinstance(result, Tensor) and not any(result is value for value in call.arguments)
            if new and id(result) not in self._register:
                self._register[id(result)] = len(self._register)
            registers.append(self._register[id(result)] if new else -1)
        return registers

    def _reads(self, arguments: Sequence[Any]) -> list[int]:
        """Return the registers of the tensors in ``arguments``, nested lists included. Changes nothing.

        Tensors without a register are constants and are left out.
        """
        registers = []
        for value in arguments:
            if isinstance(value, list | tuple):
                registers += self._reads(value)
            elif isinstance(value, Tensor) and id(value) in self._register:
                registers.append(self._register[id(value)])
        return registers

    def _argument(self, call: _ProgramCall, kind: str, value: Any) -> None:
        """Append the code of one argument to ``_code``. ``kind``: type of the argument in the schema of the
        operator. Raises CannotCapture for an unsupported type."""
        code = self._code
        numbers = self._code.numbers
        if value is None:
            numbers.append(code.NONE)
        elif isinstance(value, Tensor):
            register = self._register.get(id(value))
            if register is None:
                code.tensor(code.TENSOR, value)
            else:
                numbers += (code.READ, register)
        elif isinstance(value, bool | int | float) and kind == "Tensor":
            # A 0-dim tensor takes part in type promotion like a number.
            code.tensor(code.TENSOR, torch.tensor(value))
        elif isinstance(value, bool):
            numbers += (code.BOOL, int(value))
        elif isinstance(value, float) or (isinstance(value, int) and "float" in kind):
            numbers += (code.FLOAT, len(code.floats))
            code.floats.append(float(value))
        elif isinstance(value, int):
            numbers += (code.INT, value)
        elif isinstance(value, list | tuple):
            self._list(call, kind, value)
        else:
            self._other_argument(call, value)

    def _list(self, call: _ProgramCall, kind: str, value: Sequence[Any]) -> None:
        """Append the code of a list of tensors or of integers. Raises CannotCapture for other lists."""
        code = self._code
        if "Tensor" in kind:
            code.numbers += (code.TENSORS, int("Optional[Tensor]" in kind), len(value))
            for entry in value:
                self._argument(call, "Tensor", entry)
        elif all(isinstance(entry, int) for entry in value):
            code.numbers += (code.INTS, len(value), *value)
        else:
            raise CannotCapture(f"{call.op} takes {value!r}")

    def _other_argument(self, call: _ProgramCall, value: Any) -> None:
        """Encode an argument that is neither a tensor nor a number. Raises CannotCapture for unsupported
        types."""
        code = self._code
        if isinstance(value, torch.dtype):
            code.tensor(code.TYPE, torch.empty(0, dtype=value))
        elif isinstance(value, torch.device):
            code.tensor(code.DEVICE, torch.empty(0, device=value))
        elif isinstance(value, str):
            code.numbers += (code.STRING, len(code.strings))
            code.strings.append(value)
        elif isinstance(value, torch.ScriptObject):
            code.numbers += (code.OBJECT, len(code.objects))
            code.objects.append(value)
        elif isinstance(value, torch.memory_format):
            code.numbers += (code.INT, _MEMORY_FORMATS[value])
        elif isinstance(value, torch.layout) and value is torch.strided:
            code.numbers += (code.INT, 0)
        else:
            raise CannotCapture(f"{call.op} takes {value!r}")


@functools.cache
def _name(op: torch._ops.OpOverload) -> str:
    """Return ``namespace::name.overload``."""
    return str(op.name())


#: Numbers of c10::MemoryFormat.
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1}
