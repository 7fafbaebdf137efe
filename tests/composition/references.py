"""The answers of each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.composition.rig import Answer, asked_of, make_checkpoint, run

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


class References:
    """Answers of an engine that runs one sequence at a time, computed once for each set of ``PARAMETERS``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[tuple[Any, ...], tuple[dict[Any, Answer], list[str] | None]] = {}

    def of(self, family: str, case: dict[str, Any]) -> tuple[dict[Any, Answer], list[str] | None]:
        """Return (answers, the stop string of each prompt or None)."""
        key = (family, *(case[feature] for feature in PARAMETERS), case.get("lora", False))
        if key not in self._known:
            asked = {**PLAIN, **{feature: case[feature] for feature in PARAMETERS}}
            asked["lora"] = case.get("lora", False)
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
