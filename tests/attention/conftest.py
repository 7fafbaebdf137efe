"""Engines of the CPU extension that not every CPU can run."""

from __future__ import annotations

import pytest

NEEDS = {3: "brgemm", 4: "amx_bf16"}
"""Requirements of an engine, from `cpu.capabilities`."""


@pytest.fixture(autouse=True)
def _engine_runs_here(request: pytest.FixtureRequest) -> None:
    """Skip a test whose parameter ``engine`` is not supported by this CPU, or by ATen on this CPU."""
    from weft.ops import cpu

    callspec = getattr(request.node, "callspec", None)
    need = NEEDS.get(callspec.params.get("engine")) if callspec is not None else None
    if need is None:
        return
    request.getfixturevalue("extension")
    if need not in cpu.capabilities():
        pytest.skip(f"this CPU has no {need}")
