"""The parts of an operator call: tensors that are read and written, and the calling function of Weft."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Tensor = torch.Tensor

ROOT = Path(__file__).parents[2]


def again(func: Any, args: Any, kwargs: Any, before: list[Tensor]) -> None:
    """Run an operator of a graph again, and write the results to the memory of the earlier results."""
    made = tensors_of((func(*args, **kwargs),))
    for old, new in zip(before, made, strict=True):
        if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
            old.copy_(new)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among ``values``, and in lists and tuples among ``values``."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``change`` applied to everything except lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, one) for one in value])
    if isinstance(value, dict):
        return {name: mapped(change, one) for name, one in value.items()}
    return change(value)


def _function(qualified: str) -> str:
    """Return the name of the function or method around a comprehension or lambda."""
    return qualified.partition(".<locals>")[0].rpartition(".")[2]


@functools.cache
def label_of(func: Any) -> str:
    return str(func)


@functools.cache
def reads_shape(func: Any) -> bool:
    """Return True if the operator uses a tensor only for shape and dtype."""
    name = func.name().partition("::")[2].partition(".")[0]
    return bool(name.endswith("_like") or name.startswith("new_"))


@functools.cache
def _written(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return (positions of written arguments, names of written arguments)."""
    schema = func._schema
    places = tuple(
        place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return places, tuple(schema.arguments[place].name for place in places)


def effects(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return (tensors that are read, tensors that are written)."""
    places, names = _written(func)
    writes = [args[place] for place in places if place < len(args)]
    writes += [kwargs[name] for name in names if name in kwargs]
    writes = [leaf for leaf in tensors_of(writes) if isinstance(leaf, FakeTensor)]
    reads = [leaf for leaf in tensors_of((*args, *kwargs.values())) if isinstance(leaf, FakeTensor)]
    if not writes:
        return reads, writes
    return [tensor for tensor in reads if not any(tensor is written for written in writes)], writes


def here() -> tuple[str, str]:
    """Return (file, name) of the innermost running function of Weft."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT / "weft")):
            return str(Path(file).relative_to(ROOT)), _function(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return "?", "?"
