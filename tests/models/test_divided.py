"""With experts divided over ranks, models compute the results of a single rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.support.ranks import on_ranks
from tests.support.sharded import assert_parts, note_reads, weights_of
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.config import sharding
from weft.config.families import load_spec
from weft.layers import build
from weft.layers.build import ExpertOptions
from weft.layers.pending_codes import Weight
from weft.models.decoder import Model
from weft.models.loader import load_model
from weft.moe.block import RoutedMLP
from weft.ops import cpu, registry
from weft.parallel.mesh import Mesh
from weft.types.exchange import UNAGREED, Exchange
from weft.types.layout import Layout

CPU = torch.device("cpu")
CLOSE = 1e-12
"""Tolerance relative to the largest logit, in float64: sums have another order."""
EP2 = Layout(tensor=2, expert=True)
LAYOUTS = {
    "ep2": EP2,
    "ep4": Layout(tensor=4, expert=True),
    "dp2": Layout(data=2, expert=True),
    "dp4": Layout(data=4, expert=True),
    "tp2dp2": Layout(tensor=2, data=2, expert=True),
}
DEFAULT = [
    ("qwen3-moe", "ep2", "reduce"),
    ("qwen3-moe", "dp4", "throughput"),
    ("deepseek-v3", "tp2dp2", "low-latency"),
    ("gpt-oss", "dp2", "gather"),
    ("deepseek-v4", "dp2", "throughput"),
    ("deepseek-v4", "ep2", "auto"),
    ("qwen3-next", "tp2dp2", "auto"),
    ("mixtral", "ep2", "low-latency"),
    ("nemotron-h-moe", "ep2", "gather"),
    ("gemma4-moe", "tp2dp2", "throughput"),
    ("llama4", "ep2", "reduce"),
    ("ernie-moe", "dp2", "gather"),
]
MODELS = (
    "qwen3-moe",
    "qwen3-moe-sparse-step",
    "mixtral",
    "deepseek-v2-groups-yarn",
    "deepseek-v3",
    "qwen3-5-moe",
    "qwen3-next",
    "gpt-oss",
    "gpt-oss-clamped",
    "deepseek-v4",
    "deepseek-v4-odd",
    "deepseek-v32",
    "glm-dsa",
    "kimi-linear",
    "lfm2-moe",
    "nemotron-h-moe",
    "gemma4-moe",
    "llama4",
    "glm4-moe",
    "minimax-m2",
)
GRID = [
    (model, layout, form)
    for model in MODELS
    for layout in LAYOUTS
    for form in ("reduce", "throughput", "low-latency", "gather")
    if (form != "reduce" or LAYOUTS[layout].data == 1) and (model, layout, form) not in DEFAULT
]


def _run(model: Model, paged: Any, replica: int, exchange: Exchange = UNAGREED) -> Tensor:
    """Mixed steps over two sequences, of other lengths in each replica; the last ones have no row there."""
    harness = paged(model)
    harness.exchange = exchange
    first = harness.sequence([(7 * i + 3 + replica) % 90 for i in range(19)])
    second = harness.sequence([(11 * i + 1 + replica) % 90 for i in range(14)])
    harness.step([(first, 6 - replica)])
    harness.step([(second, 9), (first, 7)] if replica % 2 == 0 else [])
    harness.step([(second, 1)], [(first, 3)])
    harness.step([], [] if replica == 1 else [(second, 1), (first, 1)])
    return torch.stack([*first.logits, *second.logits])


def _check(name: str, layout: Layout, form: str, checkpoints: Any, paged: Any, dtype: torch.dtype) -> None:
    checkpoint = checkpoints(name)
    try:
        sharding.check(load_spec(checkpoint.folder, None), layout)
    except ConfigError:
        pytest.skip(f"{name} does not divide by {layout.tensor}")
    expected = [_run(checkpoint.load(dtype), paged, replica) for replica in range(layout.data)]
    agreed = Exchange("" if form == "auto" else form, 16) if layout.data > 1 else UNAGREED

    def work(mesh: Mesh) -> Tensor:
        model = checkpoint.load(dtype, mesh=mesh, experts=ExpertOptions(dispatch=form))
        assert any(isinstance(m, RoutedMLP) and m.divided is not None for m in model.modules())
        return _run(model, paged, layout.replica(mesh.rank), agreed)

    found = on_ranks(layout, work)
    for rank, one in enumerate(found):
        head = found[layout.replica(rank) * layout.tensor]
        assert torch.equal(one, head), "ranks of a replica have other bits"
        right = expected[layout.replica(rank)]
        assert one.shape == right.shape
        assert (one - right).abs().max() <= CLOSE * right.abs().max()


@pytest.mark.requirement("A10")
@mostly_slow(
    ("name", "layout", "form"),
    DEFAULT + [pytest.param(*case, marks=pytest.mark.grid) for case in GRID],
    DEFAULT[:4],
)
def test_logits_are_those_of_one_rank(
    name: str, layout: str, form: str, checkpoints: Any, paged: Any
) -> None:
    _check(name, LAYOUTS[layout], form, checkpoints, paged, torch.float64)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss", "deepseek-v4"])
def test_each_rank_reads_its_experts_alone(
    name: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints(name)
    spec = load_spec(checkpoint.folder, None)
    assert spec.moe is not None
    read = note_reads(monkeypatch)

    def load(mesh: Mesh | None = None) -> tuple[dict[str, Weight], dict[str, int]]:
        model = load_model(checkpoint.folder, spec, torch.float32, CPU, progress=False, mesh=mesh, pack=False)
        experts = {name: weight for name, weight in weights_of(model).items() if ".experts." in name}
        return experts, read[threading.get_ident()]

    whole, ranks = load()[0], on_ranks(Layout(data=2, expert=True), load)
    assert_parts(whole, [experts for experts, _ in ranks])
    for published, values in load_file(Path(checkpoint.folder) / "model.safetensors").items():
        each = [found.get(published, 0) for _, found in ranks]
        if ".experts." in published and name != "gpt-oss":  # the rows are published in another order
            assert sum(each) == values.nbytes, published


@pytest.mark.parametrize("moving", [False, True])
def test_a_model_names_experts_that_move(moving: bool, checkpoints: Any) -> None:
    checkpoint = checkpoints("qwen3-moe")
    experts = ExpertOptions(counts=moving)
    for invariant in (False, True):
        found = on_ranks(
            Layout(tensor=2, expert=True),
            lambda mesh, own=invariant: checkpoint.load(mesh=mesh, experts=experts, invariant=own).varying,
        )
        for varying in found:
            assert ("moe_copies (of experts that move)" in varying) == (moving and not invariant)


@pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")
def test_ranks_whose_experts_answer_in_other_dtypes_do_not_form(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert's output is float32 in C++, and the model's dtype in torch."""
    checkpoint, store, apart = checkpoints("qwen3-moe"), dist.HashStore(), threading.Barrier(2)
    real = registry.choose

    def choose(op: str, *given: Any, **more: Any) -> Any:
        if op == "moe_pieces" and threading.current_thread() in without:
            return next(one for one in registry._OPS[op] if one.name == "torch_tiled")
        return real(op, *given, **more)

    monkeypatch.setattr(build, "choose", choose)
    without: list[threading.Thread] = []

    def work(mesh: Mesh) -> str:
        if mesh.rank:
            without.append(threading.current_thread())
        checkpoint.load(torch.bfloat16, mesh=mesh, invariant=True)
        mesh.abort()
        apart.wait(deadline(30))
        with pytest.raises(ConfigError) as refused:
            mesh.connect(store, 1, deadline(30))
        return refused.value.message

    assert all("weft build-ops" in said for said in on_ranks(EP2, work))
