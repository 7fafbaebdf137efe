"""Summarize the communication in a trace: ``python -m weft.overlap.overlap_report TRACE``, one line per class
of step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class StepSums:
    """Sums over the steps of one class, in seconds."""

    steps: int = 0
    compute: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0

    @property
    def share(self) -> float:
        """The share of communication hidden under compute, 0 .. 1."""
        return self.hidden / self.communication if self.communication else 0.0


def sums(events: Iterable[Mapping[str, Any]]) -> dict[str, StepSums]:
    """Return the sums of a trace's events, in seconds, by class (prompts or decode; whole or in
    micro-batches), and ``all``. Events without communication times are skipped.
    """
    result: dict[str, StepSums] = {}
    for event in events:
        args = event.get("args", {})
        # Only step events with communication times; other events have other arguments.
        if event.get("cat") != "step" or "communication_us" not in args:
            continue
        kind = "prompts" if args["prefill_rows"] else "decode"
        form = "in micro-batches" if args["micro_batches"] > 1 else "whole"
        for name in (f"{kind}, {form}", "all"):
            made = result.setdefault(name, StepSums())
            made.steps += 1
            made.compute += args["compute_us"] / 1e6
            made.communication += args["communication_us"] / 1e6
            made.hidden += args["hidden_us"] / 1e6
    return result


def table(found: Mapping[str, StepSums]) -> str:
    """Return the sums as a Markdown table."""
    lines = [
        "| steps | number | compute s | communication s | of it hidden |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in sorted(found, key=lambda name: (name == "all", name)):
        one = found[name]
        lines.append(
            f"| {name} | {one.steps} | {one.compute:.3f} | {one.communication:.3f} | {one.share:.0%} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the command: print the table of a trace file to stdout.

    Return the exit code: 0, or 2 for wrong arguments. Raises OSError or ValueError for an unusable file.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m weft.overlap.overlap_report TRACE\n")
        return 2
    text = Path(arguments[0]).read_text(encoding="utf-8").rstrip().rstrip(",")
    if not text.endswith("]"):  # the engine is still writing the trace
        text += "]"
    sys.stdout.write(table(sums(json.loads(text))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
