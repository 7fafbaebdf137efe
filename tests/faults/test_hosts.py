"""Groups and replicas over several hosts, which are network namespaces; the cable between them can be cut."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.faults.asker import TIMES
from tests.faults.cluster import SETTINGS, Cluster
from tests.faults.host_zero import PROMPTS
from tests.faults.netns import child_of, children_of
from tests.faults.rig import config_of
from tests.support.slowness import deadline
from weft import LLM, SamplingParams
from weft.cli.processes.host import LISTEN_S
from weft.common.errors import ConfigError
from weft.config import hosts as over
from weft.config.group_settings import compare, shared_settings
from weft.config.sections.all import ParallelSection

KILL, STOP, CABLE = "it is killed", "is stopped", "the cable is cut"
ZERO = "head 0 is killed"
CUT_S = 1.5 * SETTINGS["rank_timeout"]
"""Seconds that the cable stays cut, long enough for ranks to notice."""


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


@pytest.mark.parametrize(
    "deeds",
    [pytest.param((), marks=pytest.mark.slow), pytest.param((KILL, STOP, CABLE), marks=pytest.mark.grid)],
    ids=["quiet", "faults"],
)
def test_two_hosts_and_what_befalls_the_second(
    cluster: Cluster, alone: Alone, deeds: tuple[str, ...]
) -> None:
    wanted = alone.tokens
    zero = cluster.program(tensor_parallel_size=2)
    zero.ask()
    assert zero.told() == (wanted, 0)

    for deed in deeds:
        kept = child_of(zero.other)
        if deed == CABLE:
            cluster.hosts.cable("down")
        zero.ask()
        if deed == CABLE:
            time.sleep(CUT_S)
            cluster.hosts.cable("up")
        else:
            time.sleep(0.3)
            os.kill(child_of(zero.other), signal.SIGKILL if deed == KILL else signal.SIGSTOP)
        assert zero.told()[0] == wanted
        if deed == CABLE:
            assert child_of(zero.other) == kept, "a rank that lost its head keeps its weights"
    zero.ask()
    told, recoveries = zero.told()
    assert told == wanted
    assert recoveries >= (2 if deeds else 0)  # a fault between two rounds is found in the next round
    zero.stop()


# ---- several replicas


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"enable_expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.grid),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.grid),
        pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.grid),
        pytest.param({"tensor_parallel_size": 2, "nnodes": 4}, marks=pytest.mark.grid),
        pytest.param(
            {"tensor_parallel_size": 2, "nnodes": 4, "enable_expert_parallel": True}, marks=pytest.mark.grid
        ),
    ],
    ids=lambda layout: "-".join(layout) or "independent",
)
def test_replicas_over_hosts(cluster: Cluster, alone: Alone, layout: dict[str, Any]) -> None:
    """With four hosts each replica spans two hosts."""
    wanted = alone.texts
    server = cluster.start(data_parallel_size=2, **layout)
    server.ask()
    assert server.told() == wanted
    counted = server.metrics()
    assert min(counted[f"generation_tokens_total:{engine}"] for engine in (0, 1)) > 0
    assert counted["front_failovers_total"] == 0
    server.stop()


@pytest.mark.grid
def test_ranks_of_another_host_outlive_their_engine(cluster: Cluster, alone: Alone) -> None:
    """The engine of ``weft serve`` is killed, stopped, and killed again on its return; the other host's rank
    survives.
    """
    server = cluster.start(tensor_parallel_size=2)
    kept = child_of(server.others[0])
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        server.ask()
        time.sleep(1.5)
        os.kill(child_of(server.process, "head"), number)
        assert server.told() == alone.texts
    assert child_of(server.others[0]) == kept
    server.stop()


@pytest.mark.grid
@pytest.mark.parametrize("shared", [False, True], ids=["independent", "domain"])
def test_workers_outlive_their_engine_on_its_host(cluster: Cluster, alone: Alone, shared: bool) -> None:
    server = cluster.start(data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=shared)
    kept = child_of(server.others[0], "rank")
    for number in (signal.SIGKILL, signal.SIGSTOP):
        server.ask()
        time.sleep(0.3)
        os.kill(child_of(server.others[0], "head"), number)
        assert server.told() == alone.texts
        server.until_whole()
    assert child_of(server.others[0], "rank") == kept
    server.ask()
    assert server.told() == alone.texts
    server.stop()


@pytest.mark.grid
@pytest.mark.parametrize("shared", [False, True], ids=["independent", "domain"])
def test_what_befalls_engines_of_another_host(cluster: Cluster, alone: Alone, shared: bool) -> None:
    wanted = alone.texts
    server = cluster.start(data_parallel_size=2, enable_expert_parallel=shared)
    server.ask()
    assert server.told() == wanted
    failovers = 0.0
    for deed in (KILL, STOP, CABLE, ZERO):
        server.ask()
        time.sleep(0.3)
        if deed == CABLE:
            cluster.hosts.cable("down")
            time.sleep(CUT_S)
            cluster.hosts.cable("up")
        else:
            host = server.process if deed == ZERO else server.others[0]
            os.kill(child_of(host, "head"), signal.SIGSTOP if deed == STOP else signal.SIGKILL)
        assert server.told() == wanted
        counted = server.until_whole()
        assert counted["front_failovers_total"] > failovers, deed
        failovers = counted["front_failovers_total"]
    assert counted["engine_restarts_total"] == 4
    server.ask()
    assert server.told() == wanted
    server.stop()


@pytest.mark.grid
def test_an_engine_of_another_host_that_stops_before_it_listens(cluster: Cluster, alone: Alone) -> None:
    """The engine's own host gives it up after ``LISTEN_S``; no other process can see the engine."""
    server = cluster.start(data_parallel_size=2)
    host = server.others[0]
    killed = child_of(host, "head")
    os.kill(killed, signal.SIGKILL)
    server.ask()
    until = time.monotonic() + deadline(60)
    while (found := children_of(host, "head")) in ([], [killed]):
        assert time.monotonic() < until, "no head follows"
    os.kill(found[0], signal.SIGSTOP)
    assert server.told() == alone.texts
    stopped = time.monotonic()
    while found[0] in children_of(host, "head"):
        assert time.monotonic() < stopped + LISTEN_S + 10, "it is still there"
        time.sleep(0.5)
    server.until_whole()
    assert time.monotonic() > stopped + LISTEN_S / 2, "it was to be stopped before it listened"
    server.ask()
    assert server.told() == alone.texts
    assert server.metrics()["engine_restarts_total"] == 2
    server.stop()


