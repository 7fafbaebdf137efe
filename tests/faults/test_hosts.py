"""Groups over several hosts, which are network namespaces; the cable between the hosts can be cut."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.faults.asker import PROMPTS, TIMES
from tests.faults.cluster import SETTINGS, Cluster, Server
from tests.faults.rig import config_of
from tests.support.processes import is_alive
from tests.support.slowness import deadline, until
from weft import LLM, SamplingParams
from weft.common.errors import ConfigError
from weft.config import hosts as over
from weft.config.group_settings import compare, shared_settings
from weft.config.sections.all import ParallelSection
from weft.control.fleet.instance_table import LISTEN_S

KILL, STOP, CABLE = "it is killed", "is stopped", "the cable is cut"
ZERO = "the engine of host 0 is killed"
HEAD = "the command of host 0 is killed"
HOST = "the command of host 1 is killed"
CUT_S = 1.5 * SETTINGS["rank_timeout"]
"""Seconds that the cable stays cut, long enough for ranks to notice."""
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
EXPERTS: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
PAIR = ({"namespace": 0}, {"namespace": 1})
"""Two groups that share nothing, each on its own host."""


class Alone(NamedTuple):
    """Hold the answers of one process to the prompts."""

    tokens: list[list[int]]
    texts: list[str]
    """Texts in the order of the client, each several times."""


@pytest.fixture(scope="module")
def alone() -> Alone:
    with LLM("spool-text", **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        made = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return Alone([list(one.token_ids) for one in made], [one.text for one in made for _ in range(TIMES)])


def pair_or_group(cluster: Cluster, shared: bool) -> Server:
    """Start two engines on two hosts: of one expert-parallel group, or of two groups."""
    return cluster.start(**EXPERTS) if shared else cluster.groups(*map(dict, PAIR))


@pytest.mark.slow
def test_two_hosts_and_the_loss_of_the_second(cluster: Cluster, alone: Alone) -> None:
    """Streams wait for the host, and continue with the same tokens. The head restarts no process of its
    host."""
    server = cluster.start(**TENSOR)
    there = server.engines[1]
    server.ask()
    assert server.received() == alone.texts
    head = server.engines[0].one("head")
    server.ask()
    time.sleep(0.5)
    there.kill()
    server.engines[1] = cluster.engine("unified0", namespace=1, index=1)
    assert server.received() == alone.texts
    assert server.engines[0].one("head") == head
    assert server.restarts() == 0
    server.stop()


@pytest.mark.grid
def test_faults_of_either_of_two_hosts(cluster: Cluster, alone: Alone) -> None:
    server = cluster.start(**TENSOR)
    recoveries = 0.0
    for deed in (KILL, STOP, CABLE, ZERO, HEAD, HOST):
        kept, there = server.engines[1].one("rank"), server.engines[1]
        server.ask()
        time.sleep(0.3)
        if deed == CABLE:
            cluster.hosts.cable("down")
            time.sleep(CUT_S)
            cluster.hosts.cable("up")
        elif deed in (HEAD, HOST):  # another process of the command follows
            server.engines[deed == HOST].process.kill()
        else:
            rank = server.engines[0].one("head") if deed == ZERO else kept
            os.kill(rank, signal.SIGSTOP if deed == STOP else signal.SIGKILL)
        assert server.received() == alone.texts, deed
        if deed in (CABLE, ZERO, HEAD):
            assert there.one("rank") == kept, "a rank that lost its engine keeps its weights"
        if deed in (KILL, STOP, CABLE):
            counted = server.metrics()["group_recoveries_total:unified0"]
            assert counted > recoveries, deed
            recoveries = counted
    server.ask()
    assert server.received() == alone.texts
    assert [engine.restarts for engine in server.engines] == [2, 1]
    server.stop()


@pytest.mark.parametrize(
    ("spread", "layout"),
    [
        pytest.param(2, EXPERTS, marks=pytest.mark.slow),
        pytest.param(2, {**TENSOR, **EXPERTS}, marks=pytest.mark.grid),
        pytest.param(4, {**TENSOR, **EXPERTS}, marks=pytest.mark.grid),
        pytest.param(1, {}, marks=pytest.mark.grid),
        pytest.param(1, TENSOR, marks=pytest.mark.grid),
    ],
    ids=["experts", "experts-tensor", "experts-tensor-four", "groups", "groups-tensor"],
)
def test_engines_on_two_hosts(cluster: Cluster, alone: Alone, spread: int, layout: dict[str, Any]) -> None:
    """With four hosts each replica spans two hosts. With 1, each group has one host."""
    server = cluster.start(spread, **layout) if spread > 1 else cluster.groups(*map(dict, PAIR), **layout)
    server.until_whole()
    server.ask()
    assert server.received() == alone.texts
    counted = server.metrics()
    made = [value for name, value in counted.items() if name.startswith("generation_tokens_total:")]
    assert len(made) == 2
    assert min(made) > 0
    assert counted["front_failovers_total"] == 0
    server.stop()


@pytest.mark.grid
def test_two_groups_that_span_the_same_two_hosts(cluster: Cluster, alone: Alone) -> None:
    cluster.write({"count": 2}, hosts=2, **TENSOR)
    places = [("unified0", 0, 5799), ("unified0", 1, 5799), ("unified1", 0, 5800), ("unified1", 1, 5800)]
    engines = [cluster.engine(name, namespace=host, index=host, port=port) for name, host, port in places]
    server = cluster.front(engines)
    server.until_whole()
    server.ask()
    assert server.received() == alone.texts
    server.stop()


@pytest.mark.grid
def test_ranks_of_another_host_outlive_their_engine(cluster: Cluster, alone: Alone) -> None:
    """The engine is killed, stopped, and killed again on its return; the other host's rank survives."""
    server = cluster.start(**TENSOR)
    kept = server.engines[1].one("rank")
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        server.ask()
        time.sleep(1.5)
        os.kill(server.engines[0].one("head"), number)
        assert server.received() == alone.texts
    assert server.engines[1].one("rank") == kept
    assert [engine.restarts for engine in server.engines] == [3, 0]
    server.stop()


