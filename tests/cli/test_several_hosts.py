"""One group on two hosts: ``weft engine``, and ``weft engine --join``. Both hosts are this machine."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from tests.cli.test_engine_front import Fleet, get
from tests.cli.test_scale import load
from tests.cli.test_serve import Server
from tests.cli.test_up import ask
from tests.support.processes import is_alive, with_role
from tests.support.secret import write_secret
from tests.support.slowness import deadline, until
from weft.cli.serve.serve import serve
from weft.cli.serve.several_hosts import HostPlace
from weft.cli.serve.up import up
from weft.common.errors import ConfigError
from weft.config.sections.all import ParallelSection

TOPOLOGY = """
model: spool-text
threads: 1
dtype: float64
rank-timeout: 4
kv-cache-memory: 32M
group-secret: {secret}
front: {{port: 0, admin-key: [secret]}}
groups:
  - {{name: wide, tp: 2, hosts: 2}}
  - {{name: near}}
  - {{name: experts, dp: 2, ep: true, hosts: 2}}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    made.file.write_text(TOPOLOGY.format(secret=write_secret(tmp_path)))
    try:
        yield made
    finally:
        made.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def head_of(fleet: Fleet, port: int, *more: str) -> Server:
    return fleet.engine("wide", "--advertise", "127.0.0.1", "--join-port", str(port), *more)


def leader_of(fleet: Fleet, port: int) -> Server:
    """Start the head with the words of all hosts, as the LeaderWorkerSet does."""
    words = "--advertise", "127.0.0.1", "--join", f"127.0.0.1:{port}", "--host-index", "0"
    return fleet.engine("wide", *words)


def host_of(fleet: Fleet, port: int, *more: str) -> Server:
    return fleet.engine("wide", "--join", f"127.0.0.1:{port}", "--host-index", "1", *more)


def stream(base: str, tokens: int = 150) -> str:
    """Return the text of a request that takes some seconds."""
    fields = {"model": "spool-text", "prompt": "Ann buys 7", "temperature": 0, "max_tokens": tokens}
    answer = httpx.post(f"{base}/v1/completions", json={**fields, "ignore_eos": True}, timeout=deadline(120))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def ranks(server: Server) -> list[int]:
    return with_role(server.process.pid, "rank")


@pytest.mark.slow
def test_a_group_on_two_hosts_and_the_loss_of_either(fleet: Fleet) -> None:
    """A stream survives the head's command, whose successor takes the rank over, and the host's command."""
    port, health = free_port(), free_port()
    host = host_of(fleet, port, "--port", str(health))
    head = head_of(fleet, port)
    base = fleet.run("front").url()
    due, long_due = ask(base), stream(base)
    until(lambda: get(f"http://127.0.0.1:{health}/ready")[0] == 200)
    (kept,), first = ranks(host), head
    for victim in (first, host):
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(stream, base)
            until(lambda: load(base, "wide") > 0)
            victim.process.kill()
            if victim is first:
                victim.process.wait()
                head = leader_of(fleet, port)
            else:
                host = host_of(fleet, port)
            assert long.result(deadline(120)) == long_due
        assert ask(base) == due
        assert ranks(host) == [kept] if victim is first else not is_alive(kept)
    assert ask(base) == due
    head.process.send_signal(signal.SIGTERM)
    assert head.process.wait(deadline(60)) == 0
    until(lambda: ranks(host) == [])  # ended in order, and waits for the next head
    assert host.process.poll() is None
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(deadline(30)) == 0
    assert os.listdir(host.temporary) == []


@pytest.mark.slow
def test_a_host_that_gets_a_signal_drains_the_group(fleet: Fleet) -> None:
    """The stream ends with its text. Then the host ends with 0, and the head with 1, to be started again."""
    port = free_port()
    host, head = host_of(fleet, port), head_of(fleet, port)
    base = fleet.run("front").url()
    due = stream(base)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(stream, base)
        until(lambda: load(base, "wide") > 0)
        host.process.send_signal(signal.SIGTERM)
        assert long.result(deadline(120)) == due
    assert host.process.wait(deadline(60)) == 0, host.log.read_text()
    assert head.process.wait(deadline(60)) == 1, head.log.read_text()
    host, head = host_of(fleet, port), head_of(fleet, port)
    assert stream(base) == due
    for one in (head, host):  # both at once: the whole group ends
        one.process.send_signal(signal.SIGTERM)
    assert [one.process.wait(deadline(60)) for one in (head, host)] == [0, 0]


