"""Decode steps on a CPU without Python: operator calls recorded once, run by the CPU extension.

A step of one token a row is the same sequence of operator calls for every step of as many rows, on tensors
that are either the same (weights, caches, slot columns) or made by an earlier call. ``record`` runs such a
function once, watches its calls below Python, and returns a function that makes the same calls again from
C++ (csrc/program.cpp). What the function computes on the host (shapes, slices, choices) is fixed by the
recording, so it must follow from the number of rows and the bucket of context alone.

Collectives in shared memory are calls like others (csrc/collectives.cpp). They name the memory of one epoch,
so a program with such calls is of that epoch: afterwards it raises CommLost.
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
from weft.ops.cpu import CannotRecord
from weft.parallel.launcher import CommLost, Launcher

__all__ = ["CannotRecord", "record"]

Tensor = torch.Tensor


@dataclass(slots=True)
class _Call:
    op: torch._ops.OpOverload
    arguments: list[Any]
    """In the order of the schema."""
    results: list[Any]
    reads: list[int] = field(default_factory=list)
    """Registers."""


class _Watch(TorchDispatchMode):
    """Writes down every operator call. Tensors are kept alive, so that one is known by its identity."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled. Else torch imports its compiler: seconds, at a first token."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.obstacle: CannotRecord | None = None
        """The first call that a program cannot hold. The function goes on: what it does it does once."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        arguments = []
        for number, argument in enumerate(func._schema.arguments):
            if number < len(args):
                arguments.append(args[number])
            elif argument.name in given:
                arguments.append(given[argument.name])
            else:
                arguments.append(argument.default_value)
        made = func(*args, **given)
        results = list(made) if isinstance(made, tuple | list) else [made]
        if not any(isinstance(value, Tensor) for value in (*results, *tree_leaves(arguments))):
            return made  # a fact of types, say: the same each time
        if func._schema.returns and str(func._schema.returns[0].type) == "List[Tensor]":
            self.obstacle = self.obstacle or CannotRecord(f"{func} makes a list of tensors")
        if any(result is not None and not isinstance(result, Tensor) for result in results):
            self.obstacle = self.obstacle or CannotRecord(f"{func} gives the host a value")
        self.calls.append(_Call(func, arguments, results))
        return made


def record(run: Callable[[], None], launcher: Launcher | None = None) -> Callable[[], None]:
    """Runs ``run`` once, and returns what does the same again without Python.

    ``launcher`` is told of the collectives that are replayed. Raises CannotRecord, when ``run`` has ended, if
    one of its calls read a value on the host, or made a list of tensors. What is returned raises CommLost
    when a collective fails; of its other calls what they raise.
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
    """Runs a program with collectives in it."""
    times = torch.ops.weft_cpu.ring_times.default
    if launcher.recording:
        times(True)
    try:
        program.run()
    except torch.distributed.DistError as error:
        raise CommLost(f"a collective of a replayed step failed: {str(error).splitlines()[0]}") from error
    finally:
        if launcher.recording:
            launcher.flew(times(False).tolist())


@functools.cache
def _kinds(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Of an operator's arguments, in the order of its schema."""
    return tuple(str(argument.type) for argument in op._schema.arguments)


class _Builder:
    """From calls to a ``Program``."""

    def __init__(self, calls: list[_Call]) -> None:
        self._calls = calls
        self._register: dict[int, int] = {}
        """By identity of the tensor that a call made."""
        self._program: Any = torch.classes.weft_cpu.Program() if cpu.load() else None

    def program(self) -> Any:
        """The program. Raises CannotRecord for an argument of a kind that is not known."""
        results = [self._results(call) for call in self._calls]
        last: dict[int, int] = {}
        for number, (call, made) in enumerate(zip(self._calls, results, strict=True)):
            for register in (*self._reads(call.arguments), *made):
                last[register] = number
        for number, (call, made) in enumerate(zip(self._calls, results, strict=True)):
            for kind, value in zip(_kinds(call.op), call.arguments, strict=True):
                self._argument(call, kind, value)
            dead = sorted(register for register, at in last.items() if at == number and register >= 0)
            name, _, overload = call.op.name().partition(".")
            self._program.call(name, overload, made, dead)
        return self._program

    def _results(self, call: _Call) -> list[int]:
        """A register for each tensor that is new; -1 for an argument that was written in place."""
        registers = []
        for result in call.results:
            new = isinstance(result, Tensor) and not any(result is value for value in call.arguments)
            if new and id(result) not in self._register:
                self._register[id(result)] = len(self._register)
            registers.append(self._register[id(result)] if new else -1)
        return registers

    def _reads(self, arguments: Sequence[Any]) -> list[int]:
        found = []
        for value in arguments:
            if isinstance(value, list | tuple):
                found += self._reads(value)
            elif isinstance(value, Tensor) and id(value) in self._register:
                found.append(self._register[id(value)])
        return found

    def _argument(self, call: _Call, kind: str, value: Any) -> None:
        program = self._program
        if value is None:
            program.constant_none()
        elif isinstance(value, Tensor):
            register = self._register.get(id(value))
            program.constant_tensor(value) if register is None else program.read(register)
        elif isinstance(value, bool | int | float) and kind == "Tensor":
            program.constant_tensor(torch.tensor(value))  # without dims, it promotes types as a number does
        elif isinstance(value, torch.dtype):
            program.constant_dtype(torch.empty(0, dtype=value))
        elif isinstance(value, torch.device):
            program.constant_device(torch.empty(0, device=value))
        elif isinstance(value, bool):
            program.constant_bool(value)
        elif isinstance(value, float) or (isinstance(value, int) and "float" in kind):
            program.constant_float(float(value))
        elif isinstance(value, int):
            program.constant_int(value)
        elif isinstance(value, str):
            program.constant_str(value)
        elif isinstance(value, list | tuple) and "Tensor" in kind:
            program.begin_list("Optional[Tensor]" in kind)
            for entry in value:
                self._argument(call, "Tensor", entry)
            program.end_list()
        elif isinstance(value, list | tuple) and all(isinstance(entry, int) for entry in value):
            program.constant_ints(list(value))
        elif isinstance(value, torch.ScriptObject):
            program.constant_any(value)
        elif isinstance(value, torch.memory_format):
            program.constant_int(_MEMORY_FORMATS[value])
        elif isinstance(value, torch.layout) and value is torch.strided:
            program.constant_int(0)
        else:
            raise CannotRecord(f"{call.op} takes {value!r}")


#: c10's numbers.
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1}
