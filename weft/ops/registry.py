"""Implementations of the operations of models, chosen by capability.

An op is a name with one signature. Each implementation declares its devices and dtypes, and whether it is
``invariant``: the bits of a row do not depend on other rows or on the number of rows. Layers choose
implementations when they are built, so a missing implementation is an error at load time.

Ops on weights may need a layout of their own. ``pack`` makes the layout once, after loading, and every call
gets the packed weight.
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
    """One implementation of an op."""

    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    invariant: bool = False
    priority: int = 0
    """The implementation with the highest priority is chosen. The torch reference has 0."""
    pack: Callable[..., Any] | None = None
    """Function from a plain weight (or an op's record of several weights) to the input of ``run``; None: no
    packing. With parts of rows, an op with rounding also gets the largest magnitude of each whole row."""
    pack_codes: Callable[[Any], Any] | None = None
    """Function from ``coded.Codes`` to the input of ``run``; None: only plain weights are supported."""
    mixes: bool = False
    """True if ``pack_codes`` also accepts ``coded.MixedCodes``."""
    apart: bool = False
    """True if ``pack_codes`` also accepts ``stacks.Unstacked`` for a stack of codes in host memory."""
    terms: Callable[..., Any] | None = None
    """Function with the arguments of ``run`` that returns ``moe.ExpertSum``, for a norm that adds the terms;
    None: ``run`` is the only function."""
    asks: bool = False
    """True if the host reads a device value during ``run``. Such an op cannot be captured."""
    available: Callable[[], bool] = lambda: True
    """Return True if the implementation can run in this process: extension built, library installed."""


_OPS: dict[str, list[Implementation]] = {}


def register(op: str, implementation: Implementation) -> None:
    """Add an implementation of ``op``. Raises ValueError if the name is taken."""
    known = _OPS.setdefault(op, [])
    if any(other.name == implementation.name for other in known):
        raise ValueError(f"{op} has an implementation called {implementation.name!r} already")
    known.append(implementation)


def choose(op: str, dtype: torch.dtype, device: torch.device, *, invariant: bool = False) -> Implementation:
    """Return the implementation of ``op`` with the highest priority for ``dtype`` on ``device``.

    ``invariant`` (``--deterministic``) requires the capability. Raises ConfigError that names the missing
    implementation.
    """
    fitting = [
        found
        for found in _OPS.get(op, [])
        if device.type in found.devices and dtype in found.dtypes and (found.invariant or not invariant)
    ]
    # Availability last: the check may load a library.
    fitting = [found for found in fitting if found.available()]
    if not fitting:
        wanted = f"{op} for {str(dtype).removeprefix('torch.')} on {device.type}"
        if invariant:
            raise ConfigError(
                f"--deterministic: there is no invariant implementation of {wanted}", param="--deterministic"
            )
        raise ConfigError(f"no implementation of {wanted}", param="--dtype")
    return max(fitting, key=lambda found: found.priority)


def reference(op: str, device: torch.device) -> Implementation:
    """Return the torch reference of ``op``, for plain weights of every dtype. KeyError: no reference."""
    for found in _OPS.get(op, []):
        if found.priority == 0 and found.name.startswith("torch") and device.type in found.devices:
            return found
    raise KeyError(op)
