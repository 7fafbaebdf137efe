"""Exact tokens with grammars: the sequence's automaton alone decides which tokens may be sampled.

The reference of every token is a separate run of one step, with the allowed ids of the automaton.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.e0.rig import make_engine, replaying, run, submit
from tests.e0.test_grid import FILLER, PROMPTS
from tests.support.automata import Automata, Automaton, named, random_automaton
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.expert_groups import on_layout
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.oracle import Oracle
from tests.support.pairwise import covering, each_value, name
from tests.support.slow import mostly_slow
from weft.config.sections.all import SpeculationSection
from weft.runner.graphs import graphs
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.plan import AllocSlot
from weft.types.sampling import TokenParams

OUTPUT = 20
END = 5
SAMPLING = {
    "greedy": TokenParams(temperature=0.0, max_tokens=OUTPUT, stop_ids=(END,)),
    "seeded": TokenParams(
        temperature=0.9,
        top_k=14,
        top_p=0.97,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        max_tokens=OUTPUT,
        stop_ids=(END,),
    ),
    "listed": TokenParams(
        temperature=0.7,
        logit_bias=((3, 4.0), (9, 3.0)),
        bad=((17, 18),),
        min_p=0.01,
        logprobs=2,
        max_tokens=OUTPUT,
        stop_ids=(END, 20),
    ),
    "goes on": TokenParams(temperature=0.8, max_tokens=OUTPUT),  # as with ignore_eos
}
FEATURES: dict[str, list[Any]] = {
    "model": ["qwen3_moe", "qwen3_next"],
    "drafter": ["none", "oracle", "ngram"],
    "drafts": [1, 4],
    "depth": [1, 2],
    "policy": ["mixed", "exclusive"],
    "chunk": [0, 7],
    "prefix": ["hit", "miss"],
    "preempt": [False, True],
    "n": [1, 2],
    "sampling": list(SAMPLING),
    "free": [False, True],
    "late": [0, 3],
    "replayed": [False, True],
}
COVER = covering(FEATURES, cheap={"n": 1})
BATCH = 5
_rng = random.Random(11)
AUTOMATA = [random_automaton(_rng, VOCAB, (END,)) for _ in range(BATCH)]


class Reference:
    """Outputs of (model, sampling, prompt, choice), computed token by token."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self._answers: dict[tuple[Any, ...], tuple[list[int], str]] = {}

    def folder(self, model: str) -> Path:
        if model not in self._folders:
            mtp = model == "deepseek_mtp"
            root = self._root / model
            self._folders[model] = (
                make_mtp_checkpoint(root, skilled=True) if mtp else make_checkpoint(self._root, model)
            )
        return self._folders[model]

    def answer(self, model: str, sampling: str, prompt: int, choice: int) -> tuple[list[int], str]:
        key = (model, sampling, prompt, choice)
        if key not in self._answers:
            params = SAMPLING[sampling]
            self._answers[key] = one_by_one(
                self.folder(model), AUTOMATA[prompt], PROMPTS[prompt], params, prompt, choice
            )
        return self._answers[key]


def one_by_one(
    folder: Path, automaton: Automaton, prompt: list[int], params: TokenParams, request: int, choice: int
) -> tuple[list[int], str]:
    """Return (output, finish), with each token from a separate run."""
    engine, _ = make_engine(folder, caching=True, max_num_seqs=1)
    tokens: list[int] = []
    hidden = set(automaton.ends) - set(params.stop_ids)
    try:
        while True:
            allowed = automaton.allowed(tokens)
            assert allowed is not None
            allowed -= hidden
            if not allowed:
                return tokens, "stop"
            once = replace(params, allowed=tuple(sorted(allowed)), max_tokens=len(tokens) + 1, logprobs=-1)
            emitted = {"emitted_ids": submit(1, tokens, once, request=0).prompt_ids} if tokens else {}
            one = submit(1, prompt, once, request=request, choice=choice, **emitted)
            (token,) = run(engine, [[one]])[1].tokens
            tokens.append(token)
            if token in params.stop_ids:
                return tokens, "stop"
            if len(tokens) == params.max_tokens:
                return tokens, "length"
    finally:
        engine.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("grammars"))


