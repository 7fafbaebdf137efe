"""Implementations of the operations that models are made of, chosen by capability.

An op is a name with one signature. Each implementation declares where it runs and whether it is
``invariant``: a row's bits do not depend on the other rows or their number. Layers choose when they are
built, so that a missing form is known when the model is loaded.

Ops on weights may want them in a layout of their own: ``pack`` makes it once, after loading, and what it
returns takes the weight's place in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.common.errors import ConfigError

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute an op."""

    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    invariant: bool = False
    priority: int = 0
    """The highest that fits is chosen; the torch reference has 0."""
    pack: Callable[..., Any] | None = None
    """From a plain weight (or an op's own record of several) to what ``run`` takes instead; None: that. Of an
    op that rounds, also given the largest magnitude of each row where the weight's rows are parts of rows."""
    pack_codes: Callable[[Any], Any] | None = None
    """Likewise, from ``coded.Codes``; None: it wants plain weights."""
    mixes: bool = False
    """Whether ``pack_codes`` takes ``coded.MixedCodes`` as well."""
    apart: bool = False
    """Whether ``pack_codes`` takes ``stacks.Unstacked`` for a stack of codes, in the host's memory."""
    asks: bool = False
    """Whether the host reads, in the middle of it, a value that the device made: it can't be captured."""
    available: Callable[[], bool] = lambda: True
    """Whether it can run in this process (an extension that was built, a library that is installed)."""


_OPS: dict[str, list[Implementation]] = {}


def register(op: str, implementation: Implementation) -> None:
    """Adds a way to compute ``op``. Raises ValueError when its name is taken."""
    known = _OPS.setdefault(op, [])
    if any(other.name == implementation.name for other in known):
        raise ValueError(f"{op} has an implementation called {implementation.name!r} already")
    known.append(implementation)


def choose(op: str, dtype: torch.dtype, device: torch.device, *, invariant: bool = False) -> Implementation:
    """The implementation of ``op`` with the highest priority that serves ``dtype`` on ``device``.

    ``invariant`` (``--deterministic``) demands the capability. Raises ConfigError that names what is lacking.
    """
    fitting = [
        found
        for found in _OPS.get(op, [])
        if device.type in found.devices and dtype in found.dtypes and (found.invariant or not invariant)
    ]
    fitting = [found for found in fitting if found.available()]
    if not fitting:
        wanted = f"{op} for {str(dtype).removeprefix('torch.')} on {device.type}"
        if invariant:
            raise ConfigError(
                f"--deterministic: there is no invariant implementation of {wanted}", param="--deterministic"
            )
        raise ConfigError(f"no implementation of {wanted}", param="--dtype")
    return max(fitting, key=lambda found: found.priority)
