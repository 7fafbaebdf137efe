"""Exact tokens of recurrent models with prefix hits: a start from a snapshot changes no token.

The reference of every sequence is a run alone, without a cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.e0.rig import Recorder, make_engine, run, submit
from tests.e0.test_grid import FILLER, PROMPTS, SAMPLING
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.oracle import Oracle
from tests.support.slow import mostly_slow
from weft.config.sections.all import SpeculationSection
from weft.engine.core import EngineCore
from weft.types.plan import LoadState, SaveState
from weft.types.sampling import TokenParams

BATCH = 6
PARAMS = replace(SAMPLING["seeded"], max_tokens=20)


class Alone:
    """Tokens of a prompt and a seed, computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}

    def tokens(self, request: int, prompt: list[int], choice: int = 0) -> list[int]:
        key = (request, choice, tuple(prompt))
        if key not in self._tokens:
            engine, _ = make_engine(self.folder, caching=False, max_num_seqs=1)
            one = submit(1, prompt, PARAMS, request=request, choice=choice)
            self._tokens[key] = run(engine, [[one]])[1].tokens
            engine.close()
        return self._tokens[key]


#: Delta nets, delta nets by channel beside latents, short convolutions, Mamba2 alone, with attention, beside
#: attention; delta nets with norms at other places; Mamba 1 alone and with attention.
FAMILIES = [
    "qwen3_next",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "kimi_linear",
            "lfm2",
            "mamba2",
            "nemotron_h",
            "falcon_h1",
            "olmo_hybrid",
            "bailing_hybrid",
            "falcon_mamba",
            "jamba",
        )
    ),
]


@pytest.fixture(scope="module", params=FAMILIES)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(make_checkpoint(tmp_path_factory.mktemp("states"), request.param))


def engine_of(
    alone: Alone, depth: int, chunk: int, drafts: int, **more: object
) -> tuple[EngineCore, Recorder]:
    speculation, knows = None, None
    if drafts:
        speculation = SpeculationSection(
            speculative_method="ngram", num_speculative_tokens=drafts, speculative_adaptive=False
        )
        knows = Oracle(lambda op: [], 0.6, VOCAB)
    return make_engine(
        alone.folder,
        depth=depth,
        chunk=chunk,
        max_num_seqs=12,
        speculation=speculation,
        drafter=knows,
        **more,  # type: ignore[arg-type]
    )


def know(runner: Recorder, answers: dict[int, list[int]]) -> None:
    """Make the oracle correct about most drafts of each request."""
    if isinstance(runner.drafter, Oracle):
        runner.drafter._answer = lambda op: answers.get(op.seed - 1000, [])


def count(runner: Recorder) -> tuple[int, int, int]:
    """Return (saved states, saved states other than the last state, loaded states)."""
    ops = [op for plan in runner.plans for op in plan.ops]
    saved = [op for op in ops if isinstance(op, SaveState)]
    return len(saved), sum(op.back > 0 for op in saved), sum(isinstance(op, LoadState) for op in ops)


@pytest.mark.requirement("B20")
@mostly_slow("drafts", [0, 3], [3])
@mostly_slow(("depth", "chunk"), [(1, 0), (2, 7), (1, 16)], [(2, 7)])
def test_turns_of_chats_go_on_from_snapshots(depth: int, chunk: int, drafts: int, alone: Alone) -> None:
    engine, runner = engine_of(alone, depth, chunk, drafts)
    first = {number: PROMPTS[number] for number in range(BATCH)}
    second = {n: [*first[n], *alone.tokens(n, first[n])[:20], 5, n, 9] for n in first}
    try:
        for turn, prompts in ((0, first), (1, first), (2, second)):
            know(runner, {n: [*prompts[n], *alone.tokens(n, prompts[n])] for n in prompts})
            submits = [submit(100 * turn + n, prompts[n], PARAMS, request=n) for n in prompts]
            answers = run(engine, [submits])
            for n, prompt in prompts.items():
                answer = answers[100 * turn + n]
                assert answer.tokens == alone.tokens(n, prompt), f"turn {turn} of {n}"
                if turn:
                    assert answer.num_cached >= (len(first[n]) - 1) // 8 * 8
                if turn == 2 and not (drafts and depth == 2):  # lengths are then unknown at planning
                    assert answer.num_cached >= (len(first[n]) + 10) // 8 * 8
    finally:
        engine.close()
    saved, earlier, loaded = count(runner)
    assert saved > 2 * BATCH
    assert loaded >= 2 * BATCH
    assert (earlier > 0) == (drafts > 0 and depth == 1)
    if drafts:
        assert sum(engine.stats().drafts_accepted) > BATCH


@pytest.mark.parametrize("caching", [False, True])
@mostly_slow("depth", [1, 2], [2])
def test_siblings_share_their_leaders_state(depth: int, caching: bool, alone: Alone) -> None:
    engine, runner = engine_of(alone, depth, 0, 0, caching=caching)
    try:
        groups = [
            [submit(10 * n + c, PROMPTS[n], PARAMS, request=n, choice=c) for c in range(3)] for n in range(3)
        ]
        answers = run(engine, groups)
    finally:
        engine.close()
    for n in range(3):
        for choice in range(3):
            assert answers[10 * n + choice].tokens == alone.tokens(n, PROMPTS[n], choice)
            assert bool(answers[10 * n + choice].num_cached) == bool(choice)
    assert count(runner)[2] == 6


@mostly_slow("drafts", [0, 3], [3])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_preempted_come_back_to_snapshots(depth: int, drafts: int, alone: Alone) -> None:
    engine, runner = engine_of(alone, depth, 0, drafts, blocks=16)
    know(runner, {n: [*PROMPTS[n], *alone.tokens(n, PROMPTS[n])] for n in range(BATCH)})
    filler = submit(999, FILLER, TokenParams(temperature=0.0, max_tokens=60), request=999, priority=-1)
    try:
        answers = run(engine, [[filler], *([submit(n, PROMPTS[n], PARAMS, request=n)] for n in range(BATCH))])
    finally:
        engine.close()
    for n in range(BATCH):
        assert answers[n].tokens == alone.tokens(n, PROMPTS[n])
    # A model without attention needs no blocks, so no sequence has to give way.
    attends = alone.folder.name not in ("mamba2", "falcon_mamba")
    assert (engine.stats().preemptions > 0) == attends
    assert (count(runner)[2] > 0) == attends
