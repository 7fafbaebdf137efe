"""Exact tokens under LoRA adapters: equal to the merged checkpoint, alone and in every kind of batch."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import CPU, Answer, make_engine, run, spec_of, submit
from tests.support.checkpoints import make_checkpoint
from tests.support.loras import CONV, DELTA, DENSE, KIMI, LATENT, MAMBA, PARALLEL, make_adapter, merge
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest
from weft.config.adapters import read_adapter
from weft.config.sections.all import SpeculationSection
from weft.config.sections.lora_section import LoraSection
from weft.engine.core import EngineCore
from weft.layers.build import AdapterOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.types.adapters import DropAdapter, LoadAdapter
from weft.types.messages import Submit
from weft.types.plan import PlaceAdapter, ReleaseAdapter
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=9)
PROMPTS = [[5 + 3 * i % 60 for i in range(length)] for length in (19, 26, 7)]
TARGETS = {"llama": DENSE, "mistral": DENSE, "deepseek_v3": LATENT, "qwen3_next": DELTA}
TARGETS |= {"kimi_linear": KIMI, "lfm2": CONV, "nemotron_h": MAMBA, "falcon_h1": PARALLEL}


class World:
    """A checkpoint, two adapters, and the tokens of the merged checkpoints."""

    def __init__(self, folder: Path, shape: str, targets: str = "", **settings: Any) -> None:
        """``settings``: more settings of the second adapter."""
        self.base = make_checkpoint(folder, shape)
        self.targets = targets = targets or TARGETS[shape]
        self.adapters = [
            make_adapter(folder / "one", self.base, targets, seed=1),
            make_adapter(folder / "two", self.base, targets, seed=2, rank=2, use_rslora=True, **settings),
        ]
        merged = [merge(folder / f"merged{i}", self.base, one) for i, one in enumerate(self.adapters)]
        self.digests = ["", *(read_adapter(one).digest for one in self.adapters)]
        self.due = [tokens(one) for one in (self.base, *merged)]
        assert len({str(due) for due in self.due}) == 3, "the adapters change nothing"

    def engine(self, places: int = 2, **options: Any) -> EngineCore:
        """Return an engine with ``places`` and both adapters."""
        model = adapted_model(self.base, places)
        engine, self.runner = make_engine(
            self.base, model=model, lora=LoraSection(max_loras=places), **options
        )
        for number, folder in enumerate(self.adapters):
            load(engine, folder, self.digests[number + 1])
        return engine

    def submits(self) -> list[Submit]:
        """Return each prompt under each adapter and without one."""
        return [
            submit(10 * number + adapter, prompt, GREEDY, request=10 * number + adapter, adapter=digest)
            for number, prompt in enumerate(PROMPTS)
            for adapter, digest in enumerate(self.digests)
        ]

    def check(self, answers: dict[int, Answer]) -> None:
        for number in range(len(PROMPTS)):
            for adapter in range(len(self.digests)):
                assert answers[10 * number + adapter].tokens == self.due[adapter][number], (number, adapter)


@cache
def adapted_model(folder: Path, places: int) -> Decoder:
    options = AdapterOptions(places=places, rank=4, experts=True, saved=True)
    return load_model(str(folder), spec_of(folder), torch.float64, CPU, progress=False, adapters=options)


def load(engine: EngineCore, folder: Path, digest: str, **more: Any) -> None:
    answer = engine.adapters.apply(LoadAdapter(name=folder.name, digest=digest, folder=str(folder), **more))
    assert answer.loaded, answer.error


def tokens(folder: Path) -> list[list[int]]:
    """Return the tokens of every prompt, each alone in an engine without adapters."""
    engine, _ = make_engine(folder, caching=False)
    made = [run(engine, [[submit(0, prompt, GREEDY, request=0)]])[0].tokens for prompt in PROMPTS]
    engine.close()
    return made


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(s, marks=pytest.mark.slow) for s in list(TARGETS)[1:])]
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp(request.param), request.param)


def together(world: World, places: int = 2, **options: Any) -> EngineCore:
    engine = world.engine(places, **options)
    answers = run(engine, [world.submits()])
    engine.close()
    world.check(answers)
    return engine


def test_one_batch_of_base_and_adapters(world: World) -> None:
    together(world)
    assert any(op for plan in world.runner.plans for op in plan.ops if isinstance(op, PlaceAdapter))


def test_chunks_two_steps_deep(world: World) -> None:
    engine = together(world, chunk=5, depth=2)
    assert engine.stats().mixed_steps > 0


def test_preemption(world: World) -> None:
    engine = together(world, blocks=12, window_blocks=12, chunk=8)
    assert engine.stats().preemptions > 0


def test_a_pool_of_one_place(world: World) -> None:
    engine = world.engine(places=1)
    later = [submit(50, PROMPTS[0], GREEDY, request=50, adapter=world.digests[1])]
    answers = run(engine, [world.submits(), [], later])
    assert engine.scheduler.adapters.placed >= 2
    assert answers.pop(50).tokens == world.due[1][0]
    world.check(answers)


def test_drafts_of_n_grams(world: World) -> None:
    speculation = SpeculationSection(
        speculative_method="ngram",
        num_speculative_tokens=2,
        ngram_min_length=1,
        speculative_adaptive=False,
    )
    engine = together(world, speculation=speculation, chunk=6)
    assert sum(engine.stats().drafts) > 0


def test_equal_prompts_share_the_cache_under_one_adapter_only(world: World) -> None:
    engine = world.engine()
    first, second = world.digests[1:]
    prompt = PROMPTS[1]
    for number, (digest, due) in enumerate(
        [(first, world.due[1]), (second, world.due[2]), ("", world.due[0]), (first, world.due[1])]
    ):
        answer = run(engine, [[submit(number, prompt, GREEDY, request=number, adapter=digest)]])[number]
        assert answer.tokens == due[1]
        assert (answer.num_cached > 0) == (number == 3)


def test_other_content_under_a_name_is_another_adapter(world: World, tmp_path: Path) -> None:
    """A reload ends nothing: the running request keeps the old content, the next request gets the new one."""
    engine = world.engine(places=2)
    old = world.digests[1]
    folder = make_adapter(tmp_path / "one", world.base, TARGETS[world.base.name], seed=7)
    new = read_adapter(folder).digest
    due = tokens(merge(tmp_path / "merged", world.base, folder))

    def reload(step: int) -> list[Any]:
        if step == 3:
            load(engine, folder, new)
            assert not engine.adapters.apply(DropAdapter(digest=old)).loaded
            engine.submit(submit(1, PROMPTS[0], GREEDY, request=1, adapter=new))
            with pytest.raises(InvalidRequest, match="not loaded"):
                engine.submit(submit(2, PROMPTS[0], GREEDY, request=2, adapter=old))
        return []

    answers = run(engine, [[submit(0, PROMPTS[0], GREEDY, request=0, adapter=old)]], reload)
    assert answers[0].tokens == world.due[1][0]
    assert answers[1].tokens == due[0]
    assert answers[1].num_cached == 0
    released = [op for plan in world.runner.plans for op in plan.ops if isinstance(op, ReleaseAdapter)]
    assert [op.digest for op in released] == [old]


def test_steps_go_on_while_files_are_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request gets tokens between the begin and the end of a read, and the answer comes after."""
    engine, runner = make_engine(
        world.base, model=adapted_model(world.base, 2), lora=LoraSection(max_loras=2), caching=False
    )
    adapters = runner.adapters
    assert adapters is not None
    read, may_read = adapters._copy_of, threading.Event()

    def slow(*given: Any) -> Any:
        assert may_read.wait(deadline(30))
        return read(*given)

    monkeypatch.setattr(adapters, "_copy_of", slow)
    digest = world.digests[1]
    load = LoadAdapter(name="a", digest=digest, folder=str(world.adapters[0]))
    seen = []

    def beside(step: int) -> list[Any]:
        if step == 2:
            assert engine.adapters.begin(load) is None
        if step in (3, 6):
            seen.append(engine.adapters.finished())
        if step == 6:
            may_read.set()
            wait([engine.adapters._loading[digest][1]], 30)
            seen.append(engine.adapters.finished())
            engine.submit(submit(1, PROMPTS[0], GREEDY, request=1, adapter=digest))
        return []

    answers = run(engine, [[submit(0, PROMPTS[0], GREEDY, request=0)]], beside)
    engine.close()
    assert seen[:2] == [[], []]
    assert [answer.loaded for answer in seen[2]] == [True]
    assert [answers[number].tokens for number in (0, 1)] == [world.due[number][0] for number in (0, 1)]


