"""Drafts of modules and of draft models on a simulated GPU: captured once a bucket repeats, with equal
drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e0 import rig as e0
from tests.rehearsal import rig
from tests.rehearsal.device import Rehearsal
from tests.rehearsal.order import HOST
from tests.rehearsal.test_launches import NO_LAUNCH
from weft.engine.core import EngineCore
from weft.ops.triton import interpreting
from weft.speculation.draft_model import ModelDrafter
from weft.speculation.mtp import MtpDrafter
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

SETTINGS: dict[str, Any] = {
    "speculative_adaptive": False,
    "num_speculative_tokens": 2,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "kv_cache_memory": "1M",
}


def turns(tokens: int) -> list[list[Submit]]:
    """Return three prompts in one step: the bucket of four rows has a padding row."""
    params = TokenParams(temperature=0.0, max_tokens=tokens)
    return [[e0.submit(n, [5, 7, 9, 5 + n] * 2, params, request=n) for n in range(3)]]


def model_and_settings(method: str, folder_of: Callable[[str], Path]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a model and the settings of drafts by ``method``. The draft model is the model
    itself, so each draft is right."""
    folder = folder_of("mtp" if method == "mtp" else "llama")
    own = {"speculative_model": str(folder)} if method == "draft" else {}
    return folder, {**SETTINGS, "speculative_method": method, **own}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "draft"])
def test_a_replay_replaces_the_launches_of_the_passes(
    method: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay needs copies of its inputs and of the drafts; the passes launch nothing."""
    counts: list[tuple[bool, int]] = []
    drafter = MtpDrafter if method == "mtp" else ModelDrafter
    propose, use = drafter.propose, Rehearsal.use
    launches = 0

    def used(self: Rehearsal, label: str, *given: Any, actor: str | None = None) -> None:
        nonlocal launches
        launches += self.capture is None and actor != HOST and not label.startswith(NO_LAUNCH)
        use(self, label, *given, actor=actor)

    def watch(self: MtpDrafter | ModelDrafter, step: Any) -> Any:
        assert self.captured is not None
        before, replayed = launches, self.captured.replayed
        drafts = propose(self, step)
        counts.append((self.captured.replayed > replayed, launches - before))
        return drafts

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(drafter, "propose", watch)
        patch.setattr(Rehearsal, "use", used)

    folder, settings = model_and_settings(method, folder_of)
    rig.rehearse(monkeypatch, folder, turns(30), plant=plant, **settings)
    replays = [count for replayed, count in counts if replayed]
    launched = [count for replayed, count in counts if not replayed]
    assert len(replays) > 3
    assert max(replays) <= 12 < max(launched), (replays, launched)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "draft"])
def test_captured_drafts_are_those_of_a_cpu(
    method: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels run in Triton's interpreter. As many drafts are right as on a CPU, and the tokens are equal."""
    if not interpreting():
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    folder, settings = model_and_settings(method, folder_of)
    settings["dtype"] = "float32"
    with monkeypatch.context() as patch:
        _, there, core = rig.rehearse(patch, folder, turns(14), values=True, **settings)
    drafter = core.runner.drafter
    assert isinstance(drafter, MtpDrafter | ModelDrafter)
    assert drafter.captured is not None
    assert drafter.captured.replayed > 1
    here = EngineCore(rig.config_of(folder, **{**settings, "device": "cpu"}), progress=False)
    expected = e0.run(here, turns(14))
    accepted = here.stats().drafts_accepted
    assert core.scheduler.stats().drafts_accepted == accepted
    assert sum(accepted)
    here.close()
    assert {n: a.tokens for n, a in there.items()} == {n: a.tokens for n, a in expected.items()}
