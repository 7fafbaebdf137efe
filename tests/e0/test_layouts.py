"""Exact tokens over layouts: in float64, tokens equal those of one rank for any distribution of the model.

The reference of every sequence is a run alone on one rank, without speculation. Layouts are tensor parallel,
experts divided over ranks, replicas that share experts, and both. Each runs with overlap, drafts, prefix
hits, mixed steps, preemption, two steps in flight and every form of dispatch. The default run has a part of a
cover of pairs; ``-m grid`` runs the whole cover, also on four ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e0.rig import submit
from tests.e0.test_grid import FILLER, PROMPTS
from tests.e0.test_speculation import SAMPLING, Reference
from tests.support.expert_groups import on_layout
from tests.support.pairwise import covering, name, numbers_of
from weft.config.sections.all import SpeculationSection
from weft.types.layout import Layout
from weft.types.messages import Submit

LAYOUTS = {
    "tp2": Layout(tensor=2),
    "tp4": Layout(tensor=4),
    "ep2": Layout(tensor=2, expert=True),
    "ep4": Layout(tensor=4, expert=True),
    "dp2ep2": Layout(data=2, expert=True),
    "tp2dp2": Layout(tensor=2, data=2, expert=True),
    "dp4ep4": Layout(data=4, expert=True),
}
FEATURES: dict[str, list[Any]] = {
    "model": ["qwen3_moe", "deepseek_mtp", "qwen3_next_wide", "deepseek_v4"],
    "layout": list(LAYOUTS),
    "overlap": ["off", "prefill", "all"],
    "drafts": [0, 1, 2, 3],
    "dispatch": ["throughput", "low-latency", "gather", "reduce"],
    "prefix": ["hit", "miss"],
    "policy": ["mixed", "exclusive"],
    "preempt": [False, True],
    "depth": [1, 2],
    "sampling": ["greedy", "seeded"],
}
COVER = covering(FEATURES)
SMALL = {**FEATURES, "layout": ["tp2", "ep2", "dp2ep2"], "drafts": [0, 3]}
DEFAULT = covering(SMALL)
BATCH = 6


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("layouts"))


def arrivals(case: dict[str, Any], data: int) -> list[list[list[Submit]]]:
    """Return the requests of each replica, by turn. Of four replicas two stay idle."""
    params = SAMPLING[case["sampling"]]
    first = [submit(100 + r, FILLER, params, request=99) for r in range(data)]
    many = [submit(1 + i, PROMPTS[i], params, request=i) for i in range(BATCH)]
    if data == 1:
        return [[first if case["prefix"] == "hit" else [], many[:4], [], many[4:]]]
    turns: list[list[list[Submit]]] = [[[], [], [], []] for _ in range(data)]
    if case["prefix"] == "hit":
        turns[0][0].append(first[0])
    for number, one in enumerate(many):
        turns[min(number % 2, data - 1)][1 + 2 * (number // 4)].append(one)
    return turns


def check(reference: Reference, case: dict[str, Any]) -> None:
    model, sampling, layout = case["model"], case["sampling"], LAYOUTS[case["layout"]]
    drafter = "none" if not case["drafts"] else "mtp" if model == "deepseek_mtp" else "ngram"
    folder = reference.folder(model)
    replicas = on_layout(
        layout,
        folder,
        arrivals(case, layout.data),
        overlap=case["overlap"],
        dispatch="auto" if case["dispatch"] == "reduce" and layout.data > 1 else case["dispatch"],
        mtp=int(drafter == "mtp"),
        depth=case["depth"],
        policy=case["policy"],
        caching=case["prefix"] == "hit",
        chunk=16,
        blocks=24 if case["preempt"] else 256,
        speculation=SpeculationSection(
            speculative_method=drafter,  # type: ignore[arg-type]
            num_speculative_tokens=max(case["drafts"], 1),
            speculative_adaptive=False,
        ),
    )
    answers = {number: one for replica in replicas for number, one in replica.answers.items()}
    for i in range(BATCH):
        want = reference.answer(model, sampling, i, 0)
        assert answers[1 + i].tokens == want.tokens, (i, case)
        assert answers[1 + i].ends == want.ends
    engaged(case, layout, replicas)


def engaged(case: dict[str, Any], layout: Layout, replicas: list[Any]) -> None:
    """Check that the features of the case were active."""
    stats = [replica.stats for replica in replicas]
    assert max(replica.deepest for replica in replicas) == case["depth"]
    if case["overlap"] != "off":
        assert sum(replica.overlapped for replica in replicas)
    if case["drafts"]:
        assert sum(sum(one.drafts) for one in stats)
    if case["policy"] == "mixed":
        assert sum(one.mixed_steps for one in stats)
    if layout.data > 1:
        assert len({one.steps for one in stats}) == 1
        assert all(plan.agreed is not None for replica in replicas for plan in replica.plans)
    elif case["preempt"]:
        assert sum(one.preemptions for one in stats)


@pytest.mark.requirement("A19")
@pytest.mark.parametrize("number", numbers_of(DEFAULT))
def test_cover_of_small_layouts(reference: Reference, number: int) -> None:
    check(reference, DEFAULT[number])


@pytest.mark.grid
@pytest.mark.parametrize("case", COVER, ids=name)
def test_cover(reference: Reference, case: dict[str, Any]) -> None:
    check(reference, case)


@pytest.mark.grid
@pytest.mark.parametrize("overlap", FEATURES["overlap"])
@pytest.mark.parametrize("model", FEATURES["model"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout(reference: Reference, layout: str, model: str, overlap: str) -> None:
    """Every layout, model and kind of overlap runs with two drafts."""
    check(
        reference,
        {
            "model": model,
            "layout": layout,
            "overlap": overlap,
            "drafts": 2,
            "dispatch": "throughput",
            "prefix": "hit",
            "policy": "mixed",
            "preempt": False,
            "depth": 2,
            "sampling": "seeded",
        },
    )