@pytest.mark.slow
def test_the_hosts_of_an_expert_parallel_group_drain_together(fleet: Fleet) -> None:
    """The idle host waits, because its experts are needed for the stream of the other host."""
    port = free_port()
    head = fleet.engine("experts", "--advertise", "127.0.0.1", "--join-port", str(port))
    host = fleet.engine("experts", "--join", f"127.0.0.1:{port}", "--host-index", "1")
    base = fleet.run("front").url()
    due = stream(base, 500)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(stream, base, 500)
        until(lambda: any(load(base, name) for name in fleet.directory.read()))
        for one in (head, host):
            one.process.send_signal(signal.SIGTERM)
        assert long.result(deadline(120)) == due
    assert [one.process.wait(deadline(60)) for one in (head, host)] == [0, 0]
    for one in (head, host):
        assert "forms again" not in one.log.read_text()


@pytest.mark.slow
def test_a_host_waits_and_answers_probes(fleet: Fleet) -> None:
    port, mine = free_port(), [free_port(), free_port()]
    head, host = head_of(fleet, port, "--port", str(mine[0])), None
    until(lambda: _answers(mine[0]))
    status, said = get(f"http://127.0.0.1:{mine[0]}/ready")
    assert (status, said) == (503, {"status": "waiting for hosts", "engines": {}})
    host = host_of(fleet, free_port(), "--port", str(mine[1]))  # a wrong port
    until(lambda: _answers(mine[1]))
    assert get(f"http://127.0.0.1:{mine[1]}/live")[0] == 200
    assert get(f"http://127.0.0.1:{mine[1]}/ready")[0] == 503
    until(lambda: "the head does not answer" in host.log.read_text())
    for one in (head, host):
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(deadline(30)) == 0, one.log.read_text()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/live").status_code == 200
    except httpx.TransportError:
        return False


WIDE = ParallelSection(tensor_parallel_size=2, hosts=2, group_secret="x")


@pytest.mark.parametrize(
    ("parallel", "place", "says"),
    [
        (ParallelSection(), HostPlace(join="a:1"), "--join: the group runs on one host"),
        (ParallelSection(), HostPlace(1), "--host-index: the group runs on one host"),
        (ParallelSection(), HostPlace(port=5), "--join-port: the group runs on one host"),
        (WIDE, HostPlace(), "the first host needs --advertise ADDRESS and --join-port PORT"),
        (WIDE, HostPlace(port=5000), "the first host needs --advertise ADDRESS and --join-port PORT"),
        (WIDE, HostPlace(0, "a:1"), "the first host needs --advertise ADDRESS and --join-port PORT"),
        (WIDE, HostPlace(1), "--join must be HOST:PORT"),
        (WIDE, HostPlace(2, "a:1"), "--host-index 2 must be at most 1"),
        (WIDE, HostPlace(1, "nowhere"), "--join must be HOST:PORT"),
        (WIDE, HostPlace(1, "a:0"), "--join must be HOST:PORT"),
        (WIDE, HostPlace(1, "a:1", 5), "give --join or --join-port, not both"),
        (WIDE, HostPlace(0, "a:1", 5), "give --join or --join-port, not both"),
        (WIDE, HostPlace(1, None, 5), "--join-port is for the first host"),
    ],
)
def test_options_that_do_not_fit_are_refused(parallel: ParallelSection, place: HostPlace, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place.address(parallel, None)
    assert says in refused.value.message


def test_the_head_checks_the_syntax_of_join() -> None:
    with pytest.raises(ConfigError, match="--join must be HOST:PORT"):
        HostPlace(0, "nowhere").address(WIDE, "10.0.0.1")


def test_the_address_of_each_host() -> None:
    assert HostPlace().address(ParallelSection(), None) is None
    assert HostPlace(port=5).address(WIDE, "10.0.0.1") == "10.0.0.1"
    assert HostPlace(0, "head.svc:5").address(WIDE, "10.0.0.1") == "10.0.0.1"
    assert HostPlace(1, "[::1]:5").address(WIDE, "10.0.0.2") == "10.0.0.2"
    assert HostPlace(1, "[::1]:5").head() == ("::1", 5)
    assert HostPlace(1, "127.0.0.1:5").address(WIDE, None) == "127.0.0.1"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nnodes", "2"), "no such setting: set `hosts` for the group in a topology file"),
        (("-r", "1"), "run `weft engine FILE --group NAME` on each host"),
        (("--rdzv", "a:1"), "all hosts except the first with --join"),
        (("--only-host", "1"), "on the host of the group"),
    ],
)
def test_flags_of_the_old_launcher_name_the_new_command(words: tuple[str, ...], says: str) -> None:
    for command, model in ((serve, "spool-text"), (up, "file.yaml")):
        ran = CliRunner().invoke(command, [model, *words])
        assert ran.exit_code != 0
        assert says in " ".join((ran.output + str(ran.exception or "")).split())
