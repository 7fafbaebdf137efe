"""Write a result as two files: figures as JSON, and a page with the conditions of the measurement."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from bench import machine

ROOT = Path(__file__).parent.parent
COMMIT = machine.commit(Path(__file__).parent)
"""Commit at the start of the run; the files may change before the end."""
PREFIX: tuple[str, ...] = ()
"""Modules that run the benchmark's module (``bench.cputime``)."""


def command(module: str) -> str:
    """Return the command line of this run: python -m ``module`` and its arguments."""
    return of_any_machine(shlex.join(["python", "-m", *PREFIX, module, *sys.argv[1:]]))


def of_any_machine(text: str) -> str:
    """Return ``text`` with the home folder as ~, and with relative paths for the repository."""
    return text.replace(f"{ROOT}/", "").replace(f"{Path.home()}/", "~/")


def write(path: Path, module: str, title: str, table: str, numbers: dict[str, Any]) -> None:
    """Write ``path`` (.json) and the .md beside it: Markdown ``table`` below machine, date and command."""
    import torch

    where = machine.describe()
    settings = {
        "command": command(module),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": COMMIT,
        "torch": torch.__version__,
        "machine": where,
    }
    path.write_text(json.dumps({**settings, **numbers}, indent=1) + "\n")
    cpu = where["cpu"]
    load = where["load_average"][0]
    path.with_suffix(".md").write_text(
        f"# {title}\n\n    {settings['command']}\n\n{settings['date']}, commit {settings['commit']}, "
        f"torch {settings['torch']}; {cpu['model']} (has {', '.join(cpu['has'])}; lacks "
        f"{', '.join(cpu['lacks'])}), {where['cores']} cores, {where['system']}; load average at the end "
        f"{load:.1f}.\n\n{table}\n"
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return rows with equal keys as a Markdown table."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join('-' if v is None else str(v) for v in row.values())} |" for row in rows]
    return "\n".join(lines)
