"""Experts of the generic backend divided over ranks: results of one rank, moves, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.conftest import Paged
from tests.models.test_generic import assert_close, opened, saved, spec_of
from tests.support.generic_table import prompts_of
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError
from weft.config.expert_settings import check_experts
from weft.config.sections.all import ParallelSection
from weft.config.sizing.memory import weight_bytes
from weft.layers.build import ExpertOptions
from weft.models.generic import load as loading
from weft.parallel.comm import drive
from weft.parallel.mesh import Mesh
from weft.types.exchange import Exchange
from weft.types.layout import Layout

LAYOUTS = {
    "dp2": Layout(data=2, expert=True),
    "ep2": Layout(tensor=2, expert=True),
    "tp2dp2": Layout(tensor=2, data=2, expert=True),
}
PROMPTS = prompts_of(17, 9)
STEPS = ((9, 6), (7, 0), (1, 3))
"""Tokens of each replica in each step; the second replica idles in one step."""


def logits_of(model: Any, replica: int, form: str = "") -> torch.Tensor:
    """Return the logits of the prompt of ``replica``, computed in steps that the replicas share."""
    rig = Paged(model)
    row = rig.sequence(PROMPTS[replica])
    for counts in STEPS:
        agreed = form or "throughput"
        rig.exchange = Exchange(agreed, max(counts)) if model.mesh.layout.data > 1 else Exchange()
        rig.step([(row, counts[replica])] if counts[replica] else [])
    return torch.stack(row.logits)


@mostly_slow(
    ("name", "layout"),
    [
        *((name, "dp2") for name in ("Qwen3Moe", "MiniMaxM2", "Glm4Moe", "Mixtral", "GptOss")),
        *((name, layout) for name in ("Qwen3Moe", "Glm4Moe", "GptOss") for layout in ("ep2", "tp2dp2")),
    ],
    [("Glm4Moe", "dp2")],
)
def test_divided_experts_give_the_logits_of_one_rank(name: str, layout: str, tmp_path: Path) -> None:
    saved(tmp_path, name)
    one = opened(tmp_path, name)
    expected = [logits_of(one, replica) for replica in range(2)]
    shape = LAYOUTS[layout]

    def work(mesh: Mesh) -> tuple[int, torch.Tensor]:
        model = opened(tmp_path, name, mesh=mesh)
        assert model.experts is not None
        return model.mesh.layout.replica(mesh.rank), logits_of(model, shape.replica(mesh.rank))

    for replica, found in on_ranks(shape, work):
        assert_close(found, expected[replica])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gather", "low-latency"])
def test_every_form_of_dispatch(form: str, tmp_path: Path) -> None:
    saved(tmp_path, "Qwen3Moe")
    expected = [logits_of(opened(tmp_path, "Qwen3Moe"), replica) for replica in range(2)]

    def work(mesh: Mesh) -> torch.Tensor:
        return logits_of(opened(tmp_path, "Qwen3Moe", mesh=mesh), mesh.rank, form)

    for replica, found in enumerate(on_ranks(LAYOUTS["dp2"], work)):
        assert_close(found, expected[replica])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_experts_move_and_are_read_again(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name)
    expected = [logits_of(opened(tmp_path, name), replica) for replica in range(2)]

    def work(mesh: Mesh) -> tuple[torch.Tensor, ...]:
        model = opened(tmp_path, name, mesh=mesh, experts=ExpertOptions(counts=True, redundant=2))
        assert model.experts is not None
        before = model.experts.placements
        first = logits_of(model, mesh.rank)
        drive(model.experts.rebalance())
        assert model.experts.placements != before
        moved = logits_of(model, mesh.rank)
        model.experts._take(None)  # as after the loss of a rank
        return first, moved, logits_of(model, mesh.rank)

    for replica, results in enumerate(on_ranks(LAYOUTS["dp2"], work)):
        for found in results:
            assert_close(found, expected[replica])


def test_experts_without_an_op_are_not_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "Qwen2Moe")
    parallel = ParallelSection(data_parallel_size=2, enable_expert_parallel=True)
    spec = spec_of(tmp_path, "Qwen2Moe")
    assert check_experts(spec, parallel) is spec
    monkeypatch.setattr("weft.models.generic.recognition.gate_of", lambda module: None)
    with pytest.raises(ConfigError, match="does not compute the experts of Qwen2MoeExperts"):
        check_experts(spec_of(tmp_path, "Qwen2Moe"), parallel)
    with pytest.raises(ConfigError, match="--enable-expert-parallel: Weft's op does not compute"):
        on_ranks(LAYOUTS["dp2"], lambda mesh: opened(tmp_path, "Qwen2Moe", mesh=mesh))


def test_a_model_without_experts_is_not_divided(tmp_path: Path) -> None:
    saved(tmp_path, "Llama")
    parallel = ParallelSection(data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="has no routed experts"):
        check_experts(spec_of(tmp_path, "Llama"), parallel)


def test_planned_weights_contain_the_experts_of_the_rank(tmp_path: Path) -> None:
    size = saved(tmp_path, "Qwen2Moe").num_parameters()
    spec = spec_of(tmp_path, "Qwen2Moe")
    assert spec.counted_experts is not None
    half = spec.counted_experts.elements // 2
    assert weight_bytes(spec, "float32", layout=LAYOUTS["dp2"]) == 4 * (size - half)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GptOss", "Qwen3Moe"])
@pytest.mark.parametrize("layout", ["dp2", "ep2", "tp2dp2"])
def test_planned_weights_equal_the_weights_of_a_rank(name: str, layout: str, tmp_path: Path) -> None:
    """The down biases of GPT-OSS are whole on tensor parallel ranks. Some ranks have one expert less."""
    saved(tmp_path, name)
    due = weight_bytes(spec_of(tmp_path, name), "float32", layout=LAYOUTS[layout])

    def work(mesh: Mesh) -> int:
        model = opened(tmp_path, name, torch.float32, mesh=mesh, pack=False)
        return sum(weight.numel() for weight in model.parameters())

    assert 4 * max(on_ranks(LAYOUTS[layout], work)) == due


@pytest.mark.slow
def test_modules_that_are_read_refuse_divided_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load replaces no module, so every rank would have all experts."""
    saved(tmp_path, "Qwen2Moe")

    def fails(*_: Any) -> None:
        raise AttributeError("no weight")

    monkeypatch.setattr(loading, "check_loaded", fails)
    with pytest.raises(ConfigError, match="reads modules that Weft replaces"):
        on_ranks(LAYOUTS["dp2"], lambda mesh: opened(tmp_path, "Qwen2Moe", mesh=mesh))
