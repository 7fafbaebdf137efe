"""The simulated device alone: accepted calls, refused calls, and cleanup."""

from __future__ import annotations

import ast
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.rehearsal import rig
from tests.rehearsal.calls import ROOT
from tests.rehearsal.device import WAITS, HiddenWait, NotCapturable, OnHost, running
from weft.ops.upload import upload

CUDA = torch.device("cuda")


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device=CUDA)


REFUSED: dict[str, Callable[[], object]] = {
    "item": lambda: zeros(2)[0].item(),
    "tolist": lambda: zeros(2).tolist(),
    "bool": lambda: bool(zeros(1) > 0),
    "nonzero": lambda: zeros(2).nonzero(),
    "mask": lambda: zeros(2)[zeros(2) > 0],
    "repeats": lambda: zeros(2).repeat_interleave(torch.ones(2, dtype=torch.int64, device=CUDA)),
    "cpu": lambda: zeros(2).cpu(),
    "to": lambda: zeros(2).to("cpu", torch.float64),
    "list": lambda: torch.tensor([1, 2], device=CUDA),
    "pageable": lambda: torch.from_numpy(np.arange(3)).to(CUDA, non_blocking=True),
    "blocking": lambda: torch.arange(3).pin_memory().to(CUDA),
    "read": lambda: torch.empty(2).copy_(zeros(2), non_blocking=True),
    "one element": lambda: zeros(2).__setitem__(0, 1.0),
    "elements": lambda: zeros(2).__setitem__(upload(np.arange(2), CUDA), 1.0),
    "event": lambda: torch.cuda.Event().synchronize(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inference", [False, True])
def test_waits_are_refused(name: str, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raises = pytest.raises(HiddenWait)
    with rig.rehearsed(monkeypatch) as made, running(made), torch.inference_mode(inference), raises:
        REFUSED[name]()


def test_work_without_waits_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.rehearsed(monkeypatch) as made, running(made):
        x = zeros(4, 8)
        index = upload(np.arange(3), CUDA)
        x[0] = 1.0  # fills a row; setting one element copies the value
        x[0, 0].fill_(2.0)
        x[index] = x[index] * torch.tensor(2.0)
        host = torch.empty(3, dtype=torch.int64, pin_memory=True).copy_(index, non_blocking=True)
        assert x[index].shape == (3, 8)
        assert x.device.type == "cuda"
        assert not host.is_cuda


def test_indices_on_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would copy the indices, and wait for the copy."""
    with rig.rehearsed(monkeypatch) as made, running(made), pytest.raises(OnHost):
        zeros(4)[torch.arange(2)]


def test_values_are_computed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.rehearsed(monkeypatch, values=True) as made, running(made), torch.inference_mode():
        x = upload(np.arange(6.0), CUDA).view(2, 3)
        x[1] += 1
        host = torch.empty(2, dtype=torch.float64, pin_memory=True)
        host.copy_(x.sum(dim=1), non_blocking=True)
    assert host.tolist() == [3.0, 15.0]


def test_a_replay_computes_again_in_the_memory_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.rehearsed(monkeypatch, values=True) as made, torch.inference_mode():
        x, total = zeros(3), zeros(3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=(0, 1), stream=torch.cuda.Stream()):
            total += x + 1
        assert made.values_of(total).tolist() == [0.0] * 3, "a capture computes nothing"
        for _ in range(2):
            x.fill_(2.0)
            graph.replay()
        assert made.values_of(total).tolist() == [6.0] * 3


def test_a_stream_that_a_capture_forks_must_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.rehearsed(monkeypatch):
        x, beside = zeros(3), torch.cuda.Stream()
        capture = torch.cuda.graph(torch.cuda.CUDAGraph(), pool=(0, 1), stream=torch.cuda.Stream())

        def fork() -> None:
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                x.add(1)

        with pytest.raises(NotCapturable, match="does not wait for"), capture:
            fork()


def test_only_events_that_have_happened_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.rehearsed(monkeypatch):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        behind = torch.cuda.Event()
        zeros(3).add_(1)
        for event in (began, ended, behind):
            event.record()
            zeros(3).add_(1)
        with pytest.raises(AssertionError, match="may not have happened"):
            began.elapsed_time(ended)
        while not behind.query():
            pass
        assert began.elapsed_time(ended) == 0.0
        with pytest.raises(AssertionError, match="without enable_timing"):
            began.elapsed_time(behind)


def test_every_place_where_the_host_may_wait_is_there() -> None:
    for file, function in WAITS:
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_nothing_stays_of_a_rehearsal() -> None:
    with pytest.MonkeyPatch.context() as patch, rig.rehearsed(patch):
        zeros(2)[0]
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        zeros(2)
