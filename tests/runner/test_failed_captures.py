"""A failed capture costs speed: one warning, and the steps are launched op by op with the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.e0.rig import MAX_LEN, make_engine, run, submit
from tests.rehearsal import rig
from tests.support.checkpoints import make_checkpoint
from weft.attention.base import Backends
from weft.attention.gqa.triton_backend import TritonAttention
from weft.models.vision.base import Embedding, Tower
from weft.ops.cpu import CannotCapture
from weft.runner.graphs import towers
from weft.runner.graphs.graphs import CudaCapture, DecodeGraphs, GraphOptions
from weft.runner.graphs.mixed import MixedGraphs
from weft.runner.graphs.towers import CapturedTower
from weft.speculation.chain import CapturedChains, CaptureOptions
from weft.types.sampling import TokenParams

MEMORY = torch.OutOfMemoryError("CUDA out of memory")
FAILURES = [MEMORY, RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), CannotCapture("no memory for the graph")]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Messages of the warnings of the test."""
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield found
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("failed"), "llama")


class Failing:
    """Captures as the identity, and fails from capture ``first`` on."""

    def __init__(self, error: Exception, first: int = 0) -> None:
        self.error, self.first, self.calls = error, first, 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.calls += 1
        if self.calls > self.first:
            raise self.error
        run()
        return run


@pytest.mark.parametrize("error", FAILURES)
def test_decode_steps_run_op_by_op_after_a_failed_capture(
    folder: Path, error: Exception, warnings: list[str]
) -> None:
    """Captures that were made before the failure are used."""
    asked = [
        [submit(i, [5 + i, 9, 3], TokenParams(temperature=0.0, max_tokens=6), request=i)] for i in range(4)
    ]
    eager, _ = make_engine(folder, max_num_seqs=4)
    engine, runner = make_engine(folder, max_num_seqs=4)
    capture = Failing(error, first=1)
    parts = (runner._model, runner._cache, runner._backends, runner._builder, runner._state)
    runner.graphs = DecodeGraphs(*parts, MAX_LEN, GraphOptions(max_rows=4, capture=capture))
    assert capture.calls == 2
    expected, made = run(eager, asked), run(engine, asked)
    assert {i: a.tokens for i, a in made.items()} == {i: a.tokens for i, a in expected.items()}
    assert capture.calls == 2
    assert runner.graphs.replayed > 0
    assert len(warnings) == 1
    assert str(error) in warnings[0]
    eager.close()
    engine.close()


@pytest.mark.parametrize("error", FAILURES)
def test_steps_with_prompts_run_op_by_op_after_a_failed_capture(
    folder: Path, error: Exception, warnings: list[str]
) -> None:
    """No capture is kept, because the memory may be needed."""
    engine, runner = make_engine(folder, max_num_seqs=4)
    capture = Failing(error)
    options = GraphOptions(max_rows=4, capture=capture, prompt_tokens=64)
    backends = Backends([TritonAttention()])
    parts = (runner._model, runner._cache, backends, runner._builder, runner._state)
    mixed = MixedGraphs(*parts, MAX_LEN, options, end=lambda logits, slots, flag: slots)
    assert capture.calls == 1
    assert not mixed._replays
    assert len(warnings) == 1
    assert str(error) in warnings[0]
    runner.mixed = mixed
    params = TokenParams(temperature=0.0, max_tokens=3)
    answers = run(engine, [[submit(0, [5, 6, 7], params, request=0)]])
    assert len(answers[0].tokens) == 3
    assert mixed.replayed == 0
    engine.close()


def chains(capture: Any, most_kept: int) -> tuple[CapturedChains, Any]:
    """Return captured drafting as on a GPU, and its chain, whose drafts are the positions of the rows."""

    def propose_after(hidden: Any, slots: Any, ends: torch.Tensor, bounds: Any, count: int) -> torch.Tensor:
        chain.runs += 1
        return ends[:, None] + torch.arange(count)

    chain = SimpleNamespace(
        sizes=(4, torch.float32, torch.device("cpu")),
        direct=True,
        capturable=lambda *tokens: True,
        propose_after=propose_after,
        runs=0,
    )
    options = CaptureOptions(
        capture=capture, contexts=(64,), rows=(1, 2, 4), most_each=4, after=1, most_kept=most_kept, spare=9
    )
    made = CapturedChains(chain, options)  # type: ignore[arg-type]
    made._on_gpu = True
    return made, chain


def drafted(made: CapturedChains, rows: int) -> list[list[int]]:
    at = torch.arange(rows)
    drafts = made.propose_after(torch.zeros(rows, 4), at, at + 7, np.arange(rows) + 7, 2)
    assert drafts is not None
    return drafts.tolist()


@pytest.mark.parametrize("error", FAILURES)
def test_drafts_are_made_op_by_op_after_a_failed_capture(error: Exception, warnings: list[str]) -> None:
    """Out of memory in the run before a capture loses no step: the drafts are made again."""

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        if isinstance(error, CannotCapture):
            run()
        raise error

    made, chain = chains(capture, most_kept=8)
    assert drafted(made, 3) == [[7, 8], [8, 9], [9, 10]]
    assert drafted(made, 2) == [[7, 8], [8, 9]]
    assert chain.runs == 2
    assert not made.uncaptured
    assert len(warnings) == 1
    assert str(error) in warnings[0]