@pytest.fixture(autouse=True)
def _capture_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "WORTH_CAPTURING", 1)


def plan_submits(case: dict[str, Any]) -> tuple[list[list[Submit]], dict[int, tuple[int, int]]]:
    """Return (sequences to submit before each step, sequence -> (prompt, choice))."""
    params, arrivals, who = SAMPLING[case["sampling"]], [], {}
    for prompt in range(BATCH):
        group = []
        for choice in range(case["n"]):
            sequence = 100 * prompt + choice + 1
            who[sequence] = (prompt, choice)
            one = submit(
                sequence, PROMPTS[prompt], params, request=prompt, choice=choice, grammar=named(prompt)
            )
            group.append(one)
        arrivals.append(group)
    if case["free"]:
        free = TokenParams(temperature=0.5, max_tokens=OUTPUT)
        arrivals[1].append(submit(8888, PROMPTS[7], free, request=8888))
    if case["preempt"]:
        filler = TokenParams(temperature=0.0, max_tokens=60)
        arrivals[0].append(submit(9999, FILLER, filler, request=9999, priority=-1))
    return arrivals, who


def check(case: dict[str, Any], reference: Reference) -> None:
    model, method = case["model"], case["drafter"]
    speculation, drafter = SpeculationSection(), None
    if method != "none":
        named_method = "ngram" if method == "oracle" else method
        speculation = SpeculationSection(
            speculative_method=named_method,
            num_speculative_tokens=1 if named_method == "mtp" else case["drafts"],
            speculative_adaptive=False,
        )
    if method == "oracle":

        def answer(op: AllocSlot) -> list[int]:
            prompt = op.seed - 1000
            if prompt >= BATCH:
                return []
            return PROMPTS[prompt] + reference.answer(model, case["sampling"], prompt, op.choice)[0]

        drafter = Oracle(answer, 0.6, VOCAB)
    automata = Automata(AUTOMATA, (END,), turns=case["late"])
    engine, runner = make_engine(
        reference.folder(model),
        blocks=12 if case["preempt"] else 512,
        chunk=case["chunk"],
        depth=case["depth"],
        policy=case["policy"],
        caching=case["prefix"] == "hit",
        max_num_seqs=32,
        speculation=speculation,
        drafter=drafter,
        graphs=replaying(speculation.drafts) if case["replayed"] else None,
        grammars=automata.source(),
    )
    try:
        if case["prefix"] == "hit":
            once = TokenParams(max_tokens=1)
            known = [*PROMPTS[:BATCH], FILLER]
            run(engine, [[submit(5000 + i, ids, once, request=5000 + i) for i, ids in enumerate(known)]])
        arrivals, who = plan_submits(case)
        answers = run(engine, arrivals)
        stats = engine.stats()
    finally:
        engine.close()
    for sequence, (prompt, choice) in who.items():
        tokens, finish = reference.answer(model, case["sampling"], prompt, choice)
        got = answers[sequence]
        assert AUTOMATA[prompt].allowed(got.tokens) is not None, f"prompt {prompt}: {got.tokens}"
        assert (got.tokens, got.ends) == (tokens, [finish]), f"prompt {prompt}, choice {choice}"
    # The features were active.
    assert stats.constrained_steps == sum(plan.constrained for plan in runner.plans) > 0
    assert stats.grammars_compiled == len(who)
    assert stats.grammar_errors == stats.row_errors == 0
    assert (stats.preemptions > 0) == case["preempt"]
    assert runner.deepest == case["depth"]
    if case["free"]:
        assert len(answers[8888].tokens) == OUTPUT
    if method != "none":
        assert automata.rolled > 0, "no matcher was walked along drafts"
        assert any(answer.rejected for answer in answers.values())
        assert method == "mtp" or sum(answers[sequence].accepted for sequence in who) > 0


@pytest.mark.requirement("G8")
@pytest.mark.parametrize("case", each_value(COVER), ids=name)
def test_pairwise_cover(case: dict[str, Any], reference: Reference) -> None:
    check(case, reference)


