"""Engines of the CPU extension that not every CPU can run."""

from __future__ import annotations

import pytest

BRGEMM = 3


@pytest.fixture(autouse=True)
def _engine_runs_here(request: pytest.FixtureRequest) -> None:
    """Skips what a test's parameter ``engine`` asks of ATen where that doesn't take bf16 on this CPU."""
    from weft.ops import cpu

    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("engine") != BRGEMM:
        return
    request.getfixturevalue("extension")
    if "brgemm" not in cpu.capabilities():
        pytest.skip("ATen's brgemm does not take bf16 on this CPU")
