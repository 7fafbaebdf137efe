"""Measure the seconds of one vote of an expert-parallel group, between engine processes.

python bench/agreement.py --heads 2 --votes 2000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from typing import Any

import numpy as np
import torch

from weft.parallel.agreement import AgreementGroup
from weft.parallel.store import join_store
from weft.parallel.wakeup import LocalWakeups
from weft.scheduler.votes import Vote


def head(number: int, heads: int, votes: int, store: str, results: Any) -> None:
    """Vote as an engine votes between two steps.

    Put (number, wall seconds of each vote, process CPU seconds per vote) into ``results``.
    """
    torch.set_num_threads(1)
    group = AgreementGroup(number, heads, LocalWakeups(heads).of(number))
    group.connect(join_store(store, 60), 0, 60)
    walls = []
    cpu = time.process_time()
    for step in range(votes):
        began = time.perf_counter()
        group.agree(Vote(unfinished=True, rows=step % 5, tokens=step % 5))
        walls.append(time.perf_counter() - began)
    cpu = time.process_time() - cpu
    results.put((number, walls, cpu / votes))
    time.sleep(0.5)  # no process leaves while another still reads


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--votes", type=int, default=2000)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.heads, options.votes, f"file://{folder}/store", results)
        processes = [context.Process(target=head, args=(n, *arguments)) for n in range(options.heads)]
        for process in processes:
            process.start()
        made = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join(60)
    walls = np.concatenate([walls for _, walls, _ in made]) * 1e6
    line = {
        "heads": options.heads,
        "votes": options.votes,
        "wall_us_p50": round(float(np.percentile(walls, 50)), 1),
        "wall_us_p99": round(float(np.percentile(walls, 99)), 1),
        "cpu_us_each_head": round(1e6 * max(cpu for _, _, cpu in made), 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
