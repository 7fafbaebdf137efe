"""Routed experts: returned as transformers chooses them, and forced in place of the router's choice.

Every run is in float64. Routes must not depend on chunks, prefix hits, preemption, steps in flight, drafts or
the layout of ranks. Forced with its own routes, a sequence has the same logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e0 import rig
from tests.models.conftest import make_checkpoint as make_published
from tests.support.checkpoints import make_checkpoint
from tests.support.expert_groups import on_layout
from tests.support.slow import mostly_slow
from weft.common.errors import InvalidRequest
from weft.config.sections.all import SpeculationSection
from weft.scheduler import planner
from weft.types.layout import Layout
from weft.types.messages import Submit, TokenEvent
from weft.types.routes import Routes, joined
from weft.types.sampling import ALL_LOGPROBS, TokenParams

PROMPT = np.random.default_rng(3).integers(0, 67, 37).tolist()
SHARED = PROMPT[:24]
SAMPLED = TokenParams(temperature=1.0, max_tokens=10, logprobs=3, prompt_logprobs=0)
LONG = TokenParams(temperature=1.0, max_tokens=24, logprobs=3, prompt_logprobs=0)


class Answer(rig.Answer):
    """Also holds the routes."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Routes] = []

    def take(self, event: TokenEvent) -> None:
        super().take(event)
        if event.routes is not None:
            assert not self.pieces or self.pieces[-1].end == event.routes.start, "a gap in the routes"
            self.pieces.append(event.routes)

    @property
    def routes(self) -> np.ndarray:
        """Return uint16 [positions, layers, k]."""
        whole = joined(self.pieces)
        assert whole is not None
        return whole.array()


@pytest.fixture(autouse=True)
def _with_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "Answer", Answer)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("routes"), "qwen3_moe")


def asked(number: int, prompt: list[int], params: TokenParams = SAMPLED, **more: Any) -> Submit:
    return rig.submit(number, prompt, params, request=number, routes=0, **more)


def alone(folder: Path, submit: Submit, **options: Any) -> Any:
    engine, _ = rig.make_engine(folder, **options)
    return rig.run(engine, [[submit]])[submit.sequence]


