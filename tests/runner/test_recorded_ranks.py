"""Steps of several ranks that meet in shared memory, recorded and replayed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.e0.rig import run, submit
from tests.e1.rig import LATENT, VOCAB, make_checkpoint, make_engine
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.ranks import on_ranks
from weft.config.sections import SpeculationSection
from weft.ops import cpu
from weft.parallel.group import CommLost
from weft.parallel.launcher import DelayedLauncher
from weft.parallel.mesh import Mesh, make_mesh
from weft.runner import graphs
from weft.runner.programs import CannotRecord, record
from weft.types.layout import Layout
from weft.types.plan import EMPTY_SEGMENT, AllocSlot, Segment, StepPlan, column
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")

TWO = Layout(tensor=2)
LONG = 30.0
"""Seconds: a wait that ends before was ended."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in made:
            root = tmp_path_factory.mktemp(model)
            if model == "mtp":
                sizes = {**LATENT, "vocab_size": VOCAB, "max_position_embeddings": 384, "hidden_size": 64}
                made[model] = make_mtp_checkpoint(root, skilled=True, **sizes)
            else:
                made[model] = make_checkpoint(root, model)
        return made[model]

    return get


class Answers:
    """What one rank made: tokens, logits by seed and position, steps replayed, collectives of each step."""

    def __init__(self, engine: Any, runner: Any) -> None:
        self.flights: list[int] = []
        observe = engine.overlap.observe

        def observed(plan: StepPlan, times: Any) -> None:
            self.flights.append(len(times.flights))
            assert all(flight.began <= flight.ended <= time.monotonic() for flight in times.flights)
            observe(plan, times)

        engine.overlap.observe = observed
        asked = [
            submit(
                i + 1,
                [(5 * i + 3 * j) % VOCAB for j in range(4 + 9 * i)],
                TokenParams(temperature=0.7 * (i % 2), max_tokens=6 + 5 * i),
                request=i,
            )
            for i in range(4)
        ]
        self.tokens = {number: answer.tokens for number, answer in run(engine, [asked]).items()}
        self.bits = runner.bits
        self.replayed = 0 if runner.graphs is None else runner.graphs.replayed


def answers(folder: Path, layout: Layout = TWO, change: Any = None, **options: Any) -> list[Answers]:
    """Of every rank, each with a scheduler of its own: all make the same plans."""

    def work(mesh: Mesh) -> Answers:
        torch.set_num_threads(1)
        engine, runner = make_engine(folder, mesh=mesh, max_num_seqs=4, **options)
        if change is not None:
            change(mesh, runner)
        made = Answers(engine, runner)
        engine.close()
        return made

    return on_ranks(layout, work, LONG)


def assert_same(made: list[Answers], expected: list[Answers]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.bits.keys() == other.bits.keys()
        assert all(torch.equal(one.bits[key][0], rows[0]) for key, rows in other.bits.items())


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("qwen3_moe", "bfloat16"),
        ("deepseek_v3", "float32"),
        pytest.param("qwen3_next", "bfloat16", marks=pytest.mark.grid),
        pytest.param("gpt_oss", "float32", marks=pytest.mark.grid),
    ],
)
def test_replayed_steps_of_two_ranks_give_the_same_bits(model: str, dtype: str, folder: Any) -> None:
    made = answers(folder(model), dtype=dtype, form="cpp", replay=True)
    expected = answers(folder(model), dtype=dtype, form="cpp")
    assert_same(made, expected)
    assert all(one.replayed > 10 for one in made)
    assert not any(one.replayed for one in expected)
    # Collectives are counted whether they were replayed or not.
    assert made[0].flights == made[1].flights == expected[0].flights