@pytest.mark.grid
@pytest.mark.parametrize("shared", [False, True], ids=["independent", "domain"])
def test_a_host_that_dies_and_returns(cluster: Cluster, alone: Alone, shared: bool) -> None:
    """Other hosts serve meanwhile, or wait for the host if experts are missing."""
    wanted = alone.texts
    server = cluster.start(data_parallel_size=2, enable_expert_parallel=shared)
    server.ask()
    time.sleep(0.3)
    server.others[0].kill()
    server.others[0].wait(10)
    if not shared:
        assert server.told() == wanted
        assert server.metrics()["engine_up:1"] == 0
    server.others[0] = cluster.serve(1)
    if shared:
        assert server.told() == wanted
    server.until_whole()
    twin = cluster.serve(1)  # a second host with the same --node-rank, as after a copied command
    assert twin.wait(deadline(60)) == 2
    server.ask()
    assert server.told() == wanted
    assert server.metrics()["engine_restarts_total"] == 1
    server.stop()


@pytest.mark.grid
def test_a_front_that_is_started_again(cluster: Cluster, alone: Alone) -> None:
    """Other hosts stay, and work for the next one."""
    wanted = alone.texts
    server = cluster.start(data_parallel_size=2)
    server.process.kill()
    again = cluster.front(server.others)
    again.ask()
    assert again.told() == wanted
    again.stop()