def chosen_by_transformers(folder: Path, ids: list[int]) -> np.ndarray:
    """Return the experts of each token in each layer, [tokens, layers, k], in the order of their weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([layer.view(len(ids), -1).topk(2).indices for layer in logits], dim=1).numpy()


def test_routes_are_those_of_transformers_and_replay_to_equal_logprobs(checkpoint: Path) -> None:
    """Many sequences at once, with chunks, a prefix hit, preemption and two steps in flight."""
    engine, runner = rig.make_engine(checkpoint, blocks=19, chunk=11, depth=2, max_num_seqs=4)
    many = [asked(number, [*SHARED, *PROMPT[number : number + 12]], LONG) for number in range(1, 6)]
    answers = rig.run(engine, [[rig.submit(99, SHARED, SAMPLED, request=99)], [], [], [], [], many])
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert any(plan.prefill.rows and plan.decode.rows for plan in runner.plans)
    computed = sum(len(one.prompt_ids) // 4 + len(answers[one.sequence].tokens) - 1 for one in many)
    assert stats.routed_tokens >= computed
    for one in many:
        answer = answers[one.sequence]
        ids = np.frombuffer(one.prompt_ids, "<i4").tolist() + answer.tokens[:-1]
        wanted = chosen_by_transformers(checkpoint, ids)
        assert answer.routes.tolist() == wanted.tolist()
    # its own routes, alone and in other chunks
    first, answer = many[0], answers[1]
    ids = np.frombuffer(first.prompt_ids, "<i4").tolist()
    again = asked(1, ids, LONG, forced=Routes.of(answer.routes))
    replayed = alone(checkpoint, again, chunk=7)
    assert (replayed.tokens, replayed.logprobs) == (answer.tokens, answer.logprobs)
    assert replayed.prompt_logprobs == answer.prompt_logprobs
    # other experts are used as given, and change the logprobs
    other = (answer.routes + 1) % 6
    moved = alone(checkpoint, asked(1, PROMPT, forced=Routes.of(other[:30])), chunk=7)
    assert moved.routes[:30].tolist() == other[:30].tolist()
    assert moved.prompt_logprobs != alone(checkpoint, asked(1, PROMPT)).prompt_logprobs


@mostly_slow("layout", ["tp2", "ep2", "dp2ep2"], ["ep2"])
@mostly_slow("overlap", ["off", "all"], ["off"])
def test_routes_over_ranks(checkpoint: Path, layout: str, overlap: str) -> None:
    shape = {
        "tp2": Layout(tensor=2),
        "ep2": Layout(tensor=2, expert=True),
        "dp2ep2": Layout(data=2, expert=True),
    }[layout]
    one = alone(checkpoint, asked(1, PROMPT))
    forced = (one.routes + 1) % 6
    two = alone(checkpoint, asked(2, PROMPT, forced=Routes.of(forced)))
    many = [
        asked(1, PROMPT),
        asked(2, PROMPT, forced=Routes.of(forced)),
        rig.submit(3, PROMPT, SAMPLED, request=3),
    ]
    arrivals = [[many], *[[[]] for _ in range(shape.data - 1)]]
    replicas = on_layout(shape, checkpoint, arrivals, overlap=overlap, chunk=16)
    if overlap == "all":
        assert replicas[0].overlapped
    for number, wanted in ((1, one), (2, two)):
        made: Any = replicas[0].answers[number]
        assert made.tokens == wanted.tokens
        assert made.routes.tolist() == wanted.routes.tolist()


FAMILIES: dict[str, Callable[[Path], Path]] = {
    **{
        shape: lambda folder, shape=shape: make_checkpoint(folder, shape)
        for shape in ("deepseek_v3", "deepseek_v4", "nemotron_h", "qwen3_next")
    },
    **{
        shape: lambda folder, shape=shape: Path(make_published(shape, folder).folder)
        for shape in ("gemma4-moe", "llama4", "glm4-moe")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reports_and_uses_routes(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path)
    one = alone(folder, asked(1, PROMPT), chunk=16)
    plain = alone(folder, rig.submit(1, PROMPT, SAMPLED, request=1), chunk=16)
    assert (one.tokens, one.logprobs) == (plain.tokens, plain.logprobs)
    shape = rig.spec_of(folder).routes
    assert shape is not None
    assert one.routes.shape == (len(PROMPT) + 9, shape.layers, shape.top_k)
    again = alone(folder, asked(1, PROMPT, forced=Routes.of(one.routes)))
    assert (again.tokens, again.logprobs) == (one.tokens, one.logprobs)
    other = (one.routes + 1) % shape.experts
    moved = alone(folder, asked(1, PROMPT, forced=Routes.of(other)))
    assert moved.routes[: len(PROMPT)].tolist() == other[: len(PROMPT)].tolist()


@pytest.mark.slow
def test_drafts_change_no_route(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe")
    params = TokenParams(temperature=0.0, max_tokens=60)
    prompt = PROMPT[:8] * 4
    plain = alone(folder, asked(1, prompt, params))
    ngram = SpeculationSection(speculative_method="ngram", num_speculative_tokens=3, ngram_min_length=1)
    drafted = alone(folder, asked(1, prompt, params), speculation=ngram)
    assert drafted.accepted > 0
    assert drafted.routes.tolist() == plain.routes.tolist()


def test_a_later_start_uses_the_prefix_cache(checkpoint: Path) -> None:
    engine, _ = rig.make_engine(checkpoint)
    params = TokenParams(temperature=1.0, max_tokens=4)
    first = asked(1, PROMPT, params)
    later = rig.submit(1, PROMPT, params, request=1, routes=30)
    whole = rig.run(engine, [[first]])[1]
    part: Any = rig.run(engine, [[later]])[1]
    assert 0 < part.num_cached <= 30
    assert part.routes.tolist() == whole.routes[30:].tolist()  # type: ignore[attr-defined]


def test_routes_go_on_behind_output_of_another_engine(checkpoint: Path) -> None:
    """A Submit that continues names a position in the output."""
    whole = alone(checkpoint, asked(1, PROMPT))
    emitted = np.array(whole.tokens[:4], "<i4").tobytes()
    first = len(PROMPT) + 3
    rest = rig.submit(1, PROMPT, SAMPLED, request=1, routes=first, emitted_ids=emitted)
    part = alone(checkpoint, rest)
    assert part.tokens == whole.tokens[4:]
    assert part.routes.tolist() == whole.routes[first:].tolist()


def test_routes_of_each_chunk_are_sent_at_once(checkpoint: Path) -> None:
    """The routes of a whole prompt may be larger than a message."""
    answer = alone(checkpoint, asked(1, PROMPT), chunk=8)
    assert max(piece.positions for piece in answer.pieces) <= 8


@pytest.mark.parametrize("form", ["forced", "vocabulary"])
def test_the_side_memory_of_running_sequences_is_bounded(
    form: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced routes, or logprobs of the whole vocabulary, of few sequences at once. The other sequences
    wait."""
    params = SAMPLED if form == "forced" else TokenParams(max_tokens=4, logprobs=ALL_LOGPROBS)
    one = alone(checkpoint, asked(1, PROMPT, params))
    forced = Routes.of(one.routes) if form == "forced" else None
    monkeypatch.setattr(planner, "SIDE_BYTES", 2 * len(forced.ids) if forced else 2 * 4 * 68)
    engine, runner = rig.make_engine(checkpoint)
    many = [asked(number, PROMPT, params, forced=forced) for number in range(1, 6)]
    answers = rig.run(engine, [many])
    assert max(plan.prefill.rows + plan.decode.rows for plan in runner.plans) == 2
    if forced is not None:
        assert all(answers[one.sequence].routes.tolist() == forced.array().tolist() for one in many)
    # sequences without side memory do not count
    engine, runner = rig.make_engine(checkpoint)
    rig.run(
        engine, [[*many[:2], *(rig.submit(number, PROMPT, SAMPLED, request=number) for number in (7, 8))]]
    )
    assert max(plan.prefill.rows + plan.decode.rows for plan in runner.plans) == 4


