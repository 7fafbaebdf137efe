"""The answers of each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.composition.rig import Answer, Seen, asked_of, make_checkpoint, run

PARAMETERS = ("n", "penalties", "stop", "kv")
"""Features that change the answer of a sequence alone."""
PLAIN: dict[str, Any] = {
    "policy": "exclusive",
    "chunk": 0,
    "prefix": False,
    "depth": 1,
    "draft": "none",
    "preempt": False,
    "logprobs": True,
}


def plain_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return ``case`` for an engine that runs one sequence at a time, with the same ``PARAMETERS``."""
    return {**PLAIN, **{feature: case[feature] for feature in PARAMETERS}}


def tokens_are_those_alone(folder: Path, case: dict[str, Any]) -> Seen:
    """Run ``case`` of the checkpoint in ``folder``, and compare the tokens with those of each sequence alone.
    Return what the engine did."""
    expected, _ = run(folder, plain_of(case), alone=True)
    made, seen = run(folder, case)
    assert made.keys() == expected.keys()
    assert len({answer.tokens for answer in made.values()}) > 4, "the model says the same to every prompt"
    for key, answer in made.items():
        assert answer.tokens == expected[key].tokens, key
    assert seen.stats.mixed_steps > 0
    assert seen.stats.prefix_hits > 0
    return seen


class References:
    """Answers of an engine that runs one sequence at a time, computed once for each set of ``PARAMETERS``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[tuple[Any, ...], tuple[dict[Any, Answer], list[str] | None]] = {}

    def of(self, family: str, case: dict[str, Any]) -> tuple[dict[Any, Answer], list[str] | None]:
        """Return (answers, the stop string of each prompt or None)."""
        key = (family, *(case[feature] for feature in PARAMETERS), case.get("lora", False))
        if key not in self._known:
            asked = {**plain_of(case), "lora": case.get("lora", False)}
            folder, stop = make_checkpoint(self.root, family), None
            if case["stop"]:
                free = self.of(family, {**case, "stop": False})[0]
                stop = [_stop_of(free[i, 0].text) for i in range(len(asked_of(folder)))]
            self._known[key] = (run(folder, asked, stop, alone=True)[0], stop)
        return self._known[key]


def _stop_of(text: str) -> str:
    """Return a string that ends an answer in the middle."""
    middle = len(text) // 2
    return text[middle : middle + 2] or "never"
