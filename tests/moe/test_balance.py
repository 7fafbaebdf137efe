"""Experts move while tokens come, and no token changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.moe.test_dispatch import LAYOUTS, divided, rows_of
from tests.support.checkpoints import make_checkpoint
from tests.support.ranks import on_ranks
from tests.support.routed import routed
from tests.support.slowness import deadline
from weft.config.families import load_spec
from weft.layers.build import ExpertOptions
from weft.models.decoder import Model
from weft.models.loader import load_model
from weft.moe.balance import ExpertLayers
from weft.moe.expert_choice import DOUBLINGS
from weft.moe.placement import in_order, rank_loads
from weft.ops import moe
from weft.parallel.comm import drive
from weft.parallel.mesh import Mesh, make_mesh
from weft.types.exchange import Exchange

Tensor = torch.Tensor
CPU = torch.device("cpu")


@pytest.mark.requirement("C7")
@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize(
    ("name", "form", "kind"),
    [("ep4", "reduce", "biased"), ("dp2", "throughput", "corrected"), ("tp2dp2", "low-latency", "int8")],
)
def test_experts_move_and_bits_stay(name: str, form: str, kind: str, redundant: int) -> None:
    """With invariance a layer has the same bits before and after the move. Its busiest rank has less work."""
    layout, dtype = LAYOUTS[name], torch.float32
    weights = routed("plain" if kind == "int8" else kind, dtype)
    weights.router[:3] += 0.4  # everybody likes the first ones
    pieces, alone = moe.TILED, moe.moe_tiled
    if kind == "int8":
        weights, pieces, alone = moe.quantized(weights), moe.TILED_INT8, moe.moe_tiled_int8
    rows = rows_of(layout, dtype, (60, 41))
    agreed = Exchange(form, 60) if layout.data > 1 else Exchange()
    placement = in_order(16, layout.ranks, redundant)

    def work(mesh: Mesh) -> Any:
        blocks = [
            divided(mesh, weights, form, pieces, exact=True, placement=placement, counts=True)
            for _ in range(2)
        ]
        layers, made = ExpertLayers(blocks), []
        for _ in range(3):
            x, ids = rows[layout.replica(mesh.rank)]
            made += [drive(block.steps(x, ids, agreed)) for block in blocks]
            drive(layers.rebalance())
        held = [[block.weights, block.map.placement[mesh.rank]] for block in blocks]
        return made, layers.placements, layers.moved, held

    ranks = on_ranks(layout, work)
    for rank, (made, placements, _, held) in enumerate(ranks):
        x, ids = rows[layout.replica(rank)]
        expected = alone(x, ids, weights)
        assert all(torch.equal(one, expected) for one in made)
        assert placements == ranks[0][1]
        for own, mine in held:
            for name_of in ("gate_up", "down"):
                ours, theirs = getattr(own, name_of), getattr(weights, name_of)
                if kind == "int8":
                    assert torch.equal(ours.scales, theirs.scales[list(mine)])
                    ours, theirs = ours.values, theirs.values
                assert torch.equal(ours, theirs[list(mine)])
    assert sum(moved for _, _, moved, _ in ranks) > 0
    chosen = [moe.choose_experts(x, ids, weights, torch.nn.functional.linear)[0] for x, ids in rows]
    loads = torch.bincount(torch.cat(chosen).view(-1), minlength=16).tolist()
    assert max(rank_loads(ranks[0][1][0], loads)) < max(rank_loads(placement, loads))


def _ranks(folder: str, name: str, epochs: Callable[[Mesh, Model, int], None], rounds: int) -> list[Any]:
    """Run ranks whose groups form ``rounds`` times, with ``epochs(mesh, model, epoch)`` in between."""
    layout, store = LAYOUTS[name], dist.HashStore()
    together = threading.Barrier(layout.ranks)
    made: list[Any] = [None] * layout.ranks

    def run(rank: int) -> None:
        try:
            mesh = make_mesh(layout, rank)
            model = _load(folder, mesh)
            for epoch in range(rounds):
                if epoch == rounds - 1 and rank == 1:  # the rank was restarted
                    mesh = make_mesh(layout, rank)
                    model = _load(folder, mesh)
                mesh.connect(store, epoch, deadline(30))
                epochs(mesh, model, epoch)
                together.wait(deadline(60))
                mesh.abort()
                together.wait(deadline(60))
            made[rank] = model
        except BaseException as error:
            made[rank] = error
            together.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(layout.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(90))
        assert not thread.is_alive()
    for one in made:
        if isinstance(one, BaseException):
            raise one
    return made


def _load(folder: str, mesh: Mesh, **more: Any) -> Model:
    spec = load_spec(folder, None)
    options = ExpertOptions(redundant=2, counts=True)
    return load_model(folder, spec, torch.float64, CPU, progress=False, mesh=mesh, experts=options, **more)


def _disturb(model: Model) -> None:
    """Simulate a few experts with most of the rows."""
    assert model.experts is not None
    for number, layer in enumerate(model.experts._layers):
        assert layer.loads is not None
        layer.loads += torch.tensor([97 // (1 + (e + number) % 8) for e in range(len(layer.loads))])


@pytest.mark.parametrize("torn", [False, True])
def test_a_rank_that_was_started_anew_takes_over_where_experts_are(torn: bool, tmp_path: Path) -> None:
    """Other ranks keep their experts. All return to the initial placement only if experts were lost in a
    move."""
    folder = str(make_checkpoint(tmp_path, "qwen3_moe"))

    def epochs(mesh: Mesh, model: Model, epoch: int) -> None:
        assert model.experts is not None
        if epoch == 0:
            _disturb(model)
            drive(model.experts.rebalance())
            assert model.experts.placements[0] != in_order(experts, 2, 2)
            if torn and mesh.rank == 0:
                model.experts._torn = True
                for layer in model.experts._layers:
                    layer.weights.gate_up.zero_()

    experts = load_spec(folder, None).moe.experts  # type: ignore[union-attr]
    models = _ranks(folder, "dp2", epochs, 2)
    placements = models[0].experts.placements
    assert placements == models[1].experts.placements
    assert (placements[0] == in_order(experts, 2, 2)) == torn
    whole = dict(
        load_model(folder, load_spec(folder, None), torch.float64, CPU, progress=False).named_parameters()
    )
    names = [name.removesuffix("experts.gate_up") for name in whole if name.endswith("experts.gate_up")]
    for rank, model in enumerate(models):
        for layer, name in enumerate(names):
            mine = list(placements[layer][rank])
            weights = model.experts._layers[layer].weights
            assert torch.equal(weights.gate_up, whole[f"{name}experts.gate_up"][mine])
            assert torch.equal(weights.down, whole[f"{name}experts.down"][mine])


def test_ranks_with_other_tables_follow_the_first(tmp_path: Path) -> None:
    folder = str(make_checkpoint(tmp_path, "qwen3_moe"))

    def epochs(mesh: Mesh, model: Model, epoch: int) -> None:
        assert model.experts is not None
        choosers = [layer.chooser for layer in model.experts._layers]
        if epoch == 0:
            for chooser in choosers:  # as if each rank had measured
                chooser.follow([mesh.rank] * DOUBLINGS)
        else:
            assert {chooser.form(8) for chooser in choosers} == {choosers[0].form(8)}

    models = _ranks(folder, "ep2", epochs, 2)
    votes = {tuple(layer.chooser.votes()) for model in models for layer in model.experts._layers}
    assert votes == {(0,) * DOUBLINGS}
