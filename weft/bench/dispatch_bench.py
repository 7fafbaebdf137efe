"""Measures collectives between processes of this machine, and whole routed layers in every form of dispatch.

The collectives make the table behind ``--moe-dispatch auto``; the layers show the resulting choices.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from weft.bench.moe_table import machine
from weft.moe import exchange_cost
from weft.moe.exchange_cost import ExchangeShape, MeasuredExchange
from weft.moe.expert_choice import Chooser
from weft.moe.parallel import DividedExperts
from weft.moe.placement import in_order
from weft.ops import moe
from weft.ops.moe import Gate, Routed
from weft.ops.routing import Rule
from weft.parallel.comm import drive
from weft.parallel.group_comm import GroupComm
from weft.parallel.mesh import Mesh, make_mesh
from weft.types.exchange import FORMS, Exchange
from weft.types.layout import Layout

Tensor = torch.Tensor

BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
"""Bytes that a rank ends up with, for each measured collective."""
CALLS = 60
"""Calls per measurement (a sixth for the largest size). The fastest counts, because other processes may
compute on the machine, too."""
TIMEOUT = 120.0
"""Seconds for one collective, and for the start of all processes."""

Work = Callable[..., Any]


def on_processes(layout: Layout, work: Work, *given: Any) -> Any:
    """Run ``work(mesh, *given)`` on each rank of ``layout``.

    Return the result of rank 0 (through JSON). Each rank is a process with one thread. Blocks until all have
    ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(  # type: ignore[no-untyped-call]
            _rank, (layout, folder, work, given), nprocs=layout.ranks
        )
        return json.loads((Path(folder) / "result").read_text(encoding="utf-8"))


def _rank(rank: int, layout: Layout, folder: str, work: Work, given: tuple[Any, ...]) -> None:
    """Run one rank: join the group, work, and write the result of rank 0 to a file."""
    torch.set_num_threads(1)
    mesh = make_mesh(layout, rank)
    mesh.connect(dist.FileStore(f"{folder}/store", layout.ranks), 0, TIMEOUT)
    made = work(mesh, *given)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(made), encoding="utf-8")


# --- collectives ---


def collectives(ranks: int) -> MeasuredExchange:
    """Return the table's row for ``ranks`` ranks of this machine."""
    link, found = on_processes(Layout(data=ranks, expert=True), _collectives)
    times = {kind: {int(size): us for size, us in by.items()} for kind, by in found.items()}
    return MeasuredExchange(link, machine("cpu"), ranks, times)


def _collectives(mesh: Mesh) -> tuple[str, dict[str, dict[str, float]]]:
    """Return (link, kind -> bytes -> microseconds) of the fastest calls."""
    assert isinstance(mesh.ep, GroupComm)
    return mesh.ep.link, {
        kind: {str(size): _fastest(mesh, _call(mesh, kind, size), size) for size in BYTES}
        for kind in exchange_cost.KINDS
    }


def _call(mesh: Mesh, kind: str, size: int) -> Callable[[], object]:
    """Return a function that runs one collective with a result of ``size`` bytes per rank.

    For an all-reduce, ``size`` is also the size of the input. The kind "copy" only copies rows locally.
    """
    ep, floats = mesh.ep, size // 4
    each = floats // ep.size
    if kind == "copy":
        rows = torch.ones(floats // 64, 64)
        order = torch.randperm(len(rows))
        return lambda: rows[order]
    if kind == "all_reduce":
        x = torch.ones(floats)
        return lambda: ep.all_reduce(x).result()  # type: ignore[union-attr]
    if kind == "all_gather":
        x = torch.ones(each)
        return lambda: ep.all_gather(x).result()
    x = torch.ones(ep.size, each)
    if kind == "reduce_scatter":
        return lambda: ep.reduce_scatter(x).result()
    ones = [1] * ep.size
    return lambda: ep.all_to_all(x, ones, ones).result()


def _fastest(mesh: Mesh, call: Callable[[], object], size: int) -> float:
    """Return the fastest call in microseconds; all ranks call at once."""
    spent = []
    for _ in range(CALLS if size < BYTES[-1] else max(3, CALLS // 6)):
        mesh.ep.all_gather(torch.zeros(1)).result()  # all ranks begin together
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return round(min(spent[1:]) * 1e6, 1)


def summary(found: list[MeasuredExchange]) -> Iterator[str]:
    """Yield one line for each number of ranks and kind of collective."""
    for row in found:
        for kind, by in row.times.items():
            yield f"{row.ranks} ranks, {kind:<14} " + ", ".join(
                f"{size >> 10} KiB: {us:.0f} us" for size, us in by.items()
            )


# --- whole layers ---


def layers(
    layout: Layout, size: tuple[int, int, int, int], tokens: Sequence[int], calls: int = 15
) -> list[dict[str, float]]:
    """Return the milliseconds of one layer by form, for each entry of ``tokens`` (tokens per replica).

    A time is the slowest rank's time in the fastest call. ``size``: (experts, top_k, hidden, intermediate);
    float32.
    """
    result: list[dict[str, float]] = on_processes(layout, _layers, size, tuple(tokens), calls)
    return result


def _layers(
    mesh: Mesh, size: tuple[int, int, int, int], tokens: tuple[int, ...], calls: int
) -> list[dict[str, float]]:
    """Return milliseconds by form for each of ``tokens``, on random experts divided over the ranks."""
    layout, (experts, top_k, hidden, inner) = mesh.layout, size
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(experts, hidden, generator=generator) * hidden**-0.5
    placement = in_order(experts, layout.ranks)
    count = len(placement[mesh.rank])
    weights = Routed(
        rule=Rule(top_k, renormalize=True),
        gate=Gate(),
        router=router,
        gate_up=torch.randn(count, 2 * inner, hidden) * hidden**-0.5,
        down=torch.randn(count, hidden, inner) * inner**-0.5,
    )
    replica = torch.Generator().manual_seed(1 + layout.replica(mesh.rank))
    chooser = Chooser(layout, "auto", ExchangeShape(hidden, top_k, 4))
    block = DividedExperts(mesh, chooser, moe.PLAIN, weights, placement, exact=False, counts=False)
    forms = [form for form in FORMS if form != "reduce" or layout.data == 1]
    result = []
    for many in tokens:
        x = torch.randn(many, hidden, generator=replica)
        result.append({form: _slowest(mesh, block, x, Exchange(form, many), calls) for form in forms})
    return result


@torch.inference_mode()
def _slowest(mesh: Mesh, block: DividedExperts, x: Tensor, exchange: Exchange, calls: int) -> float:
    """Return the milliseconds of the slowest rank in the fastest of ``calls`` calls."""
    spent = []
    for _ in range(calls + 1):
        mesh.ep.all_gather(torch.zeros(1)).result()
        began = time.perf_counter()
        drive(block.steps(x, None, exchange))
        own = torch.tensor([time.perf_counter() - began])
        spent.append(float(mesh.ep.all_gather(own).result().max()))
    return round(1e3 * min(spent[1:]), 3)
