"""Drafts of the lookahead module equal those of transformers' ``MtpModel``, for any form of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

from tests.e0.rig import Recorder, make_engine, replaying, run, submit
from tests.support.checkpoints import VOCAB
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.sections.all import SpeculationSection
from weft.engine.core import EngineCore
from weft.runner import drafting
from weft.runner.graphs import graphs
from weft.scheduler.policy.draft_policy import DraftPolicy
from weft.speculation import mtp, pending_hidden
from weft.speculation.mtp import MtpDrafter
from weft.types.plan import StepPlan, StepResult
from weft.types.sampling import TokenParams

PROMPTS = [[(7 * i + 3 * p + i * i) % VOCAB for i in range(11 + 5 * p)] for p in range(4)]


class Reference:
    """The main model and the module of transformers, and their drafts."""

    def __init__(self, folder: Path) -> None:
        logging.set_verbosity_error()  # that the main model does not take the module's layer is known
        settings: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
        self.main: Any = AutoModelForCausalLM.from_pretrained(folder, **settings).eval()
        layer = self.main.config.num_hidden_layers
        self.main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*"]
        self.module: Any = MtpModel.from_pretrained(self.main).eval()

    @torch.no_grad()
    def drafts(self, known: list[int], count: int) -> list[int]:
        """Return chained drafts after ``known``. The main model has not seen the last token."""
        x = self.main(input_ids=torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1]
        cache, made = MtpCache(config=self.main.config.get_mtp_config()), list[int]()
        ids, at = known[1:], 1
        for _ in range(count):
            positions = torch.arange(at, at + len(ids))[None]
            x = self.module.forward_layer(0, x, positions, cache, input_ids=torch.tensor([ids]))[:, -1:]
            at += len(ids)
            ids = [int(self.main.lm_head(x)[0, 0].argmax())]
            made += ids
        return made


class Watch:
    """Records the proposed drafts and the tokens before each draft."""

    def __init__(self, runner: Recorder, engine: EngineCore) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        self._state = engine.scheduler._state
        commit = engine.scheduler.commit

        def listening(plan: StepPlan, result: StepResult, now: float) -> Any:
            running = {int(s): self._state.in_slot[s] for p in (plan.prefill, plan.decode) for s in p.slot}
            events = commit(plan, result, now)
            drafts = result.drafts.tolist()
            for segment in (plan.prefill, plan.decode):
                for slot, next_k in zip(segment.slot.tolist(), segment.next_k.tolist(), strict=True):
                    if next_k and running[slot] is not None:
                        self.seen.append((list(running[slot].tokens), drafts[:next_k]))
                    drafts = drafts[next_k:]
            assert not drafts
            return events

        engine.scheduler.commit = listening  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mtp")
    return {
        "random": make_mtp_checkpoint(root / "random", skilled=False, num_hidden_layers=2),
        "skilled": make_mtp_checkpoint(root / "skilled", skilled=True),
    }


def fixed(drafts: int) -> SpeculationSection:
    """Always as many, or as a test says."""
    return SpeculationSection(
        speculative_method="mtp", num_speculative_tokens=drafts, speculative_adaptive=False
    )


def idle_drafter(folder: Path) -> tuple[EngineCore, Recorder, MtpDrafter]:
    """Return an engine whose policy requests no drafts until the test changes the policy."""
    engine, runner = make_engine(folder, speculation=fixed(2))
    policy, drafter = engine.scheduler.planner.drafts, runner.drafter
    assert policy is not None
    assert isinstance(drafter, MtpDrafter)
    policy.most = 0
    return engine, runner, drafter


def now_and_then() -> Any:
    """``DraftPolicy.choose``: any number of drafts for anybody, and in half of the steps none."""
    rng = np.random.default_rng(3)

    def choose(self: DraftPolicy, slots: np.ndarray, starts: np.ndarray, room: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = np.minimum(room, rng.integers(0, self.most + 1, len(slots)))
        return (chosen * (rng.random() < 0.5)).astype(np.int32)

    return choose


@mostly_slow("name", ["random", "skilled"], ["skilled"])
@mostly_slow(
    ("chunk", "whim", "depth", "replayed"),
    [(0, False, 1, False), (5, False, 2, True), (0, True, 1, False), (0, True, 1, True)],
    [(5, False, 2, True), (0, True, 1, True)],
)
def test_drafts_are_transformers(
    name: str,
    chunk: int,
    whim: bool,
    depth: int,
    replayed: bool,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and sampled sequences side by side, from chunks, and with steps without drafts in between; op by
    op, or through the fixed tensors of captures."""
    if whim:
        monkeypatch.setattr(DraftPolicy, "choose", now_and_then())
    reference = Reference(folders[name])
    speculation = fixed(3)
    monkeypatch.setattr(graphs, "WORTH_CAPTURING", 1)
    monkeypatch.setattr(drafting, "WORTH_CAPTURING", 1)
    engine, runner = make_engine(
        folders[name],
        chunk=chunk,
        depth=depth,
        speculation=speculation,
        graphs=replaying(3) if replayed else None,
    )
    watch = Watch(runner, engine)
    try:
        submits = [
            [submit(i + 1, ids, TokenParams(temperature=0.8 * (i % 2), max_tokens=40), request=i)]
            for i, ids in enumerate(PROMPTS)
        ]
        run(engine, submits)
    finally:
        engine.close()
    stats = engine.stats()
    assert sum(stats.drafts) > sum(stats.drafts_accepted)
    assert sum(stats.drafts_accepted) > 0 or name == "random"
    seen = watch.seen[:: max(1, len(watch.seen) // 40)]
    assert len(seen) >= 20
    for known, drafts in seen:
        assert drafts == reference.drafts(known, len(drafts)), f"behind {len(known)} tokens"
    drafter = runner.drafter
    assert isinstance(drafter, MtpDrafter)
    if replayed:
        assert runner.graphs is not None
        assert any(key.each == 1 for key in runner.graphs._replays), "states are kept by captures"
        assert drafter.captured is not None
        kinds = {bool(each) for _, each, *_ in drafter.captured._replays}
        assert kinds == {False, True}, "after prefill, and after other steps"
    if whim:
        assert any(
            (plan.decode.count == 1).any() and not plan.decode.next_k.any() for plan in runner.plans
        ), "nobody went without"


@pytest.mark.parametrize("beside", [False, True])
def test_drafts_after_a_prefix_hit(beside: bool, folders: dict[str, Path]) -> None:
    """Shared blocks have the module's entries, even after steps without drafts.

    ``beside``: the first sequence still runs.
    """
    reference = Reference(folders["skilled"])
    speculation = fixed(2)
    engine, runner = make_engine(folders["skilled"], speculation=speculation)
    watch = Watch(runner, engine)
    policy = engine.scheduler.planner.drafts
    assert policy is not None
    asked = submit(1, PROMPTS[0], TokenParams(temperature=0.0, max_tokens=70), request=1)

    def wake(number: int) -> list[Any]:
        policy.most = 2 * (number >= 50)
        return []

    try:
        policy.most = 0  # the first one drafts nothing
        if beside:
            other, _ = make_engine(folders["skilled"])
            longer = PROMPTS[0] + run(other, [[asked]])[1].tokens[:40]
            other.close()
        else:
            longer = PROMPTS[0] + run(engine, [[asked]])[1].tokens
        assert not watch.seen
        again = submit(2, longer, TokenParams(temperature=0.0, max_tokens=12), request=2)
        if beside:
            answer = run(engine, [[asked], *[[] for _ in range(49)], [again]], wake)
        else:
            policy.most = 2
            answer = run(engine, [[again]])
    finally:
        engine.close()
    assert answer[2].num_cached >= 40
    assert len(watch.seen) > 3
    for known, drafts in watch.seen:
        assert drafts == reference.drafts(known, len(drafts))


def test_parallel_samples_draft_behind_a_prompt_whose_states_waited(folders: dict[str, Path]) -> None:
    """Without prefix caching, parallel samples share the blocks of the first sample, which may have ended."""
    reference = Reference(folders["skilled"])
    speculation = fixed(2)
    engine, runner = make_engine(folders["skilled"], speculation=speculation, caching=False)
    watch = Watch(runner, engine)
    policy = engine.scheduler.planner.drafts
    assert policy is not None
    policy.most = 0

    def wake(number: int) -> list[Any]:
        policy.most = 2 * (number >= 3)
        return []

    parallel_samples = [
        submit(1 + i, PROMPTS[3], TokenParams(temperature=0.9, max_tokens=most), request=1, choice=i)
        for i, most in enumerate((2, 30))
    ]
    try:
        answers = run(engine, [parallel_samples], wake)
    finally:
        engine.close()
    assert answers[2].num_cached >= 24
    assert len(watch.seen) > 3
    for known, drafts in watch.seen:
        assert drafts == reference.drafts(known, len(drafts))


def test_all_states_that_wait_are_no_more_than_a_pass(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "PASS_TOKENS", 60)
    engine, _, drafter = idle_drafter(folders["skilled"])
    most = passes = 0

    def watch(number: int) -> list[Any]:
        nonlocal most, passes
        most, passes = max(most, drafter.waiting.total), drafter._chain.passes
        assert drafter.waiting.total == drafter.waiting.counts.sum()
        return []

    try:
        submits = [submit(i, PROMPTS[i][:4], TokenParams(max_tokens=40), request=i) for i in range(4)]
        run(engine, [submits], watch)
    finally:
        engine.close()
    assert 30 < most <= 60
    assert 3 <= passes <= 8  # for 160 entries; each pass serves the rows with most entries


@pytest.mark.parametrize("defers", [False, True])
def test_hidden_states_wait_and_are_not_many(
    defers: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_hidden, "MOST_DEFERRED", 64)
    monkeypatch.setattr(mtp, "PASS_TOKENS", 80)
    engine, runner, drafter = idle_drafter(folders["skilled"])
    runs: list[int] = []
    lookahead = runner._model.lookahead

    def counting(step: Any, *rest: Any) -> Any:
        runs.append(len(step.ids))
        return lookahead(step, *rest)

    runner._model.lookahead = counting  # type: ignore[method-assign]
    try:
        drafter._defers = defers
        run(engine, [[submit(1, PROMPTS[0], TokenParams(temperature=0.0, max_tokens=33), request=1)]])
        run(engine, [[submit(2, PROMPTS[1][:3], TokenParams(temperature=0.0, max_tokens=80), request=2)]])
        if defers:  # 11 + 32 once the sequence is gone; when 64 wait, and the rest
            assert runs == [43, 64]
            once = TokenParams(max_tokens=1)
            run(engine, [[submit(3, PROMPTS[2] * 3 + [1], once, request=3)]])
            assert runs == [43, 64, 18, 64]  # a prompt as long does not wait
            both = [PROMPTS[3] + [1] * 20, PROMPTS[3] + [2] * 20]
            run(engine, [[submit(4 + i, ids, once, request=4 + i) for i, ids in enumerate(both)]])
            assert runs == [43, 64, 18, 64, 92]  # never two chunks larger than a pass
    finally:
        del runner._model.lookahead
        engine.close()
    if not defers:  # the prompt of 11, then whenever a block of 8 is full
        assert runs == [11, 5, 8, 8, 8, 3, 5, *[8] * 9]


def test_a_checkpoint_without_the_module_is_refused(tmp_path: Path) -> None:
    folder = make_mtp_checkpoint(tmp_path, skilled=False)
    assert load_spec(str(folder), None).mtp_layers == 0
    assert load_spec(str(folder), None, mtp=1).mtp_layers == 1
    with pytest.raises(ConfigError, match="speculative-method mtp"):
        load_spec(str(folder), None, mtp=2)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if ".layers.1." not in name},
        str(folder / "model.safetensors"),
        {"format": "pt"},
    )
    assert load_spec(str(folder), None).mtp_layers == 0
    with pytest.raises(ConfigError, match="speculative-method mtp"):
        load_spec(str(folder), None, mtp=1)
