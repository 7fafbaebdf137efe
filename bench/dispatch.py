"""Time one routed layer in every form of dispatch, and print the form that ``--moe-dispatch auto`` takes.

    python -m bench.dispatch --out bench/results/dispatch.md

Ranks are processes of this machine over gloo, with one thread each. A time is the slowest rank's time in the
fastest call. ``auto`` uses the table of ``weft bench dispatch``.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Iterator
from pathlib import Path

from weft.bench import dispatch
from weft.bench.moe_table import machine
from weft.moe.choice import Chooser
from weft.moe.exchange_cost import ExchangeShape
from weft.types.exchange import FORMS
from weft.types.layout import Layout

SIZES = {
    "32 experts, top 4, 512 x 256": (32, 4, 512, 256),
    "64 experts, top 8, 1024 x 128": (64, 8, 1024, 128),
}
LAYOUTS = {
    "TP 2": Layout(tensor=2, expert=True),
    "TP 4": Layout(tensor=4, expert=True),
    "DP 2": Layout(data=2, expert=True),
    "TP 2 x DP 2": Layout(tensor=2, data=2, expert=True),
}
TOKENS = (1, 8, 64, 512)


def rows() -> Iterator[str]:
    """The table, line by line."""
    yield "| layer | ranks | tokens of a replica | " + " | ".join(FORMS) + " | auto |"
    yield "|---" * (4 + len(FORMS)) + "|"
    for name, size in SIZES.items():
        for where, layout in LAYOUTS.items():
            chooser = Chooser(layout, "auto", ExchangeShape(size[2], size[1], 4))
            for tokens, found in zip(TOKENS, dispatch.layers(layout, size, TOKENS), strict=True):
                best, taken = min(found.values()), chooser.form(tokens)
                cells = [f"{found[form]:.1f}" if form in found else "" for form in FORMS]
                cells = [f"**{cell}**" if cell == f"{best:.1f}" else cell for cell in cells]
                auto = f"{taken} ({100 * (found[taken] / best - 1):+.0f}%)"
                yield f"| {name} | {where} | {tokens} | {' | '.join(cells)} | {auto} |"


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write.")
    out = parser.parse_args().out
    lines = [
        "# Forms of dispatch: milliseconds of one layer",
        "",
        f"{machine('cpu')}; load average {os.getloadavg()[0]:.0f} (1 is idle but for this);",
        f"{datetime.date.today()}; `python -m bench.dispatch`. float32; the slowest rank's fastest call.",
        "",
    ]
    for line in lines:
        print(line)
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
