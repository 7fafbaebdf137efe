"""The composition of steps in the trace of a torch profiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e0.rig import run, submit
from tests.support.checkpoints import make_checkpoint
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.engine.core import EngineCore
from weft.runner.step_trace import labelled
from weft.types.plan import Segment, StepPlan, column
from weft.types.sampling import TokenParams


def test_a_label_counts_tokens_rows_and_drafts() -> None:
    """Without a profiler there is no label."""
    count = column([3, 1])
    plan = StepPlan(
        step=0, prefill=Segment(slot=column([4]), count=column([9])), decode=Segment(slot=count, count=count)
    )
    with torch.autograd.profiler.profile(use_kineto=False) as profile, labelled(plan):
        pass
    assert [event.name for event in profile.function_events] == [
        "weft step: prefill 9 tokens, decode 2 rows, 2 drafts"
    ]
    assert labelled(plan) is labelled(StepPlan(step=1))


@pytest.mark.slow
def test_a_profile_names_the_rows_of_each_step(tmp_path: Path) -> None:
    """A profiler sees the thread of the steps if one step is in flight."""
    settings = {"device": "cpu", "steps_in_flight": 1, "max_num_seqs": 2, "kv_cache_memory": "4M"}
    core = EngineCore(
        resolve(from_keywords({"model": str(make_checkpoint(tmp_path, "llama")), **settings})), progress=False
    )
    params = TokenParams(temperature=0.0, max_tokens=3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(core, [[submit(0, [5, 6, 7], params, request=0)], [submit(1, [8] * 5, params, request=1)]])
    core.close()
    names = {event.key for event in profile.key_averages() if event.key.startswith("weft step")}
    assert names == {
        "weft step: prefill 3 tokens, decode 0 rows, 0 drafts",
        "weft step: prefill 5 tokens, decode 1 rows, 0 drafts",
        "weft step: prefill 0 tokens, decode 2 rows, 0 drafts",
        "weft step: prefill 0 tokens, decode 1 rows, 0 drafts",
    }
