"""``weft restart --file``: groups get new settings, one after the other, or their former settings again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_scale import Streams, groups, incarnations, weft
from tests.cli.test_serve import start
from tests.cli.test_up import ask
from tests.support.slowness import deadline, until

__all__ = ["start"]

TOPOLOGY = """
model: spool-text
threads: 1
front: {port: 0, admin-key: [secret], fronts: FRONTS}
groups:
  - {role: unified, name: all, count: 2, tp: RANKS, max-num-seqs: 6}
"""


def slots(base: str) -> dict[str, int]:
    """Return engine -> free slots, for idle engines."""
    text = httpx.get(f"{base}/metrics", timeout=deadline(30)).text
    found = re.findall(r'^weft:free_slots\{.*head="(\w+)".*\} (\d+)', text, re.MULTILINE)
    return {name: int(float(number)) for name, number in found}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fronts", "ranks"), [(1, 1), (2, 1), (1, 2)])
def test_new_settings_come_one_by_one_and_go_where_they_do_not_work(
    start: Any, tmp_path: Path, fronts: int, ranks: int
) -> None:
    file, log = tmp_path / "topology.yaml", tmp_path / "serve.log"
    file.write_text(TOPOLOGY.replace("FRONTS", str(fronts)).replace("RANKS", str(ranks)))
    file.chmod(0o600)
    base = start(str(file), command="up").url()
    due = ask(base)
    before = incarnations(base)
    better = tmp_path / "better.yaml"
    better.write_text(file.read_text().replace("seqs: 6", "seqs: 5"))
    with Streams(base, 2) as streams:
        said = weft(base, "restart", "--file", str(better), "--wait", str(deadline(120)))
    assert "restarting all0, all1" in said
    assert len(set(streams.texts)) == 1
    until(lambda: slots(base) == {"all0": 5, "all1": 5})
    middle = incarnations(base)
    assert not set(middle.values()) & set(before.values())

    worse = tmp_path / "worse.yaml"
    worse.write_text(better.read_text() + "trace: /proc/weft-trace\n")  # nobody can make the file
    said = weft(base, "restart", "--file", str(worse), "--wait", str(deadline(120)), status=1)
    reason = r"cancelled: (--trace: cannot write|the (engine's )?process ended)"  # the end may be seen first
    assert re.search(f"all0 did not start again, and the restart is {reason}", said)
    until(lambda: groups(base) == {"all0": "running", "all1": "running"})
    until(lambda: slots(base) == {"all0": 5, "all1": 5}, 90)
    assert incarnations(base)["all1"] == middle["all1"]
    assert ask(base) == due
    assert "the former settings hold again" in log.read_text()
    again = weft(base, "restart", "all1", "--file", str(better), "--wait", str(deadline(120)))
    assert "restarting all1" in again
    other = tmp_path / "other.yaml"
    other.write_text(better.read_text() + "max-model-len: 64\n")
    assert "restart cannot change" in weft(base, "restart", "--file", str(other), status=2)