@pytest.mark.grid
def test_replicas_over_hosts_behind_a_program(cluster: Cluster, alone: Alone) -> None:
    """``LLM`` on host 0 works; a host with different settings is refused before serving."""
    wanted = alone.tokens
    zero = cluster.program(data_parallel_size=2, enable_expert_parallel=True)
    zero.ask()
    assert zero.told() == (wanted, 0)
    zero.stop()

    differs = cluster.serve(1, max_num_seqs=5)
    assert cluster.serve(0).wait(60) == 2
    assert differs.wait(deadline(60)) == 2


# ---- settings


def test_what_ranks_have_in_common_says_nothing_of_folders() -> None:
    """Shared settings exclude folders: an engine and the ranks on another host have different folders."""
    config = config_of(tensor_parallel_size=2)
    moved = msgspec.structs.replace(config, socket_folder="/there", model_path="/here")
    compare(shared_settings(config), shared_settings(moved), "the head", "rank 1")


def test_what_hosts_need() -> None:
    good = ParallelSection(tensor_parallel_size=4, nnodes=2, rdzv="[fd00::1]:5000", group_secret="x")
    over.check_hosts(good)
    over.check_hosts(ParallelSection())
    assert over.meeting_place(good) == ("fd00::1", 5000)
    assert [list(over.ranks_on(good, node)) for node in (0, 1)] == [[0, 1], [2, 3]]
    there = {"rdzv": "a:1", "group_secret": "x"}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"nnodes": 2}, "--rdzv"),
        ({"nnodes": 2, "rdzv": "a:1"}, "--group-secret"),
        ({"nnodes": 2, "rdzv": "a", "group_secret": "x"}, "HOST:PORT"),
        ({"nnodes": 2, **there}, "--tensor-parallel-size"),
        ({"nnodes": 2, **there, "data_parallel_size": 3}, "--data-parallel-size"),
        ({"nnodes": 4, **there, "data_parallel_size": 2}, "--nnodes 4 does not divide the 2 ranks"),
        ({"node_rank": 1}, "--node-rank"),
    ]
    for fields, named in bad:
        with pytest.raises(ConfigError, match=named):
            over.check_hosts(ParallelSection(**fields))


def lying(**fields: Any) -> list[tuple[list[int], list[int]]]:
    """Return (replicas whose engine runs there, ranks whose engine is elsewhere) for each host."""
    parallel = over.check_hosts(ParallelSection(rdzv="a:1", group_secret="x", **fields))
    return [(over.engines_on(parallel, n), over.workers_on(parallel, n)) for n in range(parallel.nnodes)]


def test_where_engines_and_ranks_lie() -> None:
    """Each host has the same number of ranks, in order. A replica may fit on a host or span several."""
    assert lying(nnodes=2, data_parallel_size=4) == [([0, 1], []), ([2, 3], [])]
    assert lying(nnodes=2, data_parallel_size=2, tensor_parallel_size=2) == [([0], []), ([1], [])]
    assert lying(nnodes=2, data_parallel_size=3, tensor_parallel_size=2) == [([0, 1], []), ([2], [3])]
    assert lying(nnodes=4, data_parallel_size=2, tensor_parallel_size=2) == [
        ([0], []),
        ([], [1]),
        ([1], []),
        ([], [3]),
    ]
    three = ParallelSection(nnodes=2, data_parallel_size=3, tensor_parallel_size=2)
    assert [over.replica_spans(three, replica) for replica in range(3)] == [False, True, False]
    assert [over.expert_group_spans(three, replica) for replica in range(3)] == [False, True, False]
    shared = ParallelSection(nnodes=2, data_parallel_size=2, enable_expert_parallel=True)
    assert (over.replica_spans(shared, 0), over.expert_group_spans(shared, 0)) == (False, True)
    assert not over.expert_group_spans(ParallelSection(data_parallel_size=2, enable_expert_parallel=True), 1)
    assert over.uses_board(shared)
    assert not over.uses_board(ParallelSection(nnodes=2, tensor_parallel_size=2))