def test_wrong_routes_are_refused(checkpoint: Path) -> None:
    engine, _ = rig.make_engine(checkpoint)
    right = np.tile(np.arange(2), (4, 2, 1))
    for wrong, message in (
        (right[:, :1], "this model needs \\[tokens, 2, 2\\]"),
        (right + 5, "experts 0 to 5"),
        (np.zeros_like(right), "same expert twice"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.submit(asked(1, PROMPT, forced=Routes.of(wrong)))
    with pytest.raises(InvalidRequest, match="routed_experts_prompt_start"):
        engine.submit(rig.submit(1, PROMPT, SAMPLED, request=1, routes=len(PROMPT)))
    with pytest.raises(InvalidRequest, match="integers of the shape"):
        Routes.of(np.zeros((2, 2)))


def test_logprobs_of_the_whole_vocabulary(checkpoint: Path) -> None:
    """Equal to log_softmax in transformers, and scored as decoded, beside a row with few alternatives."""
    from transformers import AutoModelForCausalLM

    params = TokenParams(temperature=1.0, max_tokens=6, logprobs=ALL_LOGPROBS, prompt_logprobs=ALL_LOGPROBS)
    engine, _ = rig.make_engine(checkpoint, chunk=8)
    many = [
        rig.submit(1, PROMPT, params, request=1),
        rig.submit(2, PROMPT, SAMPLED, request=2),
    ]
    answers = rig.run(engine, [many])
    one = answers[1]
    assert [ids for ids, _, _ in one.logprobs] == [[token] for token in one.tokens]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
        )
        wanted = model(torch.tensor([PROMPT + one.tokens])).logits[0].log_softmax(-1).float().numpy()
    made = np.array([values[1:] for _, values, _ in one.prompt_logprobs + one.logprobs], np.float32)
    np.testing.assert_allclose(made, wanted[:-1], rtol=0, atol=2e-5)  # transformers rounds inside
    scored = TokenParams(max_tokens=1, prompt_logprobs=ALL_LOGPROBS)
    again = alone(checkpoint, rig.submit(3, PROMPT + one.tokens, scored, request=3))
    assert again.prompt_logprobs[-6:] == one.logprobs
    few = answers[2]
    assert few.logprobs == alone(checkpoint, rig.submit(2, PROMPT, SAMPLED, request=2)).logprobs
    assert len(few.logprobs[0][0]) == 4