def test_files_that_are_no_adapter_of_the_model_are_an_answer(world: World, tmp_path: Path) -> None:
    engine = world.engine()
    apply = engine.adapters.apply
    folder = str(world.adapters[0])
    wrong = apply(LoadAdapter(name="a", digest="0" * 32, folder=folder))
    assert wrong.error is not None
    assert "has other content than announced" in wrong.error.message
    alien = make_adapter(tmp_path / "alien", world.base, world.targets, prefix="base_model.model.vision.")
    named = apply(LoadAdapter(name="a", digest=read_adapter(alien).digest, folder=str(alien)))
    assert named.error is not None
    assert "vision." in named.error.message
    wide = make_adapter(tmp_path / "wide", world.base, world.targets, rank=5)
    high = apply(LoadAdapter(name="a", digest=read_adapter(wide).digest, folder=str(wide)))
    assert high.error is not None
    assert "--max-lora-rank" in high.error.message
    pinned = LoadAdapter(name="a", digest=world.digests[1], folder=folder, pinned=True)
    assert apply(pinned).error is None
    other = LoadAdapter(name="b", digest=world.digests[2], folder=str(world.adapters[1]), pinned=True)
    refused = apply(other)
    assert refused.loaded, "the adapter stays loaded"
    assert refused.error is not None
    assert "at most 1" in refused.error.message
