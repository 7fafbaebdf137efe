"""Observe a running server: its processes with their roles, and its free resources."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from weft.bench.process import role_of
from weft.bench.process_memory import tree


def title_of(pid: int) -> str:
    """Return a title such as ``head prefill0 (model)``, or "" for a process without a title or an ended
    process.
    """
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        return line.removeprefix("weft: ") if line.startswith("weft: ") else ""
    return ""


def pools(text: str) -> dict[str, float]:
    """Return free resources and open transfers of each engine from the metrics ``text``.

    Blocks of encode groups are left out: cached embeddings occupy some blocks, and a new process starts with
    none.
    """
    names = (
        "free_blocks|free_slots|transfers_open|transfers_blocks_on_hold|transfers_awaiting|transfers_fetching"
        "|embedding_transfers_open|embedding_transfers_awaiting"
    )
    found = re.findall(rf"^(weft:(?:{names})\{{.*\}}) (.*)$", text, re.M)
    kept = re.compile(r'weft:free_blocks.*head="encode')
    return {name: float(value) for name, value in found if not kept.match(name)}


def processes(root: int) -> dict[int, str]:
    """Return the processes of a server by id, with their roles (``head``, ``front`` or ``rank``), lowest id
    first.
    """
    roles: dict[int, str] = {}
    for process in tree(root):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if (role := role_of(words)) is not None:
                roles[process.pid] = role.split()[0]
    return dict(sorted(roles.items()))
