"""Faults of groups that lie on both nodes of a Ray cluster. See ``tests.on_ray.drills``."""

from __future__ import annotations

import os
import signal
import time

from tests.cli.test_scale import incarnations, weft
from tests.on_ray.drills import (
    BASE,
    FRONT,
    Fault,
    Fleet,
    lose_engine,
    partition,
    renewed,
    restart,
)
from tests.support.slowness import until

SPLIT = f"""model: spool-text
dtype: float64
max-num-seqs: 4
{FRONT}groups:
  - {{role: unified, tp: 2, hosts: 2}}
"""
"""One group with a rank on each node."""


def rank_there(fleet: Fleet) -> int:
    """Return the process id of the rank without an engine; 0 while there is none."""
    found = [*fleet.cluster.processes(0).items(), *fleet.cluster.processes(1).items()]
    return next((pid for pid, line in found if line.startswith("weft: worker ")), 0)


def lose_rank(fleet: Fleet) -> None:
    """Kill the rank of the other node. The engine and its rank keep the process."""
    before, engines = rank_there(fleet), fleet.cluster.engines()
    os.kill(before, signal.SIGKILL)
    until(lambda: rank_there(fleet) not in (0, before), 120)
    until(fleet.whole, 120)
    assert fleet.cluster.engines() == engines


def lose_node_of_rank(fleet: Fleet) -> None:
    """Kill all processes of host 1, and start the Ray node again."""
    fleet.cluster.kill(1)
    fleet.cluster.start(1)
    until(lambda: fleet.whole() and rank_there(fleet), 180)


def drain_split(fleet: Fleet) -> None:
    """Start a second group over both nodes, and drain the group under streams."""
    weft(BASE, "scale", "unified", "2")
    until(lambda: fleet.whole(["unified0", "unified1"]), 120)
    time.sleep(3.0)  # streams reach the second group
    weft(BASE, "scale", "unified", "1")
    until(fleet.whole, 120)


SPLIT_FAULTS: dict[str, Fault] = {
    "partition of 4 s": partition(4),
    "loss of the rank on the other node": lose_rank,
    "loss of the engine": lose_engine("unified"),
    "loss of the second Ray node": lose_node_of_rank,
    "groups: 1, 2, 1": drain_split,
    "rolling restart with new settings": restart,
}
"""Faults of a group with ranks on both nodes."""
EXPERTS = f"""model: spool-text
dtype: float64
max-num-seqs: 4
{FRONT}groups:
  - {{role: unified, dp: 2, ep: true, hosts: 2}}
"""
"""One expert-parallel group with an engine and its rank on each node."""


def lose_expert(host: int) -> Fault:
    """Return a fault that kills the engine of a host. Each engine has a part of the experts, so the other
    engine pauses until the killed engine is back."""

    def fault(fleet: Fleet) -> None:
        before = incarnations(BASE)
        name, pid = next(iter(fleet.cluster.engines_of(host).items()))
        os.kill(pid, signal.SIGKILL)
        until(lambda: fleet.whole() and renewed(before, [name]), 180)

    return fault


def lose_expert_node(fleet: Fleet) -> None:
    """Kill all processes of host 1, and start the Ray node again."""
    before, lost = incarnations(BASE), list(fleet.cluster.engines_of(1))
    fleet.cluster.kill(1)
    fleet.cluster.start(1)
    until(lambda: fleet.whole() and renewed(before, lost), 240)


EXPERT_FAULTS: dict[str, Fault] = {
    "loss of the engine on the other node": lose_expert(1),
    "loss of the engine of the head": lose_expert(0),
    "loss of the second Ray node": lose_expert_node,
    "partition of 4 s": partition(4),
    "rolling restart with new settings": restart,
}
"""Faults of an expert-parallel group on both nodes."""
WIDE_SERVERS = {
    "TP 2 over both nodes": (SPLIT, SPLIT_FAULTS),
    "EP 2 over both nodes": (EXPERTS, EXPERT_FAULTS),
}