@pytest.mark.grid
@pytest.mark.parametrize("shared", [False, True], ids=["groups", "experts"])
def test_faults_of_engines_on_another_host(cluster: Cluster, alone: Alone, shared: bool) -> None:
    server = pair_or_group(cluster, shared)
    server.until_whole()
    server.ask()
    assert server.received() == alone.texts
    failovers = 0.0
    for deed in (KILL, STOP, CABLE, ZERO):
        server.ask()
        time.sleep(0.3)
        if deed == CABLE:
            cluster.hosts.cable("down")
            time.sleep(CUT_S)
            cluster.hosts.cable("up")
        else:
            host = server.engines[deed != ZERO]
            os.kill(host.one("head"), signal.SIGSTOP if deed == STOP else signal.SIGKILL)
        assert server.received() == alone.texts, deed
        counted = server.until_whole()
        assert counted["front_failovers_total"] > failovers, deed
        failovers = counted["front_failovers_total"]
    assert [engine.restarts for engine in server.engines] == [1, 2]
    server.ask()
    assert server.received() == alone.texts
    server.stop()


@pytest.mark.grid
def test_an_engine_that_stops_before_it_listens(cluster: Cluster, alone: Alone) -> None:
    """The engine's own host gives the engine up after ``LISTEN_S``; no other process can see the engine."""
    server = cluster.groups(*map(dict, PAIR))
    server.until_whole()
    host = server.engines[1]
    os.kill(killed := host.one("head"), signal.SIGKILL)
    server.ask()
    until(lambda: any(pid != killed for pid in host.ranks("head")))
    os.kill(found := host.ranks("head")[0], signal.SIGSTOP)
    stopped = time.monotonic()
    assert server.received() == alone.texts
    until(lambda: not is_alive(found), LISTEN_S + 30)
    server.until_whole()
    assert time.monotonic() > stopped + LISTEN_S / 2, "it was to be stopped before it listened"
    server.ask()
    assert server.received() == alone.texts
    assert host.restarts == 2
    server.stop()


@pytest.mark.grid
@pytest.mark.parametrize("shared", [False, True], ids=["groups", "experts"])
def test_a_host_that_dies_and_returns(cluster: Cluster, alone: Alone, shared: bool) -> None:
    """Other hosts serve meanwhile, or wait for the host if experts are missing."""
    server = pair_or_group(cluster, shared)
    server.until_whole()
    server.ask()
    time.sleep(0.3)
    server.engines[1].kill()
    if not shared:
        assert server.received() == alone.texts
        assert not server.metrics().get("engine_up:unified1")  # or forgotten, with the lease
    again = {"namespace": 1, "index": 1} if shared else {"namespace": 1}
    name = "unified0" if shared else "unified1"
    server.engines[1] = cluster.engine(name, **again)
    if shared:
        assert server.received() == alone.texts
    server.until_whole()
    twin = cluster.engine(name, **again)  # the same command again, as after a copy
    assert twin.process.wait(deadline(60)) == 2
    server.ask()
    assert server.received() == alone.texts
    assert server.restarts() == 0
    server.stop()


