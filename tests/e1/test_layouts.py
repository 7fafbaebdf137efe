"""Bitwise invariance over layouts: at fixed parallel sizes, logits have equal bits, whatever else runs.

The reference of every sequence is a run alone on the same ranks: the whole prompt in one step, no
micro-batches, no cache. The compared runs have batches in chunks, preemption, prefix hits, two steps in
flight and micro-batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import submit
from tests.e1.rig import Witness, force_preemptions, make_checkpoint, make_engine
from tests.e1.test_grid import PROMPTS, SAMPLING
from tests.support.expert_groups import Leads, Replica, run_layout
from tests.support.slow import mostly_slow
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout
from weft.types.messages import Submit

LAYOUTS = {
    "tp2": Layout(tensor=2),
    "ep2": Layout(tensor=2, expert=True),
    "dp2ep2": Layout(data=2, expert=True),
    "tp2dp2": Layout(tensor=2, data=2, expert=True),
}
MODELS = ["qwen3_moe", "deepseek_v3", "qwen3_next"]
OVERLAPS = ["off", "prefill", "all"]
SEQUENCES = [1, 2, 3, 4]
"""Numbers of prompts."""
#: By default replicas that share experts; with the slow ones every layout, model and overlap once; the rest
#: under ``-m grid``.
MARKS: dict[tuple[str, str, str], list[pytest.MarkDecorator]] = {
    ("tp2", "qwen3_next", "all"): [pytest.mark.slow],
    ("ep2", "deepseek_v3", "prefill"): [pytest.mark.slow],
    ("dp2ep2", "qwen3_moe", "all"): [],
    ("tp2dp2", "qwen3_moe", "off"): [pytest.mark.slow],
}
CASES = [
    pytest.param(
        layout,
        model,
        overlap,
        marks=MARKS.get((layout, model, overlap), [pytest.mark.grid]),
        id=f"{layout}-{model}-{overlap}",
    )
    for layout in LAYOUTS
    for model in MODELS
    for overlap in OVERLAPS
]


class LeadingWitness(Leads, Witness):
    """The runner of an engine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in made:
            made[model] = make_checkpoint(tmp_path_factory.mktemp("layouts"), model)
        return made[model]

    return get


def of(number: int) -> Submit:
    return submit(number, PROMPTS[number], SAMPLING["seeded"], request=number)


def logits(replicas: list[Replica]) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Return (seed, position) -> the sampled logits, of all replicas."""
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for replica in replicas:
        for key, rows in replica.runner.bits.items():
            found.setdefault(key, []).extend(rows)
    return found


@pytest.mark.requirement("A19")
@pytest.mark.parametrize(("layout", "model", "overlap"), CASES)
def test_bits_do_not_depend_on_company(folder: Any, layout: str, model: str, overlap: str) -> None:
    _check(folder(model), LAYOUTS[layout], overlap, "fallback")


@mostly_slow(
    ("layout", "model", "cache"),
    [
        ("ep2", "qwen3_moe", "auto"),
        ("dp2ep2", "qwen3_moe", "auto"),
        ("tp2", "deepseek_v4", "auto"),
        ("tp2", "deepseek_v32", "fp8"),
        ("tp2", "glm_dsa", "fp8"),
        pytest.param("tp2", "qwen3_moe", "auto", marks=pytest.mark.grid),
        pytest.param("tp2", "deepseek_v32", "auto", marks=pytest.mark.grid),
        pytest.param("tp2", "deepseek_v4", "fp8", marks=pytest.mark.grid),
        pytest.param("tp2", "glm_dsa", "auto", marks=pytest.mark.grid),
        pytest.param("ep2", "deepseek_v3", "auto", marks=pytest.mark.grid),
        pytest.param("tp2dp2", "deepseek_v3", "auto", marks=pytest.mark.grid),
        pytest.param("dp2ep2", "qwen3_next", "auto", marks=pytest.mark.grid),
    ],
    [("dp2ep2", "qwen3_moe", "auto")],
)
def test_nor_with_the_cpp_operations_and_replayed_steps(
    folder: Any, layout: str, model: str, cache: str
) -> None:
    """The reference runs eager steps, the batch runs replayed steps."""
    replicas = _check(folder(model), LAYOUTS[layout], "off", "cpp", cache, replay=True)
    for replica in replicas:
        graphs = replica.runner.graphs
        assert graphs is not None
        assert graphs.replayed > (7 if LAYOUTS[layout].data == 1 else 3)


def _check(
    where: Path, shape: Layout, overlap: str, form: str, cache: str = "auto", **more: Any
) -> list[Replica]:
    def make(**options: Any) -> Any:
        return lambda mesh: _engine(where, mesh, form, kv_cache_dtype=cache, **options)

    expected: dict[tuple[int, int], list[torch.Tensor]] = {}
    idle: list[list[list[Submit]]] = [[] for _ in range(shape.data - 1)]
    for number in SEQUENCES:
        expected |= logits(run_layout(shape, make(), LeadingWitness, [[[of(number)]], *idle]))
    turns = [[[of(1), of(2)], [], [], [of(3)], *[[]] * 5, [of(4)]]]
    if shape.data > 1:
        turns = [[[of(1)], [], [], [of(3)]], [[], [of(2)], *[[]] * 6, [of(4)]]]
    replicas = run_layout(
        shape,
        make(chunk=48, depth=2, caching=True, **more),
        LeadingWitness,
        turns,
        overlap=overlap,
        each_turn=force_preemptions,
    )
    found = logits(replicas)
    assert found.keys() == expected.keys()
    for key, rows in found.items():
        for row in rows:
            assert torch.equal(row, expected[key][0]), (key, len(rows), (row - expected[key][0]).abs().max())
    assert sum(replica.stats.preemptions for replica in replicas)
    assert max(replica.deepest for replica in replicas) == 2
    if overlap != "off":
        assert sum(replica.stats.overlapped_steps for replica in replicas)
    return replicas


def _engine(folder: Path, mesh: Mesh, form: str, **options: Any) -> tuple[Any, Any]:
    return make_engine(folder, "float32", form, mesh=mesh, max_num_seqs=8, blocks=256, **options)
