"""A decode step on a simulated GPU is one copy and one replay, also with drafts. Limits on the launches."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e0 import rig as e0
from tests.rehearsal import rig, stand_ins
from tests.rehearsal.device import Rehearsal
from tests.rehearsal.order import HOST
from tests.support.slow import mostly_slow
from weft.runner.graphs import graphs
from weft.runner.graphs.graphs import DecodeGraphs, Key
from weft.runner.runner import Runner
from weft.types.messages import Submit
from weft.types.plan import AppendEach, StepPlan
from weft.types.sampling import TokenParams

NO_LAUNCH = ("aten.empty", "aten.new_empty")
"""Operators that only take memory."""
UPLOAD = "copy from the host"
COPY_LAUNCHES = 1
APPEND_LAUNCHES = 1
"""Launches of one ``AppendEach`` beside the copy of the step."""


@dataclass
class Step:
    """The launches of one step, in ``Runner._forward_step``."""

    plan: StepPlan
    labels: collections.Counter[str] = field(default_factory=collections.Counter)
    replays: int = 0

    @property
    def launches(self) -> int:
        """Launches without the copy of drawn tokens to the host."""
        return self.labels.total() - self.labels["copy to the host"]

    @property
    def appends(self) -> bool:
        return any(isinstance(op, AppendEach) for op in self.plan.ops)


def watched(seen: list[Step]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that records the launches of all forward passes in ``seen``."""
    use, replay, forward = Rehearsal.use, stand_ins.Graph.replay, Runner._forward_step
    open_steps: list[Step] = []

    def used(self: Rehearsal, label: str, *given: Any, actor: str | None = None) -> None:
        counts = open_steps and self.capture is None and actor != HOST and not label.startswith(NO_LAUNCH)
        if counts:
            open_steps[-1].labels[label] += 1
        use(self, label, *given, actor=actor)

    def replayed(self: stand_ins.Graph) -> None:
        open_steps[-1].replays += 1
        replay(self)

    def watch(self: Runner, handle: Any) -> Any:
        open_steps.append(Step(handle.plan))
        try:
            return forward(self, handle)
        finally:
            seen.append(open_steps.pop())

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Rehearsal, "use", used)
        patch.setattr(stand_ins.Graph, "replay", replayed)
        patch.setattr(Runner, "_forward_step", watch)

    return plant


def decodes(seen: list[Step]) -> list[Step]:
    """Return the steps with decode rows alone that give no slot away."""
    return [
        step
        for step in seen
        if step.plan.decode.rows
        and not step.plan.prefill.rows
        and all(isinstance(op, AppendEach) for op in step.plan.ops)
    ]


def requests(repeats: int, max_tokens: int, **given: Any) -> list[list[Submit]]:
    params = TokenParams(**{"temperature": 0.0, **given, "max_tokens": max_tokens})
    return [[e0.submit(n, [5 + n, 6, 7] * repeats, params, request=n) for n in range(2)]]


@pytest.mark.slow
def test_a_decode_step_is_one_copy_and_one_replay(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a step appends travel in the same copy, and one launch per KV cache group writes them."""
    seen: list[Step] = []
    rig.rehearse(monkeypatch, folder_of("llama"), requests(1, 20), plant=watched(seen))
    steps = decodes(seen)
    assert len(steps) > 10
    assert {step.replays for step in steps} == {1}
    assert {step.labels[UPLOAD] for step in steps} == {1}
    plain = [step.launches for step in steps if not step.appends]
    assert set(plain) == {COPY_LAUNCHES}
    appending = [step.launches for step in steps if step.appends]
    assert appending
    assert max(appending) == COPY_LAUNCHES + APPEND_LAUNCHES


@mostly_slow(
    ("name", "method"),
    [("llama", "ngram"), ("mtp", "mtp"), ("qwen3_next", "ngram"), ("deepseek_v3", "ngram")],
    1,
)
def test_steps_with_drafts_are_replayed(
    name: str, method: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy and one replay, for any number of tokens per row up to 1 + the number of drafts."""
    seen: list[Step] = []
    settings = {"speculative_adaptive": False, "num_speculative_tokens": 3, "speculative_method": method}
    _, _, core = rig.rehearse(
        monkeypatch, folder_of(name), requests(3, 9), plant=watched(seen), max_model_len=128, **settings
    )
    assert core.runner.graphs is not None
    steps = decodes(seen)
    assert {int(step.plan.decode.count.max()) for step in steps} >= {1, 4}
    for step in steps:
        assert step.replays == step.labels[UPLOAD] == 1
        assert step.launches == COPY_LAUNCHES + APPEND_LAUNCHES * step.appends


KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({"temperature": 0.0}, 2),
    "temperature": ({"temperature": 0.8}, 2),
    "min_p": ({"temperature": 0.8, "min_p": 0.1}, 2),
    "top_p": ({"temperature": 0.8, "top_p": 0.9}, 2),
    "top_k": ({"temperature": 0.8, "top_k": 40}, 2),
    "penalty": ({"temperature": 0.8, "presence_penalty": 0.5}, 64),
    "logprobs": ({"temperature": 0.0, "logprobs": 3}, 64),
}
"""Name -> (sampling parameters, most launches beside the replay)."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_launches_beside_the_replay(kind: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload of the slots and download of the tokens are all that a plain draw adds to the replay."""
    seen: list[Step] = []
    params, most = KINDS[kind]
    rig.rehearse(monkeypatch, folder_of("llama"), requests(1, 12, **params), plant=watched(seen))
    plain = [step for step in decodes(seen) if step.replays and not step.appends]
    assert len(plain) > 5
    most_launched = max(plain, key=lambda step: step.labels.total())
    assert most_launched.labels.total() <= most, dict(most_launched.labels)


def captured_keys(folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> list[Key]:
    keys: list[Key] = []
    closure = DecodeGraphs._closure

    def noted(self: DecodeGraphs, key: Key) -> Any:
        keys.append(key)
        return closure(self, key)

    rig.rehearse(
        patch,
        folder,
        [[rig.one(3)]],
        plant=lambda patch: patch.setattr(DecodeGraphs, "_closure", noted),
        **settings,
    )
    return keys


@pytest.mark.slow
def test_captures_with_drafts_are_few_and_small(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with drafts are captured up to a number of rows, and tokens per row in powers of two."""
    monkeypatch.setattr(graphs, "MOST_DRAFTED", 2)
    settings = {"num_speculative_tokens": 4, "speculative_method": "ngram", "max_num_seqs": 8}
    keys = captured_keys(folder_of("llama"), monkeypatch, **settings)
    assert {key.each for key in keys} == {1, 2, 4, 5}
    assert {key.rows for key in keys if key.each > 1} == {1, 2}
    assert {key.rows for key in keys if key.each == 1} == {1, 2, 4, 8}
    sizes = [key.rows * key.each for key in keys]
    assert sizes == sorted(sizes, reverse=True)
