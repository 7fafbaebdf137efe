"""Collectives over real gloo groups, ranks as threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import ends_when_aborted, on_ranks
from tests.support.slowness import deadline
from weft.parallel.comm import LocalComm
from weft.parallel.group_comm import ONE_SHOT, CommLost
from weft.parallel.mesh import Mesh, make_mesh
from weft.types.layout import Layout


def value(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, ONE_SHOT])
def test_sums_have_the_bits_of_the_ordered_sum_whatever_their_size(dtype: torch.dtype, count: int) -> None:
    ranks = 4
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = value(0, count, dtype).to(wide)
    for rank in range(1, ranks):
        expected = expected + value(rank, count, dtype)

    def work(mesh: Mesh) -> torch.Tensor:
        pending = mesh.tp.all_reduce(value(mesh.rank, count, dtype))
        assert pending is not None
        return pending.result()

    for made in on_ranks(Layout(tensor=ranks), work):
        assert torch.equal(made, expected.to(dtype))


def test_rows_reach_the_ranks_they_were_sent_to() -> None:
    sends = [[0, 2, 1], [3, 0, 0], [1, 1, 1]]

    def work(mesh: Mesh) -> list[list[int]]:
        mine = sends[mesh.rank]
        rows = [[mesh.rank, to] for to, count in enumerate(mine) for _ in range(count)]
        receives = [row[mesh.rank] for row in sends]
        x = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
        return mesh.ep.all_to_all(x, mine, receives).result().tolist()

    for rank, made in enumerate(on_ranks(Layout(data=3, expert=True), work)):
        assert made == [[r, rank] for r, row in enumerate(sends) for _ in range(row[rank])]


def test_gather_and_scatter() -> None:
    def work(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.full((2, 3), float(mesh.rank))
        whole = torch.arange(2.0).view(2, 1) + 10 * mesh.rank
        return mesh.tp.all_gather(mine).result(), mesh.tp.reduce_scatter(whole).result()

    for rank, (gathered, scattered) in enumerate(on_ranks(Layout(tensor=2), work)):
        assert gathered[:, 0, 0].tolist() == [0.0, 1.0]
        assert scattered.tolist() == [10.0 + 2 * rank]


def test_axes_of_a_mesh() -> None:
    def work(mesh: Mesh) -> tuple[list[int], list[int], list[int]]:
        mine = torch.tensor([mesh.rank])
        return tuple(comm.all_gather(mine).result().view(-1).tolist() for comm in (mesh.tp, mesh.ep, mesh.dp))

    made = on_ranks(Layout(tensor=2, data=2, expert=True), work)
    assert made[1] == ([0, 1], [0, 1, 2, 3], [1, 3])
    assert made[2] == ([2, 3], [0, 1, 2, 3], [0, 2])


@pytest.mark.requirement("A17")
def test_one_rank_communicates_with_nobody() -> None:
    (mesh,) = on_ranks(Layout(expert=True), lambda mesh: mesh)
    assert all(isinstance(comm, LocalComm) for comm in (mesh.tp, mesh.ep, mesh.dp))
    assert mesh.tp.all_reduce(torch.ones(1)) is None


def test_a_peer_that_is_gone_is_an_error_and_no_hang() -> None:
    def work(mesh: Mesh) -> None:
        if mesh.rank == 1:
            raise ValueError("gone")
        mesh.tp.all_reduce(torch.ones(3))

    with pytest.raises((ValueError, CommLost)):
        on_ranks(Layout(tensor=2), work, timeout=deadline(5.0))


def test_a_rank_that_waits_for_others_to_come_stops_when_it_is_aborted() -> None:
    """The other ranks are in the next epoch, and wait there for this rank for a limited time."""
    mine, other = (make_mesh(Layout(tensor=2), rank) for rank in range(2))
    store = dist.HashStore()

    said = ends_when_aborted(lambda: mine.connect(store, 0, deadline(60)), mine.abort)
    assert said == "the tp0 group could not form: aborted before all ranks had connected"
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda mesh: mesh.connect(store, 1, deadline(30)), (mine, other)))
        sums = pool.map(lambda mesh: mesh.tp.all_reduce(torch.ones(1)).result().item(), (mine, other))
        assert list(sums) == [2, 2]
    for mesh in (mine, other):
        mesh.abort()


def test_nothing_to_add_up() -> None:
    def work(mesh: Mesh) -> list[int]:
        return list(mesh.tp.reduce_scatter(torch.empty(2, 0, 3)).result().shape)

    assert on_ranks(Layout(tensor=2), work) == [[0, 3]] * 2


def listening() -> list[str]:
    """Return the addresses beyond loopback at which this process listens, from /proc."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            mine.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine and fields[1].partition(":")[0] != loopback:
                found.append(fields[1])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc/net/tcp")
def test_ranks_of_one_host_listen_on_loopback_only() -> None:
    before = listening()
    during = on_ranks(Layout(tensor=2), lambda mesh: listening())
    assert during == [before, before]