MTP = [
    {"depth": 1, "chunk": 0, "preempt": False, "sampling": "greedy", "replayed": True},
    {"depth": 2, "chunk": 7, "preempt": True, "sampling": "seeded", "replayed": False},
    {"depth": 2, "chunk": 0, "preempt": False, "sampling": "listed", "replayed": True},
]


@pytest.mark.requirement("G8")
@mostly_slow("case", MTP, MTP[1:2], ids=name)
def test_with_the_models_own_drafts(case: dict[str, Any], reference: Reference) -> None:
    fixed = {"model": "deepseek_mtp", "drafter": "mtp", "drafts": 1, "policy": "mixed", "prefix": "hit"}
    check({**fixed, "n": 1, "free": True, "late": 1, **case}, reference)


LAYOUTS: dict[str, dict[str, Any]] = {
    "two ranks, deep": {"layout": Layout(tensor=2), "depth": 2, "sampling": "seeded"},
    "two ranks, n-grams, preemption": {
        "layout": Layout(tensor=2),
        "drafts": 3,
        "blocks": 14,
        "sampling": "greedy",
    },
    "experts over ranks, micro-batches": {
        "layout": Layout(tensor=2, expert=True),
        "overlap": "all",
        "depth": 2,
        "sampling": "listed",
    },
    "replicas that share experts, deep": {
        "layout": Layout(data=2, expert=True),
        "depth": 2,
        "overlap": "all",
        "sampling": "seeded",
    },
    "replicas and the module's drafts": {
        "layout": Layout(data=2, expert=True),
        "model": "deepseek_mtp",
        "depth": 2,
        "drafts": 1,
        "sampling": "greedy",
    },
}


@pytest.mark.requirement("G8")
@mostly_slow("which", LAYOUTS, [*LAYOUTS][:1])
def test_over_layouts(which: str, reference: Reference) -> None:
    case = LAYOUTS[which]
    model, sampling, layout = case.get("model", "qwen3_moe"), case["sampling"], case["layout"]
    mtp = model == "deepseek_mtp"
    made: list[Automata] = []

    def automata() -> Automata:
        made.append(Automata(AUTOMATA, (END,)))
        return made[-1]

    turns: list[list[list[Submit]]] = [[[] for _ in range(6)] for _ in range(layout.data)]
    params = SAMPLING[sampling]
    for prompt in range(BATCH):
        one = submit(1 + prompt, PROMPTS[prompt], params, request=prompt, grammar=named(prompt))
        turns[prompt % layout.data][prompt // 2].append(one)
    # A sequence without a grammar runs beside them, at another replica if there are two.
    free = TokenParams(temperature=0.0, max_tokens=40)
    turns[-1][1].append(submit(99, FILLER, free, request=99, priority=-1))
    replicas = on_layout(
        layout,
        reference.folder(model),
        turns,
        overlap=case.get("overlap", "off"),
        mtp=int(mtp),
        automata=automata,
        blocks=case.get("blocks", 256),
        depth=case.get("depth", 1),
        chunk=7,
        speculation=SpeculationSection(
            speculative_method="none" if not case.get("drafts") else "mtp" if mtp else "ngram",
            num_speculative_tokens=case.get("drafts", 1),
            speculative_adaptive=False,
        ),
    )
    answers = {number: answer for replica in replicas for number, answer in replica.answers.items()}
    for prompt in range(BATCH):
        tokens, finish = reference.answer(model, sampling, prompt, 0)
        got = answers[1 + prompt]
        assert AUTOMATA[prompt].allowed(got.tokens) is not None
        assert (got.tokens, got.ends) == (tokens, [finish]), f"prompt {prompt}"
    assert len(answers[99].tokens) == 40
    # The features were active.
    assert all(replica.stats.constrained_steps > 0 for replica in replicas)
    assert all(replica.deepest == case.get("depth", 1) for replica in replicas)
    assert any(replica.overlapped for replica in replicas) == (case.get("overlap") == "all")
    assert sum(replica.stats.preemptions for replica in replicas) > 0 or "blocks" not in case
    assert any(automata.rolled for automata in made) == ("drafts" in case)
