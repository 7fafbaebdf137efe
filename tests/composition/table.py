"""The table of pairs that ran, as a page."""

from __future__ import annotations

from pathlib import Path

NAMES = {
    "policy": "mixed steps",
    "chunk": "chunked prefill",
    "prefix": "prefix cache",
    "depth": "two steps in flight",
    "draft": "speculation",
    "preempt": "preemption",
    "logprobs": "logprobs",
    "n": "n > 1",
    "penalties": "penalties",
    "stop": "stop strings",
    "kv": "fp8 KV",
}


class Table:
    """For each pair of features the families in which a case had both at work."""

    def __init__(self, features: dict[str, list[str]]) -> None:
        """``features``: those of each family."""
        self._features = features
        self._cases: dict[tuple[str, frozenset[str]], int] = {}

    def ran(self, family: str, pair: tuple[str, str]) -> None:
        """A case of ``family`` passed with both features of ``pair`` engaged."""
        key = (family, frozenset(pair))
        self._cases[key] = self._cases.get(key, 0) + 1

    def write(self, path: Path) -> None:
        """The page. Raises AssertionError when a cell is empty: then nothing is written."""
        lines = [
            "# Which features work together",
            "",
            "All of them. Each cell counts the cases of `tests/composition` in which both features were seen",
            "at work (by counters, not settings) and every sequence got the tokens, text and logprobs that",
            "it gets alone, in float64.",
            "A run of `pytest tests/composition --write-composition` writes this page.",
        ]
        for family in self._features:
            lines += ["", f"## {family.capitalize()}", "", *self._grid(family)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _grid(self, family: str) -> list[str]:
        features = self._features[family]
        columns = features[1:]
        lines = ["| | " + " | ".join(NAMES[c] for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for number, row in enumerate(features[:-1]):
            cells = []
            for column in columns:
                if features.index(column) <= number:
                    cells.append("")
                    continue
                count = self._cases.get((family, frozenset((row, column))), 0)
                assert count, f"no case of {family} had {row} and {column} at work"
                cells.append(str(count))
            lines.append(f"| {NAMES[row]} | " + " | ".join(cells) + " |")
        return lines
