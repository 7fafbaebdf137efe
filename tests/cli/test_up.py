"""``weft up``: the topologies in ``examples/``, checked, and started as processes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml

from tests.cli.test_cli import run
from tests.cli.test_serve import Server, start, until
from tests.support import processes as support
from tests.support.processes import is_alive, with_role
from tests.support.secret import write_secret
from tests.support.slowness import deadline
from weft.config.alone import group_alone
from weft.config.topology import read_topology

__all__ = ["start", "until"]

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "Tom has 12 apples and buys 7 more. How many apples does he have?"


def ask(base: str, tokens: int = 24) -> str:
    """The completion of one request at temperature 0."""
    body = {
        "model": "spool-text",
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{base}/v1/completions", json=body, timeout=deadline(120), verify=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    assert text  # empty texts would be equal whatever happens
    return text


class Clients:
    """Threads that send requests repeatedly and record the answers.

    Each thread pauses between requests for longer than an answer takes, so that starting processes get CPU
    time.
    """

    ends_s = 120.0
    """Within which threads end, of a fast machine."""

    def __init__(self, base: str, count: int = 3) -> None:
        self._base = base
        self._over = threading.Event()
        self.texts: list[str] = []
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(deadline(self.ends_s))

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.texts.append(ask(self._base))
            except BaseException as error:
                self.errors.append(error)
                return
            self._over.wait(0.5)


def titles(server: Server) -> list[str]:
    engines = with_role(server.process.pid, "head")
    return sorted(Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[0] for pid in engines)


def engines(server: Server) -> list[int]:
    """Return the process ids of engines and their workers."""
    children = support.children(server.process.pid)
    return [pid for pid, role in children.items() if role.split()[0] in ("head", "rank")]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_are_right(file: Path, tmp_path: Path) -> None:
    loaded = yaml.safe_load(file.read_text())
    encode = any(entry["role"] == "encode" for entry in loaded["groups"])
    if any("hosts" in entry for entry in loaded["groups"]):
        refused = run("up", str(file), "--check", cwd=tmp_path)
        assert "run `weft engine FILE --group NAME` on each host of the group" in refused.stderr
        for group in read_topology(file).groups:
            share = group_alone(read_topology(file), group.name, "10.0.0.1", index=1)
            assert share.host.ranks * share.parallel.hosts == share.parallel.layout.ranks
        return
    if "group-secret" in loaded:  # of the folder in which the command runs
        refused = run("up", str(file), "--check", cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "--group-secret weft.secret: the file can't be read" in refused.stderr
        write_secret(tmp_path).rename(tmp_path / loaded["group-secret"])
    made = run("up", str(file), "--check", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    first, *groups = made.stdout.splitlines()
    name = "spool-vision" if encode else "spool-text"
    assert first.startswith(f"{name} (float32, cpu) on 127.0.0.1:8000: 1 front, ")
    expected = []
    for entry in loaded["groups"]:
        before = sum(one.startswith(entry["role"]) for one in expected)
        expected += [f"{entry['role']}{before + number}" for number in range(entry.get("count", 1))]
    assert [line.split()[0] for line in groups] == expected
    assert (" tp 2" in made.stdout) == (file.stem == "tp2-prefill")
    assert made.stdout.count("; encodes images") == sum(one.startswith("encode") for one in expected)
    takes = [line.split()[0] for line in groups if "images from encode groups" in line]
    assert takes == [one for one in expected if encode and one.startswith(("prefill", "unified"))]
    assert ("its own tower" in made.stdout) == (file.stem == "cpu-encode")


def test_invalid_topologies_start_no_process(tmp_path: Path) -> None:
    file = tmp_path / "half.yaml"
    file.write_text("groups: [{role: decode}]")
    for arguments, message in (
        (["up", str(file)], "the groups cannot serve requests"),
        (["up", str(tmp_path / "none.yaml")], "none.yaml: "),
        (["serve", "--role", "prefill"], "--role prefill applies to a single group"),
        (["serve", "--decode", "2"], "--decode 2 requires --prefill"),
        (
            ["serve", "spool-text", "--encode", "1"],
            "group encode0: --role encode: Qwen3MoeForCausalLM has no vision tower",
        ),
    ):
        made = run(*arguments)
        assert made.returncode == 2
        assert message in made.stderr
        assert (made.stderr.count("\n"), made.stdout) == (1, "")


def test_two_groups_behind_one_front(start: Any) -> None:
    """A group dies under requests without an effect on clients; the shutdown leaves nothing behind."""
    server = start(str(EXAMPLES / "unified-x2.yaml"), "--port", "0", command="up")
    base = server.url()
    due = ask(base)
    engines = with_role(server.process.pid, "head")
    if any(title.startswith("weft: ") for title in titles(server)):
        assert titles(server) == ["weft: head unified0 (spool-text)", "weft: head unified1 (spool-text)"]
    with Clients(base) as clients:
        until(server, lambda: len(clients.texts) > 3)
        os.kill(engines[0], signal.SIGKILL)
        until(server, lambda: " is back" in server.log.read_text())
    assert not clients.errors
    assert set(clients.texts) == {due}
    log = server.log.read_text()
    for name in ("unified0", "unified1"):
        assert f" I {name} weft.engine.server.engine_server: engine ready" in log
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(deadline(60)) == 0, server.log.read_text()
    assert not any(is_alive(pid) for pid in engines)
    assert os.listdir(server.temporary) == []


@pytest.mark.parametrize(
    ("fronts", "ranks"),
    [
        pytest.param(1, (2, 1), marks=pytest.mark.slow),
        pytest.param(1, (2, 2), marks=pytest.mark.grid),
        pytest.param(2, (1, 1), marks=pytest.mark.grid),
    ],
    ids=["a worker", "workers", "two fronts"],
)
@pytest.mark.real_processes  # a copied engine starts before its predecessor's worker has ended
def test_a_rolling_restart_loses_no_request(
    fronts: int, ranks: tuple[int, int], start: Any, tmp_path: Path
) -> None:
    file = tmp_path / "topology.yaml"
    groups = ", ".join(f"{{tp: {count}, max-num-seqs: 4}}" for count in ranks)
    file.write_text(f"model: spool-text\ngroups: [{groups}]")
    server = start(str(file), "--port", "0", "--fronts", str(fronts), command="up")
    base = server.url()
    due = ask(base)
    before = engines(server)
    assert len(before) == sum(ranks)
    with Clients(base) as clients:
        until(server, lambda: len(clients.texts) > 3)
        server.process.send_signal(signal.SIGUSR1)
        until(server, lambda: "unified1 is restarted" in server.log.read_text())
    assert not clients.errors
    assert set(clients.texts) == {due}
    assert len(set(engines(server)) - set(before)) == sum(ranks)
    until(server, lambda: not any(is_alive(pid) for pid in before))
    log = server.log.read_text()
    assert log.index("unified0 is restarted") < log.index("unified1 is restarted")
    assert "(restart " not in log
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(deadline(60)) == 0, server.log.read_text()
    assert os.listdir(server.temporary) == []


def test_a_group_that_is_given_up_leaves_the_others(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text("model: spool-text\nfront: {engine-restarts: 0}\ngroups: [{name: a}, {name: b}]")
    server = start(str(file), "--port", "0", command="up")
    base = server.url()
    due = ask(base)
    for left, pid in enumerate(reversed(with_role(server.process.pid, "head"))):
        os.kill(pid, signal.SIGKILL)
        until(server, lambda: "is lost" in server.log.read_text())
        if not left:
            assert ask(base) == due
    assert server.process.wait(deadline(60)) == 1, server.log.read_text()
    assert os.listdir(server.temporary) == []
