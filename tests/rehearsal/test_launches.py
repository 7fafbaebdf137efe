"""Number of operations that a decode step starts on a GPU beside its replay."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e0 import rig as e0
from tests.rehearsal import device, stand_ins
from tests.rehearsal.kernels import StandIn
from tests.rehearsal.rig import rehearse
from tests.support.slow import mostly_slow
from weft.runner.runner import Runner
from weft.types.sampling import TokenParams

VIEWS = {"view", "slice", "select", "unsqueeze", "expand", "detach", "alias", "split", "empty", "as_strided"}
VIEWS |= {
    "_unsafe_view",
    "squeeze",
    "permute",
    "transpose",
    "unbind",
    "lift_fresh",
    "empty_like",
    "_reshape_alias",
    "device",
}
"""Operators that start no work."""

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


@dataclass
class Step:
    """The work that one step started."""

    replays: int = 0
    updates: int = 0
    started: collections.Counter[str] = field(default_factory=collections.Counter)


@mostly_slow("kind", list(KINDS), ["top_p"])
def test_launches_beside_the_replay(kind: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload of the slots and download of the tokens are all that a plain draw adds to the replay."""
    steps: list[Step] = []
    inside = [0]
    """Depth of replays and captures, whose operations are not started by the host."""

    def noted(name: str) -> None:
        if steps and not inside[0] and device.current().capture is None and name not in VIEWS:
            steps[-1].started[name] += 1

    def plant(patch: pytest.MonkeyPatch) -> None:
        on_device, crossing = device.Rehearsal._on_device, device.Rehearsal._crossing
        launch, replay, forward = StandIn._launch, stand_ins.Graph.replay, Runner._forward_whole

        def operator(self: Any, func: Any, *rest: Any) -> Any:
            noted(func.overloadpacket.__name__)
            return on_device(self, func, *rest)

        def crossed(self: Any, *given: Any) -> Any:
            made = crossing(self, *given)
            if made is not None:
                noted("copy between host and device")
            return made

        def launched(self: Any, *given: Any, **named: Any) -> Any:
            noted(self._contract.name)
            return launch(self, *given, **named)

        def replayed(self: Any) -> None:
            inside[0] += 1
            replay(self)
            inside[0] -= 1
            steps[-1].replays += 1

        def forwarded(self: Any, handle: Any) -> Any:
            steps.append(Step(updates=len(handle.plan.ops)))
            return forward(self, handle)

        patch.setattr(device.Rehearsal, "_on_device", operator)
        patch.setattr(device.Rehearsal, "_crossing", crossed)
        patch.setattr(StandIn, "_launch", launched)
        patch.setattr(stand_ins.Graph, "replay", replayed)
        patch.setattr(Runner, "_forward_whole", forwarded)

    params, most = KINDS[kind]
    asked = TokenParams(max_tokens=12, **params)
    turns = [[e0.submit(0, [5, 6, 7], asked, request=0), e0.submit(1, [8, 9, 3, 4], asked, request=1)]]
    _, answers, _ = rehearse(monkeypatch, folder_of("llama"), turns, plant=plant)
    assert all(len(answer.tokens) == 12 for answer in answers.values())
    plain = [step for step in steps if step.replays and not step.updates]
    assert len(plain) > 5
    counts = [sum(step.started.values()) for step in plain]
    assert max(counts) <= most, dict(plain[counts.index(max(counts))].started)
