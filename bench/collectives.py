"""Measure collectives of ranks on one host: gloo against shared memory.

python -m bench.collectives --json bench/results/collectives.json --markdown bench/results/collectives.md

Ranks are processes. Every round times both ways in turn, without pauses between collectives. The table has
medians over rounds of rank 0's time per collective. ``bytes`` is the input of each rank. CPU time is the sum
over all ranks. On a busy machine, `chrt -f 5` in front of the command keeps other work away.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.machine import commit, describe
from weft.parallel.comm import Pending
from weft.parallel.group_comm import GroupComm, Launcher
from weft.parallel.store import join_store

SIZES = (4, 4096, 65536, 1 << 20)
KINDS = ("all_reduce", "all_gather", "all_to_all")
WAYS = ("gloo", "shared")
TIMEOUT = 120.0

Found = dict[str, list[tuple[float, float]]]
"""``kind/bytes/way`` -> (seconds, CPU seconds) of a collective, by round."""


def collective(comm: GroupComm, kind: str, size: int) -> Callable[[], Pending | None]:
    """Gives ``size`` bytes."""
    x = torch.randn(size // 4)
    if kind == "all_reduce":
        return lambda: comm.all_reduce(x)
    if kind == "all_gather":
        return lambda: comm.all_gather(x)
    count = len(x)
    counts = [count * (r + 1) // comm.size - count * r // comm.size for r in range(comm.size)]
    receives = [counts[comm.rank]] * comm.size
    return lambda: comm.all_to_all(x, counts, receives)


def measure(comms: dict[str, GroupComm], rounds: int, seconds: float) -> Found:
    """Time every collective on this rank. Every rank must call the function; all ranks run the same number of
    collectives.
    """
    found: Found = {}
    for turn in range(rounds + 1):
        for kind in KINDS:
            for size in SIZES:
                for way in WAYS:
                    comm, run = comms[way], collective(comms[way], kind, size)
                    run()
                    began = time.perf_counter()
                    for _ in range(4):
                        run()
                    each = torch.tensor([(time.perf_counter() - began) / 4])
                    slowest = float(comm.all_gather(each).result().max())
                    times = max(4, min(2000, int(seconds / max(slowest, 1e-6))))
                    cpu, began = time.process_time(), time.perf_counter()
                    for _ in range(times):
                        run()
                    took = (time.perf_counter() - began) / times, (time.process_time() - cpu) / times
                    if turn:
                        found.setdefault(f"{kind}/{size}/{way}", []).append(took)
    return found


def of_rank(rank: int, ranks: int, store: str, rounds: int, seconds: float, out: Any) -> None:
    torch.set_num_threads(1)
    comms = {}
    for way in WAYS:
        comms[way] = GroupComm(way, range(ranks), rank, Launcher(), share=way == "shared")
        comms[way].connect(join_store(store, TIMEOUT), 0, TIMEOUT)
    out.put((rank, measure(comms, rounds, seconds)))
    for comm in comms.values():
        comm.all_gather(torch.zeros(1))
        comm.abort()


def group(ranks: int, rounds: int, seconds: float) -> list[Found]:
    """Return the figures of each rank, in rank order."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out: Any = context.Queue()
        given = (ranks, f"file://{folder}/store", rounds, seconds, out)
        members = [context.Process(target=of_rank, args=(rank, *given), daemon=True) for rank in range(ranks)]
        for member in members:
            member.start()
        found = dict(out.get(timeout=900) for _ in members)
        for member in members:
            member.join(60)
    return [found[rank] for rank in range(ranks)]


def lines(ranks: int, found: list[Found]) -> list[str]:
    """Rows of the table."""
    made = []
    for kind in KINDS:
        for size in SIZES:
            wall, cpu = {}, {}
            for way in WAYS:
                key = f"{kind}/{size}/{way}"
                wall[way] = 1e6 * statistics.median(seconds for seconds, _ in found[0][key])
                cpu[way] = 1e6 * sum(statistics.median(cpu for _, cpu in one[key]) for one in found)
            made.append(
                f"| {ranks} | {kind} | {size:,} | {wall['gloo']:,.0f} | {wall['shared']:,.0f} "
                f"| {wall['gloo'] / wall['shared']:.1f} | {cpu['gloo']:,.0f} | {cpu['shared']:,.0f} |"
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    machine, now = describe(), datetime.now(UTC).isoformat(timespec="seconds")
    found = {ranks: group(ranks, args.rounds, args.seconds) for ranks in args.ranks}
    at = commit(Path(__file__).parent)
    policy = {os.SCHED_FIFO: "SCHED_FIFO", os.SCHED_RR: "SCHED_RR"}.get(
        os.sched_getscheduler(0), "plain scheduling"
    )
    text = [
        "# Collectives on one host",
        "",
        f"{now}, commit {at}: `python -m bench.collectives {' '.join(sys.argv[1:])}`, {policy}",
        "",
        f"{machine['cpu']['model']}, {machine['cores']} cores, {machine['system']}. Load average "
        f"{machine['load_average'][0]:.1f} before.",
        "",
        f"Medians of {args.rounds} rounds, interleaved; microseconds of one collective. CPU is of all ranks "
        "together.",
        "",
        "| ranks | collective | bytes | gloo | shared | times faster | gloo, CPU | shared, CPU |",
        "|---|---|---|---|---|---|---|---|",
        *(line for ranks in args.ranks for line in lines(ranks, found[ranks])),
    ]
    print("\n".join(text))
    if args.markdown:
        args.markdown.write_text("\n".join(text) + "\n")
    if args.json:
        made = {"machine": machine, "date": now, "commit": at, "ranks": found}
        args.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
