"""Ranks of a group die, stop or fail in every phase, and every request is answered as without the fault."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.faults.rig import Plan, config_of, survive
from weft.types.faults import Deed

STEP_PHASES = ("stage", "collective", "sample", "read")
WORKER: list[Plan] = [(1, phase, deed) for phase in STEP_PHASES for deed in ("kill", "stop", "raise")]  # type: ignore[misc]
ENGINE: list[Plan] = [(0, phase, "raise") for phase in STEP_PHASES]  # type: ignore[misc]
SECOND: list[Plan] = [
    (rank, phase, deed)  # type: ignore[misc]
    for phase, deed in (
        ("form", "kill"),
        ("form", "stop"),
        ("form", "raise"),
        ("load", "kill"),
        ("load", "stop"),
    )
    for rank in (0, 1)
    if rank or (phase, deed) == ("form", "raise")  # the engine does not load again, and dies with its process
]
"""Faults of a group that is being formed again."""
MOVING = {"enable_expert_parallel": True, "eplb_interval": 1, "redundant_experts": 2}
"""Settings that move experts whenever possible."""


SAMPLES: dict[str, tuple[int, list[Plan]]] = {
    "1": (1, [(1, "stage", "kill"), (1, "load", "kill"), (1, "collective", "stop"), (0, "sample", "raise")]),
    "2": (2, [(1, "read", "kill"), (1, "form", "stop"), (0, "collective", "raise"), (1, "sample", "raise")]),
    "2, few": (2, [(1, "read", "kill"), (0, "collective", "raise")]),
}
"""Name -> (steps in flight, faults)."""


@pytest.mark.requirement("A7")
@pytest.mark.parametrize(
    "sample", [pytest.param("1", marks=pytest.mark.grid), pytest.param("2", marks=pytest.mark.slow), "2, few"]
)
def test_a_sample_of_everything(tmp_path: Path, sample: str) -> None:
    depth, plans = SAMPLES[sample]
    core = survive(config_of(tensor_parallel_size=2, steps_in_flight=depth), tmp_path, plans)
    assert core.stats().requeued > 0


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_rank_that_falls_while_experts_move(tmp_path: Path, depth: int, rank: int) -> None:
    """Experts and copies move with every other step; after a fault all return to the checkpoint's order."""
    # the engine process would die with the test
    deeds: tuple[Deed, ...] = ("kill", "stop", "raise") if rank else ("raise",)
    plans: list[Plan] = [(rank, "rebalance", deed) for deed in (*deeds, "raise")]
    survive(config_of(**MOVING, tensor_parallel_size=2, steps_in_flight=depth), tmp_path, plans)


@pytest.mark.grid
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("part", range(4))
def test_every_rank_in_every_phase(tmp_path: Path, depth: int, part: int) -> None:
    """Each part has four of the 16 faults of a running group, each followed by a fault while the group forms
    again.
    """
    first = (WORKER + ENGINE)[part::4]
    seconds = itertools.cycle(SECOND[part:] + SECOND[:part])
    plans: list[Plan] = []
    for fault in first:
        second = next(seconds)
        plans.append(fault)
        if second[1] == "load" and fault[2] == "raise":
            plans.append((second[0], "form", second[2]))  # no rank loads after a raise
        else:
            plans.append(second)
    survive(config_of(tensor_parallel_size=2, steps_in_flight=depth), tmp_path, plans)
