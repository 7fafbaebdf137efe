"""Two ranks whose replays are timed: both choices give equal tokens, and the ranks agree.

Each rank has a simulated device. Its clock counts the collectives of replays. A step in micro-batches
has more collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e0.rig import submit
from tests.e0.test_grid import PROMPTS
from tests.overlap.rig import Ran, on_engines
from tests.support.checkpoints import make_checkpoint
from tests.support.slow import mostly_slow
from weft.engine.core import EngineCore
from weft.overlap import bucket_trials
from weft.parallel.mesh import Mesh
from weft.runner.graphs.graphs import GraphOptions
from weft.runner.graphs.programs import CannotCapture
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

TWO = Layout(tensor=2)


class Device:
    """Replays by running the function again. Serves as ``GraphOptions.capture``."""

    def __init__(self, sign: int, fails: bool = False) -> None:
        """``sign``: 1 if a replay with more collectives takes longer, -1 if shorter. ``fails``: captures of
        micro-batches fail."""
        self.sign, self.fails = sign, fails
        self.collectives = 0
        self.replayed: list[int] = []
        """Number of collectives of each replay."""
        self.least = 1 << 30
        self.captures = 0

    def launched(self) -> None:
        self.collectives += 1

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        before = self.collectives
        run()
        count = self.collectives - before
        self.least = min(self.least, count)
        if self.fails and count > self.least:
            raise CannotCapture("no memory for two")

        self.captures += 1

        def replay() -> None:
            run()
            self.replayed.append(count)

        return replay


class Clock:
    """The measurement of one replay."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def begin(self) -> None:
        self._before = self._device.collectives

    def end(self) -> None:
        self._passed = self._device.collectives - self._before

    def seconds(self) -> float:
        return float(self._passed) ** self._device.sign


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("measured"), "llama")


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_trials, "SETTLED", 2)
    monkeypatch.setattr(bucket_trials, "TIMES", 2)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    yield found
    logging.getLogger("weft").removeHandler(handler)


def submits() -> list[list[Submit]]:
    """Return requests with steps in two buckets, of four rows and then of two."""
    greedy = TokenParams(temperature=0.0, max_tokens=32)
    drawn = TokenParams(temperature=0.9, top_k=20, max_tokens=14)
    return [[submit(1 + i, PROMPTS[i], (greedy, drawn)[i % 2], request=i) for i in range(4)]]


def serve(
    folder: Path, mode: str, devices: list[Device], learnt: list[tuple[int, bool]] | None = None
) -> list[Ran]:
    """``learnt`` gets (micro-batches, True for a time that fits no cost model) of each step of rank 0."""

    def each(mesh: Mesh, engine: EngineCore, runner: Any) -> Any:
        device = devices[mesh.rank]
        if learnt is not None and mesh.rank == 0:
            engine.scheduler.observe = lambda plan, _, atypical: learnt.append(  # type: ignore[method-assign]
                (plan.micro_batches, atypical)
            )
        mesh.launcher.before = device.launched
        graphs = runner._make_graphs(
            GraphOptions(
                max_rows=24, capture=device, lazy=True, micro_batches=True, timing=lambda: Clock(device)
            )
        )
        runner.graphs = graphs
        engine.overlap._bucket_of = graphs.bucket_of
        return engine.overlap

    return on_engines(TWO, folder, submits, mode, each=each)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    ran = serve(folder, "off", [Device(1), Device(1)])
    assert not ran[0].overlapped
    return ran[0].tokens


@pytest.mark.requirement("C9", "C14")
@mostly_slow("signs", [(1, 1), (-1, -1), (1, -1), (-1, 1)], [(1, -1), (-1, 1)])
def test_ranks_with_different_times_take_one_form_and_give_equal_tokens(
    signs: tuple[int, int], folder: Path, expected: dict[int, list[int]]
) -> None:
    """The times of rank 0 decide. The plan tells the other rank."""
    devices = [Device(sign) for sign in signs]
    learnt: list[tuple[int, bool]] = []
    ran = serve(folder, "measured", devices, learnt)
    assert [one.tokens for one in ran] == [expected] * 2
    forms = [[plan.micro_batches for plan in one.plans] for one in ran]
    assert forms[0] == forms[1]
    assert devices[0].replayed == devices[1].replayed
    choices = ran[0].extra.choices
    assert [bucket.rows for bucket in choices] == [4, 2]
    assert {choice.micro_batches for choice in choices.values()} == {signs[0] == -1}
    longer = [count > devices[0].least for count in devices[0].replayed]
    assert set(longer[-3:]) == {signs[0] == -1}, "the chosen form is replayed"
    assert sum(longer) >= 2, "a trial replays both forms"
    assert ran[0].stats.overlapped_steps == ran[0].overlapped
    tried = [atypical for micro_batches, atypical in learnt if micro_batches > 1]
    assert tried.count(True) == 6, "two captures, and two trials with two times each: no cost model learns"
    assert tried.count(False) == len(tried) - 6
    assert learnt[-1] == (1 + (signs[0] == -1), False)


@pytest.mark.requirement("C9")
@mostly_slow("rank", [0, 1], [0])
def test_a_failed_capture_of_micro_batches_leaves_whole_steps_captured(
    rank: int, folder: Path, expected: dict[int, list[int]], warnings: list[str]
) -> None:
    """A failure on rank 0 ends all trials. A failure on another rank makes the steps of all ranks slow."""
    devices = [Device(1, fails=rank == one) for one in range(2)]
    ran = serve(folder, "measured", devices)
    assert [one.tokens for one in ran] == [expected] * 2
    assert "no memory for two" in "\n".join(warnings)
    assert all("decode steps in micro-batches are not captured" in text for text in warnings)
    assert all(count == devices[rank].least for count in devices[rank].replayed)
    assert len(devices[rank].replayed) > 10
    assert devices[rank].captures == 2, "steps of two rows are captured after the failure"
    assert ran[0].plans[-1].micro_batches == 1
    if rank == 0:
        assert sum(plan.micro_batches > 1 for plan in ran[0].plans) <= 2
