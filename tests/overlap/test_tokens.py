"""In float64, tokens are equal with overlap off, for prompts, for all steps, and on one rank.

The reference of every sequence is a run alone on one rank. Each comparison must have had micro-batches, and
prompts cut between micro-batches.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e0.rig import make_engine, run, submit
from tests.e0.test_grid import FILLER, PROMPTS
from tests.e0.test_speculation import SAMPLING, Reference
from tests.overlap.rig import on_engines
from tests.support.checkpoints import VOCAB
from tests.support.pairwise import covering, name, numbers_of
from tests.support.slow import mostly_slow
from weft.config.sections.all import SpeculationSection
from weft.overlap.split import LEAST
from weft.parallel.group_comm import ONE_SHOT
from weft.runner.graphs.graphs import GraphOptions
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

FEATURES: dict[str, list[Any]] = {
    "model": ["qwen3_moe", "qwen2_windowed", "qwen3_next_wide", "deepseek_v3", "deepseek_v4", "deepseek_mtp"],
    "overlap": ["off", "prefill", "all", "auto"],
    "drafter": ["none", "ngram", "mtp"],
    "depth": [1, 2],
    "policy": ["mixed", "exclusive"],
    "chunk": [0, 7, 40],
    "prefix": ["hit", "miss"],
    "preempt": [False, True],
    "sampling": list(SAMPLING),
}
COVER = covering(FEATURES)
BATCH = 6


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("models"))


def check(reference: Reference, case: dict[str, Any], layout: Layout, dispatch: str = "auto") -> None:
    model, sampling = case["model"], case["sampling"]
    drafter = case["drafter"] if case["drafter"] != "mtp" or model == "deepseek_mtp" else "ngram"
    folder = reference.folder(model)
    params = SAMPLING[sampling]

    def submits() -> list[list[Submit]]:
        first = [submit(100, FILLER, params, request=99)] if case["prefix"] == "hit" else []
        many = [submit(1 + i, PROMPTS[i], params, request=i) for i in range(BATCH)]
        return [first + many[:4], [], many[4:]]

    ran = on_engines(
        layout,
        folder,
        submits,
        case["overlap"],
        mtp=int(drafter == "mtp"),
        dispatch=dispatch,
        depth=case["depth"],
        policy=case["policy"],
        chunk=case["chunk"],
        caching=case["prefix"] == "hit",
        blocks=40 if case["preempt"] else 256,
        speculation=SpeculationSection(
            speculative_method=drafter, num_speculative_tokens=3, speculative_adaptive=False
        ),
    )
    for i in range(BATCH):
        want = reference.answer(model, sampling, i, 0)
        for one in ran:
            got = one.answers[1 + i]
            assert got.tokens == want.tokens, (i, case)
            assert got.ends == want.ends
    head = ran[0]
    assert all(one.tokens == head.tokens for one in ran)
    if case["overlap"] in ("prefill", "all"):
        assert head.overlapped
        assert head.stats.overlapped_steps == head.overlapped
    if case["overlap"] == "all":
        assert any(plan.micro_batches > 1 and not plan.prefill.rows for plan in head.plans)
    if case["overlap"] == "prefill":
        assert all(plan.prefill.rows for plan in head.plans if plan.micro_batches > 1)
    if case["overlap"] == "off":
        assert not head.overlapped
    assert head.stats.communication_seconds > 0


SHORT = covering({**{k: v for k, v in FEATURES.items() if len(v) < 4}, "overlap": ["prefill", "all"]})


@pytest.mark.requirement("C6", "C8", "C10", "C14")
@pytest.mark.parametrize("number", numbers_of(SHORT))
def test_cover_on_two_ranks(reference: Reference, number: int) -> None:
    """Every pair of the small features; models and ways to sample go round."""
    models, samplings = FEATURES["model"], FEATURES["sampling"]
    more = {"model": models[number % len(models)], "sampling": samplings[number % len(samplings)]}
    check(reference, {**SHORT[number], **more}, Layout(tensor=2))


@pytest.mark.grid
@pytest.mark.parametrize("case", COVER, ids=name)
def test_pairwise_cover_on_two_ranks(reference: Reference, case: dict[str, Any]) -> None:
    check(reference, case, Layout(tensor=2))


@pytest.mark.grid
@pytest.mark.parametrize("case", COVER[::3], ids=name)
def test_cover_on_four_ranks(reference: Reference, case: dict[str, Any]) -> None:
    check(reference, case, Layout(tensor=4))


PLAIN = {"drafter": "none", "depth": 1, "policy": "mixed", "chunk": 40, "prefix": "miss", "preempt": False}
FORMS = ["reduce", "gather", "low-latency", "throughput", "auto"]
EXPERTS = [
    ("qwen3_moe", 2, "reduce", "all"),
    ("qwen3_moe", 2, "throughput", "prefill"),
    ("deepseek_v3", 4, "low-latency", "all"),
    ("qwen3_next_wide", 2, "gather", "all"),
    ("deepseek_v4", 2, "auto", "all"),
    ("deepseek_mtp", 2, "throughput", "all"),
]


def check_experts(reference: Reference, model: str, ranks: int, form: str, mode: str) -> None:
    more = {"model": model, "overlap": mode, "sampling": "listed"}
    if model == "deepseek_mtp":
        more["drafter"] = "mtp"
    check(reference, {**PLAIN, **more}, Layout(tensor=ranks, expert=True), form)


@pytest.mark.requirement("C14")
@mostly_slow(("model", "ranks", "form", "mode"), EXPERTS, 1)
def test_experts_divided_over_ranks(
    reference: Reference, model: str, ranks: int, form: str, mode: str
) -> None:
    check_experts(reference, model, ranks, form, mode)


@pytest.mark.grid
@pytest.mark.parametrize("mode", ["off", "prefill", "all"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "model", ["qwen3_moe", "qwen3_next_wide", "deepseek_v3", "deepseek_v4", "deepseek_mtp"]
)
def test_experts_divided_over_ranks_grid(
    reference: Reference, model: str, ranks: int, form: str, mode: str
) -> None:
    check_experts(reference, model, ranks, form, mode)


@pytest.mark.requirement("C14")
@mostly_slow("model", FEATURES["model"], ["qwen3_moe", "qwen3_next_wide", "deepseek_v4"])
def test_a_prompt_cut_between_micro_batches(reference: Reference, model: str) -> None:
    """The second micro-batch of one prompt reads the writes of the first micro-batch in each layer.

    The writes are attention entries, recurrent states and sources of groups. Hidden states of both
    micro-batches reach the drafter.
    """
    folder, params = reference.folder(model), SAMPLING["listed"]
    longest = max(range(BATCH), key=lambda i: len(PROMPTS[i]))
    assert len(PROMPTS[longest]) >= 2 * LEAST
    mtp = model == "deepseek_mtp"
    ran = on_engines(
        Layout(tensor=2),
        folder,
        lambda: [[submit(1, PROMPTS[longest], params, request=longest)]],
        "prefill",
        mtp=int(mtp),
        caching=False,
        speculation=SpeculationSection(
            speculative_method="mtp" if mtp else "none", speculative_adaptive=False
        ),
    )
    want = reference.answer(model, "listed", longest, 0)
    for one in ran:
        assert one.cut == one.overlapped == 1
        got = one.answers[1]
        assert got.tokens == want.tokens
        assert len(got.prompt_logprobs) == len(want.prompt_logprobs) == len(PROMPTS[longest]) - 1
        for mine, theirs in zip(got.prompt_logprobs, want.prompt_logprobs, strict=True):
            assert mine[0] == theirs[0]
            assert mine[1] == pytest.approx(theirs[1], abs=1e-9)


@pytest.mark.requirement("C10")
@pytest.mark.parametrize("each", [1, 3])
def test_a_pair_of_micro_batches_is_one_replayed_step(reference: Reference, each: int) -> None:
    """The content of a CUDA graph, computed again at each replay: rows fill a bucket, and split."""
    params, drafts = SAMPLING["greedy"], each - 1
    ran = on_engines(
        Layout(tensor=2),
        reference.folder("llama"),
        lambda: [[submit(1 + i, PROMPTS[i], params, request=i) for i in range(BATCH)]],
        "all",
        each=lambda mesh, engine, runner: runner.graphs,
        speculation=SpeculationSection(
            speculative_method="ngram" if drafts else "none",
            num_speculative_tokens=max(drafts, 1),
            speculative_adaptive=False,
        ),
        graphs=GraphOptions(max_rows=24, capture=lambda run: run, most_each=each, micro_batches=True),
    )
    for one in ran:
        for i in range(BATCH):
            assert one.answers[1 + i].tokens == reference.answer("llama", "greedy", i, 0).tokens
        decodes = [plan for plan in one.plans if plan.micro_batches > 1 and not plan.prefill.rows]
        assert decodes
        assert one.extra.replayed >= len(decodes)


@pytest.mark.parametrize("form", ["reduce", "auto"])
def test_micro_batches_on_both_sides_of_a_threshold(reference: Reference, form: str) -> None:
    """Large sums of experts' answers are divided, small ones not; micro-batches of 85 and 86 rows do the
    same.
    """
    folder, params = reference.folder("qwen3_moe"), TokenParams(temperature=0.0, max_tokens=3)
    lengths = (50, 71, 50)
    assert sum(lengths) // 2 * 48 * 8 * 2 <= ONE_SHOT < (sum(lengths) // 2 + 1) * 48 * 8 * 2

    def submits() -> list[list[Submit]]:
        ids = [[(11 * i + 5 * n) % VOCAB for i in range(length)] for n, length in enumerate(lengths)]
        return [[submit(1 + n, ids[n], params, request=n) for n in range(len(lengths))]]

    ran = on_engines(Layout(tensor=2, expert=True), folder, submits, "prefill", dispatch=form, caching=False)
    want = {n: answer.tokens for n, answer in run(make_engine(folder, caching=False)[0], submits()).items()}
    for one in ran:
        assert one.cut == 1
        assert one.tokens == want