def test_drafts_on_a_gpu_have_a_bounded_number_of_captures() -> None:
    """A full table drops no capture, because the graph could still run."""
    capture = Failing(MEMORY, first=1)
    made, _ = chains(capture, most_kept=1)
    for rows in (2, 4, 1, 2):
        assert drafted(made, rows) == [[7 + row, 8 + row] for row in range(rows)]
    assert capture.calls == 1
    assert made.replayed == 1
    assert made._works


def test_a_cuda_capture_reports_if_the_work_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the run pass through; errors of the capture behind a complete run are CannotCapture. The
    stream of the caller stays current."""
    with rig.rehearsed(monkeypatch):
        capture, here = CudaCapture(torch.device("cuda")), torch.cuda.current_stream().name  # type: ignore[attr-defined]
        calls = 0

        def run() -> None:
            nonlocal calls
            calls += 1
            if calls == fails:
                raise MEMORY

        for fails, expected in ((1, torch.OutOfMemoryError), (2, CannotCapture)):
            calls = 0
            with pytest.raises(expected):
                capture(run)
            assert calls == fails
            assert torch.cuda.current_stream().name == here  # type: ignore[attr-defined]


class Mean(Tower):
    """Returns the mean of each row of pixels of an image, and counts the calls. Refuses images of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.calls = 0

    def embed_batch(self, images: Any) -> list[Embedding]:
        self.calls += len(images)
        if any(image.shape[1] == 1 for image in images):
            raise ValueError("one row")
        return [Embedding(main=image.float().mean((0, 2)), levels=None) for image in images]


def encoded(tower: CapturedTower, rows: int, value: int) -> None:
    image = torch.full((1, rows, 4, 3), value, dtype=torch.uint8)
    for made in (tower.embed(image), *tower.embed_batch([image, image])):
        assert made.main.tolist() == [[value] * 3] * rows
        assert made.levels is None


@pytest.mark.parametrize("error", FAILURES)
def test_images_are_encoded_op_by_op_after_a_failed_capture(error: Exception, warnings: list[str]) -> None:
    capture = Failing(error, first=1)
    tower = CapturedTower(Mean(), capture, patch=4)
    for value, rows in enumerate((2, 2, 3, 3, 2, 3)):
        encoded(tower, rows, value)
    assert capture.calls == 2, "nothing more is captured after the failure"
    assert tower.replayed == 7
    assert len(warnings) == 1
    assert str(error) in warnings[0]


def test_captures_of_towers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In number, in rows and in pixels. A wrong image is an error each time, and is not remembered."""
    monkeypatch.setattr(towers, "MOST_GRAPHS", 2)
    monkeypatch.setattr(towers, "CAPTURED_TOKENS", 20)
    capture = Failing(MEMORY, first=9)
    tower = CapturedTower(Mean(), capture, patch=4)
    for _ in range(2):
        with pytest.raises(ValueError, match="one row"):
            tower.embed(torch.zeros(1, 1, 4, 3, dtype=torch.uint8))
    for value, rows in enumerate((21, 2, 3, 4, 20, 4)):
        encoded(tower, rows, value)
    assert list(tower._graphs) == [(1, 2, 4, 3), (1, 3, 4, 3)]
    assert capture.calls == 2
    monkeypatch.setattr(towers, "CAPTURED_PATCHES", 1)
    tower = CapturedTower(Mean(), capture, patch=4)
    for value, rows in enumerate((5, 4)):
        encoded(tower, rows, value)
    assert list(tower._graphs) == [(1, 4, 4, 3)]


def test_the_memory_of_captured_images_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image is larger than all before: few are captured. Smaller ones need no new memory."""
    monkeypatch.setattr(towers, "CAPTURED_PATCHES", 10)
    monkeypatch.setattr(towers, "CAPTURED_GROWTH", 20)
    tower = CapturedTower(Mean(), Failing(MEMORY, first=99), patch=2)
    for value, rows in enumerate((5, 6, 7, 8, 9, 10, 2, 3)):
        encoded(tower, rows, value)
    assert [shape[1] for shape in tower._graphs] == [5, 6, 7, 2, 3]
    tower = CapturedTower(Mean(), Failing(MEMORY, first=99), patch=2)
    for frames, rows in ((2, 5), (1, 10), (1, 5), (1, 6)):  # a tower may join the two frames
        for _ in range(2):
            tower.embed(torch.zeros(frames, rows, 4, 3, dtype=torch.uint8))
    assert list(tower._graphs) == [(2, 5, 4, 3), (1, 10, 4, 3), (1, 5, 4, 3), (1, 6, 4, 3)]
    assert tower._room == 0


def test_an_image_is_encoded_without_memory_for_captures(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    def full(*args: Any) -> None:
        raise MEMORY

    capture = Failing(MEMORY)
    tower = CapturedTower(Mean(), capture, patch=4)
    monkeypatch.setattr(torch.Tensor, "new_empty", full)
    for value in range(3):
        encoded(tower, 2, value)
    assert (capture.calls, tower.replayed, len(warnings)) == (0, 0, 1)
