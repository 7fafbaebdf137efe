"""``--overlap auto`` on simulated GPUs: replays are timed by events, and the faster form is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e0 import rig as e0
from tests.rehearsal import device, rig
from tests.support.slow import mostly_slow
from weft.overlap import bucket_trials
from weft.types.messages import Submit
from weft.types.sampling import TokenParams


def turns(tokens: int) -> list[list[Submit]]:
    params = TokenParams(temperature=0.0, max_tokens=tokens)
    return [[e0.submit(n, [5 + n, 6, 7], params, request=n) for n in range(2)]]


TURNS = turns(24)
TWO: dict[str, Any] = {"ranked": True, "tensor_parallel_size": 2}


@mostly_slow("chosen", [False, True], [True])
def test_the_faster_replay_is_chosen(chosen: bool, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in micro-batches has more kernels. Events on the compute stream see the time of a replay."""
    monkeypatch.setattr(bucket_trials, "SETTLED", 2)
    monkeypatch.setattr(bucket_trials, "TIMES", 3)
    counts: list[float] = []

    def timed(captured: device.Capture) -> float:
        counts.append(1.0 / captured.uses if chosen else 1e-5 * captured.uses)
        return counts[-1]

    def plant(patch: pytest.MonkeyPatch) -> None:
        device.current().replay_seconds = timed

    _, _, core = rig.rehearse(monkeypatch, folder_of("llama"), TURNS, plant=plant, **TWO)
    (choice,) = core.overlap.choices.values()
    assert choice.micro_batches == chosen
    one, two = choice.whole_seconds, choice.micro_batch_seconds
    assert one is not None
    assert two is not None
    assert {round(one, 9), round(two, 9)} == {round(count, 9) for count in counts}
    assert counts[-1] == pytest.approx(min(one, two)), "the last replay has the faster form"
    assert core.overlap.steps > (8 if chosen else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_next", {}),
        ("deepseek_v3", {}),
        ("qwen3_moe", {"enable_expert_parallel": True}),
        ("qwen3_moe", {"deterministic": True}),
        ("mtp", {"num_speculative_tokens": 2, "speculative_method": "mtp"}),
        ("llama", {"num_speculative_tokens": 2, "speculative_method": "ngram"}),
    ],
)
def test_trials_of_other_steps(
    name: str, settings: dict[str, Any], folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states, latents, divided experts, fixed bits, and rows with several tokens each."""
    monkeypatch.setattr(bucket_trials, "SETTLED", 2)
    monkeypatch.setattr(bucket_trials, "TIMES", 2)
    _, _, core = rig.rehearse(
        monkeypatch, folder_of(name), turns(40), speculative_adaptive=False, **TWO, **settings
    )
    (choice,) = core.overlap.choices.values()
    assert choice.whole_seconds == choice.micro_batch_seconds == pytest.approx(1e-3)
    assert not choice.micro_batches
    assert core.overlap.steps >= 3, "a capture and two replays"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"collectives": "gloo"}, {"decode_graphs": False}])
def test_without_captures_no_step_is_in_micro_batches(
    settings: dict[str, Any], folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, core = rig.rehearse(monkeypatch, folder_of("llama"), TURNS, **TWO, **settings)
    assert core.overlap.mode == "off"
    assert core.overlap.steps == 0