@pytest.mark.grid
def test_an_api_server_that_is_started_again(cluster: Cluster, alone: Alone) -> None:
    """The engines stay, and work for the next API server."""
    server = cluster.start(**TENSOR)
    kept = [server.engines[0].one("head"), server.engines[1].one("rank")]
    server.fronts[0].kill()
    again = cluster.front(server.engines)
    again.ask()
    assert again.received() == alone.texts
    assert [again.engines[0].one("head"), again.engines[1].one("rank")] == kept
    again.stop()


@pytest.mark.grid
def test_a_head_with_other_settings(cluster: Cluster, alone: Alone, tmp_path: Path) -> None:
    """The host ends with status 2 and names the setting. With the same file the host joins."""
    server = cluster.start(**TENSOR)
    assert server.engines[0].stop() == 0
    file = cluster.write({}, file=tmp_path / "other.yaml", hosts=2, max_num_seqs=5, **TENSOR)
    server.engines[0] = cluster.engine("unified0", index=0, file=file)
    assert server.engines[1].process.wait(deadline(60)) == 2
    told = server.engines[1].log.read_text()
    assert "the head has 5, host 1 has 4" in told
    assert "--max-num-seqs" in told
    server.engines[1] = cluster.engine("unified0", namespace=1, index=1, file=file)
    server.ask()
    assert server.received() == alone.texts
    server.stop()


# ---- settings


def test_what_ranks_have_in_common_says_nothing_of_folders() -> None:
    """Shared settings exclude folders: an engine and the ranks on another host have different folders."""
    config = config_of(tensor_parallel_size=2)
    moved = msgspec.structs.replace(config, socket_folder="/there", model_path="/here")
    compare(shared_settings(config), shared_settings(moved), "the head", "rank 1")


def test_what_hosts_need() -> None:
    good = ParallelSection(tensor_parallel_size=4, hosts=2, group_secret="x")
    over.check_hosts(good)
    over.check_hosts(ParallelSection())
    over.refuse_hosts(ParallelSection())
    assert [list(over.ranks_on(good, host)) for host in (0, 1)] == [[0, 1], [2, 3]]
    there = {"hosts": 2, "group_secret": "x"}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"hosts": 2}, "--group-secret"),
        (there, "--tensor-parallel-size"),
        ({**there, "data_parallel_size": 2}, "count: N"),
        ({**there, "data_parallel_size": 3, "enable_expert_parallel": True}, "--data-parallel-size"),
        ({**there, **EXPERTS, "hosts": 4}, "--hosts 4 does not divide the 2 ranks"),
        (
            {**there, "data_parallel_size": 3, "tensor_parallel_size": 2, "enable_expert_parallel": True},
            "3 ranks",
        ),
    ]
    for fields, named in bad:
        with pytest.raises(ConfigError, match=named):
            over.check_hosts(ParallelSection(**fields))
    with pytest.raises(ConfigError, match="weft engine FILE --group NAME"):
        over.refuse_hosts(good)


def lying(hosts: int, **fields: Any) -> list[tuple[list[int], list[int]]]:
    """Return (replicas whose engine runs there, ranks) for each host."""
    parallel = over.check_hosts(ParallelSection(hosts=hosts, group_secret="x", **fields))
    return [(over.engines_on(parallel, n), list(over.ranks_on(parallel, n))) for n in range(hosts)]


def test_where_engines_and_ranks_lie() -> None:
    """Each host has the same number of ranks, in order. A replica may fit on a host or span several."""
    experts: dict[str, Any] = {"enable_expert_parallel": True}
    four = {**experts, "data_parallel_size": 4}
    assert lying(2, **four) == [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    both = {**experts, "data_parallel_size": 2, "tensor_parallel_size": 2}
    assert lying(2, **both) == [([0], [0, 1]), ([1], [2, 3])]
    assert lying(4, **both) == [([0], [0]), ([], [1]), ([1], [2]), ([], [3])]
    assert lying(2, tensor_parallel_size=4) == [([0], [0, 1]), ([], [2, 3])]
    spans = ParallelSection(hosts=4, **both)
    assert [over.replica_spans(spans, replica) for replica in range(2)] == [True, True]
    shared = ParallelSection(hosts=2, **EXPERTS)
    assert (over.replica_spans(shared, 0), over.expert_group_spans(shared, 0)) == (False, True)
    assert not over.expert_group_spans(ParallelSection(**EXPERTS), 1)
