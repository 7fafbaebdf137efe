"""Routes and commands that change the groups of a running server, over scripted engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.front.fake_server import engine_config
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest
from weft.control.processes.table import Member
from weft.engine.server.engine_processes import EngineGroups

ADMIN = {"authorization": "Bearer admin"}


def post(server: Any, path: str, **body: Any) -> httpx.Response:
    """Send a request of the admin key over a new connection, which any API server may get."""
    with httpx.Client(base_url=server.url, timeout=server.http.timeout) as client:
        return client.post(f"/admin/{path}", json=body, headers=ADMIN)


def states(server: Any) -> dict[str, str]:
    """Return name -> state of all engines, "down" for an engine that does not answer."""
    answer = server.http.get("/admin/groups", headers=ADMIN).json()
    return {one["name"]: one["state"] if one["alive"] else "down" for one in answer["engines"]}


def message(answer: httpx.Response) -> str:
    text: str = answer.json()["error"]["message"]
    return text


def weft(server: Any, *arguments: str, status: int = 0) -> str:
    """Run a ``weft`` command for the operator, and return its output."""
    command = [sys.executable, "-m", "weft", *arguments, "--url", server.url, "--admin-key", "admin"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60))
    assert ran.returncode == status, (ran.stdout, ran.stderr)
    return ran.stdout + ran.stderr


@mostly_slow("fronts", [1, 2], [2])
def test_a_refusal_reaches_the_operator_whichever_api_server_answers(start_fake: Any, fronts: int) -> None:
    server = start_fake(fronts=fronts, engines=2, most_engines=3, admin_key=["admin"])
    for path, body, status, says in (
        ("scale", {"base": "unified", "groups": 5}, 503, "3 more groups need 3 free GPUs"),
        ("scale", {"base": "decode", "groups": 2}, 404, "the names are unified"),
        ("scale", {"base": "unified", "groups": 0}, 400, "without a unified group"),
        ("drain", {"group": "unified7"}, 404, "the groups are unified0, unified1"),
        ("restart", {"group": "unified7"}, 404, "the groups are unified0, unified1"),
        ("restart", {"topology": "#" * 50_000}, 400, "topology has more than 49152 bytes"),
        ("revive", {"group": "unified0"}, 400, "no engine of 'unified0' is retired"),
    ):
        for _ in range(4):  # any API server may answer
            answer = post(server, path, **body)
            assert (answer.status_code, says in message(answer)) == (status, True), (path, body, answer.text)
    assert states(server) == {"unified0": "running", "unified1": "running"}
    # The answer comes after the supervisor has acted: every API server knows the change at once.
    answer = post(server, "scale", base="unified", groups=3)
    assert answer.json() == {
        "status": "starting unified2",
        "starting": ["unified2"],
        "leaving": [],
        "returning": [],
    }
    for _ in range(4):
        assert post(server, "scale", base="unified", groups=3).json()["starting"] == []
    assert post(server, "drain", group="unified2").json() == {
        "status": "draining unified2",
        "engines": ["unified2"],
    }
    assert "leaves the server already" in message(post(server, "drain", group="unified2"))


def test_a_group_that_drains_is_taken_back(start_fake: Any, script: Any) -> None:
    """A drain that waits for a request ends with a scale-up: the same process takes requests again."""
    server = start_fake(engines=2, most_engines=2, admin_key=["admin"])
    fields = {"prompt": "abc", "seed": script.HANG_AFTER, "max_tokens": 9}
    with server.stream("/v1/completions", **fields), server.stream("/v1/completions", **fields):
        server.wait(lambda: server.metric("num_requests_running") == 2, 20)
        weft(server, "scale", "unified", "1")
        server.wait(lambda: states(server)["unified1"] == "leaving", 20)
        assert "taking back unified1" in weft(server, "scale", "unified", "2", "--wait", "60")
        assert states(server) == {"unified0": "running", "unified1": "running"}


@pytest.mark.slow
def test_commands_wait_for_the_end_of_the_change(start_fake: Any, script: Any) -> None:
    server = start_fake(engines=2, most_engines=3, admin_key=["admin"], drain_timeout=300.0)
    weft(server, "scale", "unified", "3", "--wait", "60")
    assert states(server) == dict.fromkeys(("unified0", "unified1", "unified2"), "running")
    before = server.http.get("/admin/groups", headers=ADMIN).json()["engines"]
    weft(server, "restart", "unified1", "--wait", "60")
    after = server.http.get("/admin/groups", headers=ADMIN).json()["engines"]
    assert [one["starts"] for one in after] == [1, 2, 1]
    changed = [one["incarnation"] != old["incarnation"] for one, old in zip(after, before, strict=True)]
    assert changed == [False, True, False]
    weft(server, "drain", "unified2", "--wait", "60")
    assert list(states(server)) == ["unified0", "unified1"]
    fields = {"prompt": "abc", "seed": script.HANG_AFTER, "max_tokens": 9}
    with server.stream("/v1/completions", **fields), server.stream("/v1/completions", **fields):
        server.wait(lambda: server.metric("num_requests_running") == 2, 20)
        said = weft(server, "drain", "unified1", "--wait", "1", status=1)
        assert "the change is not complete after 1 seconds: unified1 leaving" in said


@pytest.mark.slow
def test_a_restart_that_fails_is_reported(start_fake: Any, tmp_path: Any) -> None:
    """The next process of the engine does not come up."""
    loaded = tmp_path / "loaded"
    loaded.touch()
    server = start_fake(engines=2, most_engines=2, admin_key=["admin"], restarts=1, loaded=[str(loaded)])
    loaded.unlink()
    assert "--file absent" in weft(server, "restart", "--file", "absent", status=2)
    said = weft(server, "restart", "unified1", "--wait", "3", status=1)
    assert "the change is not complete after 3 seconds: unified1" in said
    loaded.touch()


def test_the_whole_server_drains_and_the_command_waits(start_fake: Any) -> None:
    server = start_fake(admin_key=["admin"])
    assert "draining" in weft(server, "drain", "--all", "--wait", "60")
    assert server.process.wait(deadline(20)) == 0


def test_the_room_for_requests_follows_the_groups(start_fake: Any, script: Any) -> None:
    """Each engine has two places. A group that leaves takes its places along."""
    server = start_fake(engines=2, most_engines=2, admin_key=["admin"], max_num_seqs=1, max_queued_requests=1)
    fields = {"prompt": "abc", "seed": script.HANG_AFTER, "max_tokens": 9}
    with (
        server.stream("/v1/completions", **fields),
        server.stream("/v1/completions", **fields),
        server.stream("/v1/completions", **fields) as third,
    ):
        assert third.status_code == 200
        weft(server, "scale", "unified", "1")
        server.wait(lambda: states(server)["unified1"] == "leaving", 20)
        server.wait(lambda: server.complete("abc", max_tokens=1).status_code == 429, 20)
        weft(server, "scale", "unified", "2")
        server.wait(lambda: server.complete("abc", max_tokens=1).status_code == 200, 20)


@pytest.mark.parametrize("origin", ["https://example.org", "null", "http://"])
def test_pages_of_other_origins_are_refused(start_fake: Any, origin: str) -> None:
    server = start_fake(admin_key=["admin"])
    own = server.url.rstrip("/")
    assert server.http.get("/admin/groups", headers={**ADMIN, "origin": own}).status_code == 200
    answer = server.http.get("/admin/groups", headers={**ADMIN, "origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


def test_the_settings_of_a_group_outlive_the_group(tmp_path: Path) -> None:
    """A name that was scaled to zero starts again with the settings of its last group."""
    config = msgspec.structs.replace(engine_config(tmp_path, {"max_num_seqs": 7}), group="big", base="big")
    groups = EngineGroups([config], tmp_path, "info")
    groups.forget("big")
    assert groups.members == {}
    groups.add(["big0"], "big")
    assert groups.members == {"big0": Member(group="big0", base="big")}
    assert [one.config.scheduler.max_num_seqs for one in groups._groups] == [7]
    assert groups.close(0.0) == []


def test_a_failure_inside_a_library_refuses_new_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(engine_config(tmp_path, {}), group="big0", base="big")
    groups = EngineGroups([config], tmp_path, "info")
    monkeypatch.setattr("weft.engine.server.engine_processes.renewed", lambda *_: {}["weights"])
    with pytest.raises(InvalidRequest, match=r"cannot be resolved \(KeyError\)"):
        groups.prepare("groups: [{name: big}]", ["big0"])
    groups.close(0.0)


def test_each_replica_has_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that does not come up gets its former settings again; the other one keeps the new ones."""
    config = engine_config(tmp_path, {"max_num_seqs": 7})
    two = msgspec.structs.replace(config.parallel, data_parallel_size=2)
    config = msgspec.structs.replace(config, group="big0", base="big", parallel=two)
    latest = msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, max_num_seqs=5)
    )
    monkeypatch.setattr("weft.engine.server.engine_processes.renewed", lambda *_: {"big0": latest})
    groups = EngineGroups([config], tmp_path, "info")
    groups.prepare("", ["big0.0", "big0.1"])

    def slots() -> list[int]:
        local = groups._groups[0]._local
        return [local._of(replica).scheduler.max_num_seqs for replica in (0, 1)]

    groups.use(["big0.0"], True)
    assert slots() == [5, 7]
    groups.use(["big0.1"], True)
    groups.use(["big0.1"], False)
    assert slots() == [5, 7]
    groups.close(0.0)
