"""Dtypes and registration of the CPU extension's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.common.errors import ConfigError
from weft.ops import cpu
from weft.ops.registry import Implementation, register

DTYPES = (torch.bfloat16, torch.float32)
TAPS = (2, 3, 4)

# Numbers of csrc/gemm_tile.h; 0 is linear without a gate.
ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2, "gelu": 3, "relu": 4}


def check_served(what: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError unless the backend ``what`` of the extension supports ``dtype`` on ``device``."""
    if device.type != "cpu":
        raise ConfigError(f"{what} does not run on {device.type}", param="--device")
    if dtype not in DTYPES:
        raise ConfigError(f"{what} has no {dtype}", param="--dtype")


def check_taps(what: str, taps: int) -> None:
    """Raise ConfigError unless the extension has convolutions of ``taps`` inputs (csrc/recurrent.h)."""
    if taps not in TAPS:
        raise ConfigError(
            f"{what} has no convolution of {taps} taps: it needs 2 to 4", param="--attention-backend"
        )


def check_built(what: str) -> None:
    """Raise ConfigError if the extension is not built for this machine."""
    if not cpu.load():
        raise ConfigError(
            f"{what} needs the C++ operations: run `weft build-ops`", param="--attention-backend"
        )


def serve(
    op: str,
    run: Callable[..., Any],
    pack: Callable[[Any], Any] | None = None,
    available: Callable[[], bool] = cpu.load,
    pack_codes: Callable[[Any], Any] | None = None,
    *,
    mixes: bool = False,
    apart: bool = False,
) -> None:
    """Register ``run`` as the invariant implementation of ``op`` on CPUs, with priority 10.

    Default: available wherever the extension is built. The other arguments: see ``Implementation``.
    Raises ValueError if ``op`` has a ``cpu`` implementation already.
    """
    implementation = Implementation(
        name="cpu",
        run=run,
        pack=pack,
        devices=("cpu",),
        dtypes=DTYPES,
        invariant=True,
        priority=10,
        available=available,
        pack_codes=pack_codes,
        mixes=mixes,
        apart=apart,
    )
    register(op, implementation)
