"""``weft up --on ray`` on one Ray node: scaling, losses and restarts under requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.test_scale import ADMIN, Streams, decodes, groups, incarnations, stream, weft
from tests.cli.test_up import Clients, ask
from tests.support.slowness import deadline, until

ray = pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from tests.on_ray.cluster import RayNode, placement_groups, up  # noqa: E402

pytestmark = pytest.mark.slow

TOPOLOGY = """
model: spool-text
threads: 1
front: {port: 0, admin-key: [secret], drain-timeout: 60}
groups:
  - {role: prefill}
  - {role: decode}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[RayNode]:
    made = RayNode(cpus=5)
    try:
        yield made
    finally:
        made.close()


def engines_of(node: RayNode) -> dict[str, int]:
    """Return engine -> process id."""
    found = {}
    for pid, line in node.processes():
        if line.startswith("weft: head "):
            found[line.split()[2]] = pid
    return found


def test_nothing_is_lost_when_groups_scale_die_and_restart(node: RayNode, tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(TOPOLOGY)
    file.chmod(0o600)
    server = up(node, file, tmp_path / "first")
    again = None
    try:
        base = server.url()
        due, long_due = ask(base), stream(base)
        with Clients(base) as clients, Streams(base, 3) as streams:
            weft(base, "scale", "decode", "3")
            until(lambda: groups(base) == dict.fromkeys(("prefill0", *decodes(3)), "running"))
            os.kill(engines_of(node)["decode0"], signal.SIGKILL)
            until(lambda: groups(base).get("decode0") != "running")
            until(lambda: groups(base) == dict.fromkeys(("prefill0", *decodes(3)), "running"))
            actors = node.actors()
            os.kill(actors[0], signal.SIGKILL)  # of any group: Ray starts the actor again
            until(lambda: actors[0] not in node.actors() and len(node.actors()) == 4)
            until(lambda: set(groups(base).values()) == {"running"})
            weft(base, "scale", "decode", "1")
            until(lambda: sorted(groups(base)) == ["decode0", "prefill0"])
            old = incarnations(base)
            weft(base, "restart")
            until(lambda: all(now not in ("", old[name]) for name, now in incarnations(base).items()), 120)
        assert clients.errors == []
        assert set(clients.texts) == {due}
        assert set(streams.texts) == {long_due}

        before = engines_of(node)
        server.process.kill()  # the API server; the groups live on
        again = up(node, file, tmp_path / "again")
        assert ask(again.url()) == due
        assert engines_of(node) == before
    finally:
        server.close()
        if again is not None:
            again.close()
    ended = up(node, file, tmp_path / "stop", "--stop")
    assert ended.process.wait(deadline(90)) == 0, ended.log.read_text()
    ended.close()
    until(lambda: not engines_of(node) and not node.actors())


def test_a_group_that_dies_too_often_is_given_up_and_revived(node: RayNode, tmp_path: Path) -> None:
    """An engine that dies more often than `engine-restarts` allows is given up; `weft revive` tries again."""
    file = tmp_path / "poor.yaml"
    file.write_text(TOPOLOGY.replace("port: 0", "port: 0, engine-restarts: 1"))
    file.chmod(0o600)
    server = up(node, file, tmp_path / "first")
    try:
        base = server.url()
        due = ask(base)
        first = engines_of(node)["decode0"]
        os.kill(first, signal.SIGKILL)  # Ray starts the group once more
        until(lambda: engines_of(node).get("decode0", first) != first)
        os.kill(engines_of(node)["decode0"], signal.SIGKILL)  # and not again
        until(lambda: groups(base)["decode0"] == "retired", 90)
        until(lambda: httpx.get(f"{base}/health", timeout=deadline(30)).json()["status"] != "alive", 5)
        weft(base, "revive", "decode0")
        until(lambda: groups(base)["decode0"] == "running")
        assert ask(base) == due
        assert httpx.get(f"{base}/admin/groups", headers=ADMIN).status_code == 200
    finally:
        server.close()
    ended = up(node, file, tmp_path / "stop", "--stop")
    assert ended.process.wait(deadline(90)) == 0, ended.log.read_text()
    ended.close()


def test_orders_hold_after_the_same_command_and_the_loss_of_the_fleet_actor(
    node: RayNode, tmp_path: Path
) -> None:
    """Groups wait without a place, also over the loss of the fleet actor, and can be removed then."""
    file = tmp_path / "held.yaml"
    file.write_text(TOPOLOGY)
    file.chmod(0o600)
    server = up(node, file, tmp_path / "first")
    again = other = None
    try:
        base = server.url()
        due = ask(base)
        weft(base, "scale", "decode", "6")  # the cluster has 5 CPUs
        until(lambda: sorted(groups(base).values()) == ["running"] * 5 + ["waiting"] * 2)
        engines = engines_of(node)
        fleet = node.actors("FleetActor")
        os.kill(fleet[0], signal.SIGKILL)
        until(lambda: node.actors("FleetActor") not in ([], fleet))
        again = up(node, file, tmp_path / "again")
        assert ask(again.url()) == due
        assert sorted(groups(base)) == [*decodes(6), "prefill0"]  # the same file undoes no order
        assert engines_of(node) == engines
        until(lambda: httpx.get(f"{base}/ready", timeout=deadline(30)).status_code == 200)
        weft(base, "scale", "decode", "1")
        until(lambda: sorted(groups(base)) == ["decode0", "prefill0"])
        until(lambda: sorted(engines_of(node)) == ["decode0", "prefill0"])
        assert ask(base) == due

        twin = tmp_path / "twin" / "held.yaml"
        twin.parent.mkdir()
        twin.write_text(TOPOLOGY.replace("threads: 1", "threads: 1\nserved-model-name: [other]"))
        twin.chmod(0o600)
        other = up(node, twin, tmp_path / "other")
        assert other.process.wait(deadline(60)) == 2
        assert "give this server another name with --name" in other.log.read_text()
    finally:
        for one in (server, again, other):
            if one is not None:
                one.close()
    ended = up(node, file, tmp_path / "stop", "--stop")
    assert ended.process.wait(deadline(90)) == 0, ended.log.read_text()
    ended.close()
    until(lambda: not engines_of(node) and not node.actors() and not node.actors("FleetActor"))


WIDE = """
  - {role: unified, name: wide, hosts: 2, tp: 2}
"""


def test_a_stop_removes_placement_groups_and_api_servers_serve_the_next_start(
    node: RayNode, tmp_path: Path
) -> None:
    """A group on two hosts waits for a second node. The next fleet actor has another secret."""
    file = tmp_path / "wide.yaml"
    file.write_text(TOPOLOGY.rstrip() + WIDE)
    file.chmod(0o600)
    server = up(node, file, tmp_path / "first")
    again = None
    try:
        base = server.url()
        due = ask(base)
        until(lambda: [*placement_groups(node.address).values()] == ["PENDING"])
        for folder in ("stop", "last"):
            ended = up(node, file, tmp_path / folder, "--stop")
            assert ended.process.wait(deadline(90)) == 0, ended.log.read_text()
            ended.close()
            states = placement_groups(node.address)
            assert set(states.values()) == {"REMOVED"}, states
            if again is None:
                again = up(node, file, tmp_path / "again")
                assert ask(again.url()) == due
                until(lambda: groups(base).get("decode0") == "running")
                assert ask(base) == due
        assert len(states) == 2
    finally:
        for one in (server, again):
            if one is not None:
                one.close()


def test_without_a_cluster_the_message_says_what_to_start(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(TOPOLOGY)
    file.chmod(0o600)

    class Nowhere:
        address = "127.0.0.1:1"

    server = up(Nowhere(), file, tmp_path / "first")  # type: ignore[arg-type]
    try:
        assert server.process.wait(deadline(120)) == 1
        assert "ray start --head" in server.log.read_text()
    finally:
        server.close()
