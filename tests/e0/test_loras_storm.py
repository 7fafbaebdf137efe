"""Storms of loads, drops and evictions: every request has the tokens of its adapter, or is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e0.rig import make_engine, run, submit
from tests.e0.test_loras import GREEDY, PROMPTS, TARGETS, adapted_model, tokens
from tests.support.checkpoints import make_checkpoint
from tests.support.loras import EXPERTS, make_adapter, merge
from tests.support.slow import mostly_slow
from weft.common.errors import InvalidRequest
from weft.config.adapters import read_adapter
from weft.config.sections.lora_section import LoraSection
from weft.types.adapters import DropAdapter, LoadAdapter
from weft.types.messages import TokenEvent
from weft.types.plan import PlaceAdapter, ReleaseAdapter

pytestmark = pytest.mark.slow

ADAPTERS = 4
REQUESTS = 40


@mostly_slow("seed", range(3), 1)
@pytest.mark.parametrize("shape", ["llama", "deepseek_v3", "qwen3_moe"])
def test_loads_drops_and_evictions(shape: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    base = make_checkpoint(tmp_path, shape)
    targets = EXPERTS if shape == "qwen3_moe" else TARGETS[shape]
    folders = [
        make_adapter(tmp_path / f"a{i}", base, targets, seed=i, rank=1 + i, use_dora=i == 2)
        for i in range(ADAPTERS)
    ]
    digests = [read_adapter(folder).digest for folder in folders]
    due = [tokens(merge(tmp_path / f"m{i}", base, folder)) for i, folder in enumerate(folders)]
    plain = tokens(base)
    engine, runner = make_engine(
        base, model=adapted_model(base, 2), lora=LoraSection(max_loras=2), chunk=8, depth=2, blocks=24
    )
    loaded, asked, refused = set[int](), dict[int, tuple[int, int]](), set[int]()

    def act(step: int) -> list[TokenEvent]:
        """Load, drop or use a random adapter. Loads run beside the steps."""
        events = list[TokenEvent]()
        for answer in engine.adapters.finished():
            assert answer.error is None or "was dropped" in answer.error.message
            if answer.loaded:
                loaded.add(digests.index(answer.digest))
        which = rng.randrange(ADAPTERS)
        action = rng.random()
        if action < 0.25:
            load = LoadAdapter(name=f"a{which}", digest=digests[which], folder=str(folders[which]))
            answer = engine.adapters.begin(load)
            if answer is not None and answer.loaded:
                loaded.add(which)
        elif action < 0.4:
            engine.adapters.begin(DropAdapter(digest=digests[which]))
            loaded.discard(which)
        elif action < 0.8 and len(asked) < REQUESTS:
            number, prompt = len(asked), rng.randrange(len(PROMPTS))
            which = which if rng.random() < 0.8 else -1
            digest = digests[which] if which >= 0 else ""
            asked[number] = which, prompt
            one = submit(number, PROMPTS[prompt], GREEDY, request=number, adapter=digest)
            if which < 0 or which in loaded:
                events += engine.submit(one)
            else:
                refused.add(number)
                with pytest.raises(InvalidRequest, match="not loaded"):
                    engine.submit(one)
        return events

    answers = run(engine, [[] for _ in range(5 * REQUESTS)], act)
    engine.close()
    ended = 0
    for number, (which, prompt) in asked.items():
        if number in refused:
            continue
        ended += 1
        assert answers[number].tokens == (due[which] if which >= 0 else plain)[prompt], (
            number,
            which,
            prompt,
        )
    ops = [op for plan in runner.plans for op in plan.ops]
    assert len(asked) == REQUESTS
    assert ended > REQUESTS // 3
    assert refused
    assert sum(isinstance(op, ReleaseAdapter) for op in ops) > 2
    assert sum(isinstance(op, PlaceAdapter) for op in ops) > ADAPTERS
