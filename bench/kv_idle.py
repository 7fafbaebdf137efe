"""Measure the CPU time of a KV disk tier that never finds a block.

    python -m bench.kv_idle [--json bench/results/kv-idle-mine.json] [--rounds 12] [--prompts 12]

Three engines are loaded together: without a tier, with ``--kv-store reused`` and with ``--kv-store all``. The
engines compute the same prompts of random tokens, one after another in each round. No prompt repeats, so no
tier can help. The CPU seconds of an engine's process and its children count until a second after the last
token, so that the writes are included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from bench import record
from bench.rounds import turns
from bench.scratch import scratch_folder
from weft import LLM, SamplingParams
from weft.bench.checkpoints import make

STORES = {"no tier": None, "reused": "reused", "all": "all"}
SETTLE_S = 1.0
"""Seconds after the last token in which an engine writes its blocks."""
DEADLINE_S = 600.0
WARM_ROUNDS = 2
"""Uncounted rounds: first uses of memory cost CPU time."""

Prompts = Sequence[list[int]]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def serve(settings: dict[str, Any], asked: Connection) -> None:
    """Run an engine. Answer each list of prompts with (CPU seconds, cached tokens), until None arrives."""
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with LLM(**settings) as llm:
        asked.send(None)
        while (prompts := asked.recv()) is not None:
            before = cpu_seconds()
            outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params)
            time.sleep(SETTLE_S)
            asked.send((cpu_seconds() - before, sum(each.num_cached_tokens or 0 for each in outputs)))


def answer(engine: Connection) -> Any:
    """Return the next answer of an engine. Raises TimeoutError after ``DEADLINE_S``."""
    if not engine.poll(DEADLINE_S):
        raise TimeoutError(f"an engine has not answered within {DEADLINE_S:.0f} seconds")
    return engine.recv()


def measure(columns: dict[str, dict[str, Any]], rounds: Sequence[Prompts]) -> dict[str, list[float]]:
    """Return the CPU seconds of each column in each counted round."""
    spawn = multiprocessing.get_context("spawn")
    seconds = {column: list[float]() for column in columns}
    with ExitStack() as stack:
        engines: dict[str, Connection] = {}
        for column, settings in columns.items():
            engines[column], theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(settings, theirs))
            process.start()
            stack.callback(process.join, DEADLINE_S)
            stack.callback(engines[column].send, None)
            answer(engines[column])
        for number, prompts in enumerate(rounds):
            for column in turns(list(columns), number):
                engines[column].send(prompts)
                used, cached = answer(engines[column])
                if cached:
                    raise RuntimeError(f"{cached} tokens were cached with {column}: the prompts repeat")
                if number >= WARM_ROUNDS:
                    seconds[column].append(used)
    return seconds


def table_of(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return one row per column: the median seconds, and the ratios to the first column in equal rounds."""
    base = next(iter(seconds.values()))
    rows = []
    for column, found in seconds.items():
        ratios = sorted(one / other for one, other in zip(found, base, strict=True))
        rows.append(
            {
                "--kv-store": column,
                "CPU seconds, median": f"{statistics.median(found):.2f}",
                "of all rounds": f"{sum(found) / sum(base):.4f}",
                "ratio, median": f"{statistics.median(ratios):.4f}",
                "ratio, smallest and largest": f"{ratios[0]:.3f}, {ratios[-1]:.3f}",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of a turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--checkpoint", default="qwen3-dense-s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rng = random.Random(0)
    rounds = [
        [[rng.randrange(10, 1000) for _ in range(given.tokens)] for _ in range(given.prompts)]
        for _ in range(given.rounds + WARM_ROUNDS)
    ]
    with scratch_folder() as folder:
        settings = {
            "model": str(make(given.checkpoint, folder / "model")),
            "dtype": "bfloat16",
            "threads": given.threads,
            "max_model_len": given.tokens + 64,
            "kv_cache_memory": "256M",
        }
        # A folder each: engines that share a folder find each other's blocks.
        columns = {
            column: settings
            if store is None
            else settings | {"kv_disk": "8G", "kv_disk_dir": str(folder / store), "kv_store": store}
            for column, store in STORES.items()
        }
        seconds = measure(columns, rounds)
    table = record.markdown(table_of(seconds))
    print(table)
    if given.json is not None:
        title = f"CPU time of a disk tier without a hit, {given.checkpoint}"
        record.write(given.json, "bench.kv_idle", title, table, seconds)


if __name__ == "__main__":
    main()
