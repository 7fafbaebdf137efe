"""Break a server of two Ray nodes under streams, and table the gaps:

    python -m tests.on_ray.drills --name ray-two-nodes

Each row is one fault. The server is whole again before the next fault. Needs root and network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench import record
from tests.cli.test_scale import groups, incarnations, weft
from tests.cli.test_serve import Server
from tests.on_ray.cluster import placement_groups
from tests.on_ray.streams import Clients
from tests.on_ray.two_nodes import TwoNodes
from tests.support.slowness import deadline, until

BASE = "http://127.0.0.1:8000"
FRONT = """threads: 1
kv-cache-memory: 32M
front: {port: 8000, admin-key: [secret], drain-timeout: 60, engine-restarts: 20}
"""
TEXT = f"""model: spool-text
{FRONT}groups:
  - {{role: prefill, ray-labels: host=0}}
  - {{role: decode, count: 2}}
"""
IMAGES = f"""model: spool-vision
mm-cache-bytes: 128K
{FRONT}groups:
  - {{role: encode, ray-labels: host=1}}
  - {{role: prefill, ray-labels: host=0}}
  - {{role: decode, ray-labels: host=1}}
"""
"""After the loss of host 1, two of three groups wait for the host."""


class Fleet:
    """A server on two Ray nodes. Use as a context."""

    def __init__(self, cluster: TwoNodes, topology: str, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.images, self.tokens = "encode" in topology, 120 if "hosts: 2" in topology else 600
        self.file = folder / "shop.yaml"
        self.write(topology)
        self._servers: list[Server] = []
        self._place = ("--on", "ray", "--ray-address", cluster.address)
        self.up()
        self.names = sorted(groups(BASE))

    def write(self, topology: str) -> None:
        self.file.write_text(topology)
        self.file.chmod(0o600)

    def up(self, *arguments: str, wait: bool = True) -> Server:
        """Start an API server, and ``wait`` until the API server is ready."""
        folder = self.folder / f"front{len(self._servers)}"
        folder.mkdir()
        server = Server(folder, str(self.file), *self._place, *arguments, command="up")
        self._servers.append(server)
        if wait:
            server.url()
        return server

    def kill_front(self) -> None:
        """SIGKILL the present API server."""
        self._servers[-1].process.kill()

    def whole(self, names: Collection[str] = ()) -> bool:
        """Return True if exactly the groups ``names`` run; by default the groups of the start."""
        return groups(BASE) == dict.fromkeys(names or self.names, "running") and not self.missing

    @property
    def missing(self) -> bool:
        """True if an engine is missing, as seen by the API server."""
        return httpx.get(f"{BASE}/health", timeout=deadline(30)).json() != {"status": "alive"}

    def ranks(self) -> dict[int, int]:
        """Return process id -> host of all engines and other ranks."""
        return {
            pid: number
            for number in range(2)
            for pid, line in self.cluster.processes(number).items()
            if line.startswith(("weft: head ", "weft: worker "))
        }

    def close(self) -> None:
        for server in self._servers:
            server.close()
        ended = Server(self.folder, str(self.file), *self._place, "--stop", command="up")
        status = ended.process.wait(deadline(120))
        log = ended.log.read_text()
        ended.close()
        assert status == 0, log
        states = placement_groups(self.cluster.address)
        assert set(states.values()) <= {"REMOVED"}, states
        assert states or "hosts: 2" not in self.file.read_text()


class Outcome(NamedTuple):
    """The result of one drill."""

    clients: Clients
    begun: float
    """Time at which the fault began."""
    seconds: float
    """Time until the fleet was whole again."""

    @property
    def hit(self) -> list[float]:
        """The longest gap of each stream that was open at the fault, in seconds."""
        return [one.gap for one in self.clients.streams if one.sent <= self.begun <= one.arrivals[-1]]

    def check(self) -> None:
        """Assert that no request was lost or changed."""
        assert self.clients.lost == []
        assert self.clients.different == 0
        assert len(self.clients.streams) >= 3
        assert self.hit, "no stream was open at the fault"


Fault = Callable[[Fleet], None]
"""Break the fleet, and return when the fleet is whole again."""


def run(fleet: Fleet, fault: Fault, clients: Clients) -> Outcome:
    """Run a fault under streams."""
    with clients:
        until(lambda: len(clients.streams) >= 3)
        until(lambda: min(clients.events.values()) >= 20, every=0.01)  # all streams are under way
        begun = time.monotonic()
        fault(fleet)
        seconds = time.monotonic() - begun
        ends = len(clients.streams)
        until(lambda: len(clients.streams) >= ends + 3 or clients.lost)
    return Outcome(clients, begun, seconds)


# -- faults


def lose_node(silent: float = 0.0) -> Fault:
    """Return a fault that kills all processes of host 1 (raylet, actors, engines), and starts the Ray node
    again. ``silent``: seconds in which the host sends no packet, not even about closed connections.
    """

    def fault(fleet: Fleet) -> None:
        lost = balance(fleet)
        before = incarnations(BASE)
        if silent:
            with fleet.cluster.cut():
                fleet.cluster.kill(1)
                time.sleep(silent)
        else:
            fleet.cluster.kill(1)
        fleet.cluster.start(1)
        until(lambda: fleet.whole() and renewed(before, lost), 180)

    return fault


def balance(fleet: Fleet) -> list[str]:
    """Return the groups of host 1. Without one, replace the newest decode group until Ray chooses host 1."""
    while not (found := [name for name, host in fleet.cluster.placed().items() if host == 1]):
        weft(BASE, "scale", "decode", "1", "--wait", "60")
        weft(BASE, "scale", "decode", "2", "--wait", "60")
    until(fleet.whole)
    return found


def lose_actor(fleet: Fleet) -> None:
    """Kill a group actor of host 1: the kernel kills the group with the actor."""
    balance(fleet)
    _kill(fleet, fleet.cluster.actors(1)[0])


def lose_fleet_actor(fleet: Fleet) -> None:
    """Kill the fleet actor."""
    found = [pid for number in range(2) for pid in fleet.cluster.actors(number, "FleetActor")]
    os.kill(found[0], signal.SIGKILL)
    until(lambda: [pid for n in range(2) for pid in fleet.cluster.actors(n, "FleetActor")] not in ([], found))
    until(fleet.whole, 120)


def lose_engine(role: str) -> Fault:
    """Return a fault that kills the first engine of ``role``."""

    def fault(fleet: Fleet) -> None:
        engines = fleet.cluster.engines()
        _kill(fleet, next(pid for name, (_, pid) in sorted(engines.items()) if name.startswith(role)))

    return fault


def _kill(fleet: Fleet, pid: int) -> None:
    """Kill a process with the engine or the actor of one group, and wait for another process of the group."""
    before = incarnations(BASE)
    os.kill(pid, signal.SIGKILL)
    until(lambda: fleet.whole() and renewed(before), 120)


def renewed(before: dict[str, str], names: Collection[str] = ()) -> bool:
    """Return True if all engines of ``names``, by default any engine, are other processes than ``before``."""
    now = incarnations(BASE)
    new = {name for name in before if now.get(name, "") not in ("", before[name])}
    return new >= set(names) if names else bool(new)


def lose_front(fleet: Fleet) -> None:
    """Kill the API server, and start the same command again. No group starts again."""
    engines = fleet.cluster.engines()
    fleet.kill_front()
    fleet.up()
    until(fleet.whole)
    assert fleet.cluster.engines() == engines


def partition(seconds: float) -> Fault:
    """Return a fault that cuts the cable between the hosts. No process may end."""

    def fault(fleet: Fleet) -> None:
        engines = fleet.cluster.engines()
        with fleet.cluster.cut():
            time.sleep(seconds)
        until(fleet.whole, 90)
        assert fleet.cluster.engines() == engines

    return fault


def long_partition(fleet: Fleet) -> None:
    """Cut the cable until Ray has given host 1 up and started its groups on host 0. When the cable is back,
    the processes of host 1 end: the raylet learns that the cluster has given the node up."""
    lost = balance(fleet)
    with fleet.cluster.cut():
        until(lambda: set(lost) <= fleet.cluster.engines_of(0).keys(), 180, every=0.5)
    until(lambda: not fleet.cluster.engines_of(1), 180, every=0.5)
    fleet.cluster.kill(1)
    fleet.cluster.start(1)
    until(fleet.whole, 120)


def scale(fleet: Fleet) -> None:
    """Scale the decode groups to 1, to 3, and to 2 again."""
    for count in (1, 3, 2):
        weft(BASE, "scale", "decode", str(count))
        decodes = [f"decode{number}" for number in range(count)]
        until(lambda wanted=decodes: fleet.whole(["prefill0", *wanted]), 120)


def scale_to_zero(fleet: Fleet) -> None:
    """Scale the decode groups to 0 and to 2: requests wait meanwhile. An API server that starts meanwhile
    serves when the groups are back."""
    weft(BASE, "scale", "decode", "0")
    until(lambda: groups(BASE) == {"prefill0": "running"}, 120)
    second = fleet.up("--port", "8001", wait=False)
    assert httpx.get(f"{BASE}/ready", timeout=deadline(30)).status_code == 200
    assert not fleet.missing
    weft(BASE, "scale", "decode", "2")
    until(fleet.whole, 120)
    assert second.url()
    second.process.kill()


def lose_node_while_scaling(fleet: Fleet) -> None:
    """Lose host 1 while a decode group starts there, or has just been ordered."""
    weft(BASE, "scale", "decode", "4")
    fleet.cluster.kill(1)
    fleet.cluster.start(1)
    until(lambda: fleet.whole(["prefill0", *(f"decode{n}" for n in range(4))]), 180)
    weft(BASE, "scale", "decode", "2")
    until(fleet.whole, 120)


def free_blocks() -> dict[str, float]:
    """Return engine -> free blocks of its KV cache."""
    text = httpx.get(f"{BASE}/metrics", timeout=deadline(30)).text
    found = re.findall(r'^weft:free_blocks\{.*head="([a-z0-9]+)".*\} (\S+)$', text, re.M)
    return {name: float(value) for name, value in found if not name.startswith("encode")}


def restart(fleet: Fleet, strike: Fault | None = None) -> None:
    """Restart all groups in turn, with a changed file: a second API server brings the file. ``strike``: fault
    after the first group."""
    text, blocks = fleet.file.read_text(), free_blocks()
    fleet.write(re.sub(r"(kv-cache-memory: )(\d+)", lambda found: f"{found[1]}{2 * int(found[2])}", text))
    second = fleet.up("--port", "8001")
    before = incarnations(BASE)
    weft(BASE, "restart")
    if strike is not None:
        until(lambda: renewed(before))
        strike(fleet)
    until(lambda: fleet.whole() and renewed(before, fleet.names), 180)
    # Streams have few blocks, so twice the cache has more free blocks.
    until(lambda: all(free_blocks().get(name, 0) > 1.5 * count for name, count in blocks.items()))
    second.process.kill()


TEXT_FAULTS: dict[str, Fault] = {
    "partition of 4 s": partition(4),
    "partition of 14 s": partition(14),
    "loss of a decode engine": lose_engine("decode"),
    "loss of the prefill engine": lose_engine("prefill"),
    "loss of a group actor": lose_actor,
    "loss of the fleet actor": lose_fleet_actor,
    "loss of the API server": lose_front,
    "loss of a Ray node": lose_node(),
    "decode groups: 2, 1, 3, 2": scale,
    "loss of a host without a packet": lose_node(20),
    "partition until Ray gives the node up": long_partition,
    "decode groups: 2, 0, 2": scale_to_zero,
    "loss of a Ray node while groups start": lose_node_while_scaling,
    "rolling restart with new settings": restart,
    "loss of the fleet actor in a rolling restart": lambda fleet: restart(fleet, lose_fleet_actor),
}
"""Name of the row -> fault, on one prefill and two decode groups."""
IMAGE_FAULTS: dict[str, Fault] = {
    "partition of 4 s": partition(4),
    "partition of 14 s": partition(14),
    "loss of the encode engine": lose_engine("encode"),
    "loss of the decode engine": lose_engine("decode"),
    "loss of a group actor": lose_actor,
    "loss of the API server": lose_front,
    "loss of a Ray node": lose_node(),
    "loss of a host without a packet": lose_node(20),
    "rolling restart with new settings": restart,
}
"""The same, on one encode, one prefill and one decode group."""


def row(server: str, name: str, outcome: Outcome) -> dict[str, Any]:
    """Return the row of a drill."""
    streams, hit = outcome.clients.streams, outcome.hit
    return {
        "groups": server,
        "fault": name,
        "streams": len(streams),
        "lost": len(outcome.clients.lost),
        "other tokens": outcome.clients.different,
        "sent again": sum(one.tries > 1 for one in streams),
        "open at the fault": len(hit),
        "their gap, median s": round(statistics.median(hit), 2) if hit else None,
        "longest gap of all s": round(max(one.gap for one in streams), 2),
        "longest wait for the first token s": round(max(one.wait for one in streams), 2),
        "whole after s": round(outcome.seconds, 1),
    }


def gaps(outcome: Outcome) -> list[float]:
    """Return the gap of each stream, in the order of the ends."""
    return [round(one.gap, 3) for one in outcome.clients.streams]


def main() -> None:
    from tests.on_ray.wide_drills import WIDE_SERVERS

    servers = {"1P2D": (TEXT, TEXT_FAULTS), "1E1P1D": (IMAGES, IMAGE_FAULTS), **WIDE_SERVERS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", default=",".join(servers), help="of " + ", ".join(servers))
    parser.add_argument("--only", default="", help="parts of the names of faults, with commas")
    parser.add_argument("--name", help="of the result in bench/results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    all_gaps: dict[str, list[float]] = {}
    cluster = TwoNodes()
    try:
        for server in args.servers.split(","):
            topology, faults = servers[server]
            with tempfile.TemporaryDirectory() as folder:
                fleet = Fleet(cluster, topology, Path(folder))
                clients = Clients(BASE, tokens=fleet.tokens, images=fleet.images)
                for name, fault in faults.items():
                    if not any(part in name for part in args.only.split(",")):
                        continue
                    outcome = run(fleet, fault, clients)
                    if outcome.clients.lost:
                        print(*outcome.clients.lost, flush=True)
                    rows.append(row(server, name, outcome))
                    all_gaps[f"{server}, {name}"] = gaps(outcome)
                    print(rows[-1], flush=True)
                fleet.close()
    finally:
        cluster.close()
    print(record.markdown(rows))
    if args.name:
        path = record.ROOT / "bench" / "results" / f"{args.name}.json"
        # A run of some drills replaces the rows of these drills.
        kept = json.loads(path.read_text()) if path.exists() else {"rows": [], "gaps": {}}
        made = {(one["groups"], one["fault"]): one for one in [*kept["rows"], *rows]}
        all_gaps = kept.get("gaps", {}) | all_gaps
        order = [(server, name) for server, (_, faults) in servers.items() for name in faults]
        rows = [made[key] for key in order if key in made]
        table = record.markdown(rows)
        title = "Streams of a server on two Ray nodes, under faults"
        record.write(path, "tests.on_ray.drills", title, table, {"rows": rows, "gaps": all_gaps})


if __name__ == "__main__":
    main()
