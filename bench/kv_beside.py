"""Measure the time between tokens of a stream while other prompts load their blocks from disk.

    python -m bench.kv_beside [--json bench/results/kv-beside-mine.json] [--prompts 8] [--tokens 2048]

One engine computes the prompts of all rounds and stores the blocks. A second engine makes one stream of
tokens per round and row: alone; beside prompts that load from disk; beside the same prompts as hits in
memory. Prompts arrive at equal distances in tokens of the stream. All prompts compute their last block, so
the cost of the loads is the difference between the last two rows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.scratch import scratch_folder
from weft import LLM, AsyncLLM, SamplingParams
from weft.bench.checkpoints import make
from weft.bench.stats import percentile

COLUMNS = ("alone", "beside loads", "beside hits in memory")
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


async def one_stream(llm: AsyncLLM, tokens: int, prompts: Sequence[list[int]]) -> tuple[list[float], int]:
    """Make a stream of ``tokens`` tokens, and begin each of ``prompts`` after an equal part of the stream.
    Return (seconds between tokens, cached tokens of all prompts)."""
    beside: list[asyncio.Task[int]] = []
    starts = {(1 + at) * tokens // (len(prompts) + 1): prompt for at, prompt in enumerate(prompts)}

    async def run(prompt: list[int]) -> int:
        async for output in llm.generate({"prompt_token_ids": prompt}, ONE_TOKEN):
            cached = output.num_cached_tokens
        return cached or 0

    gaps, made, last = list[float](), 0, 0.0
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    async for output in llm.generate({"prompt_token_ids": [5] * 8}, params):
        now, count = time.perf_counter(), len(output.outputs[0].token_ids)
        gaps += [(now - last) / (count - made)] * (count - made) if made else []
        for number in range(made + 1, count + 1):
            if (prompt := starts.get(number)) is not None:
                beside.append(asyncio.create_task(run(prompt)))
        made, last = count, now
    return gaps, sum(await asyncio.gather(*beside))


async def measure(settings: dict[str, Any], rounds: Sequence[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Return the seconds between tokens, and the cached tokens, of each column."""
    gaps = {column: list[float]() for column in COLUMNS}
    cached = dict.fromkeys(COLUMNS, 0)
    llm = AsyncLLM(**settings)
    try:
        # The first steps of a process, with and without prompts, are slower than later steps.
        await one_stream(llm, 16, [[7] * 200])
        for prompts in rounds:
            for column, others in zip(COLUMNS, ([], prompts, prompts), strict=True):
                found, count = await one_stream(llm, tokens, others)
                gaps[column] += found
                cached[column] += count
    finally:
        llm.shutdown()
    return {"gaps": gaps, "cached": cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream", type=int, default=256, help="tokens of the stream")
    parser.add_argument("--checkpoint", default="qwen3-dense-s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rng = random.Random(0)
    rounds = [
        [[rng.randrange(10, 1000) for _ in range(given.tokens)] for _ in range(given.prompts)]
        for _ in range(given.rounds)
    ]
    with scratch_folder() as folder:
        settings = {
            "model": str(make(given.checkpoint, folder / "model")),
            "dtype": "bfloat16",
            "threads": given.threads,
            "max_model_len": given.tokens + given.stream,
            "kv_cache_memory": "2G",
            "kv_disk": "8G",
            "kv_disk_dir": str(folder / "kv"),
            "kv_store": "all",
        }
        with LLM(**settings) as llm:
            llm.generate([{"prompt_token_ids": each} for one in rounds for each in one], ONE_TOKEN)
        found = asyncio.run(measure(settings, rounds, given.stream))
    rows = [
        {"stream": column, "cached tokens": found["cached"][column]}
        | {f"p{share}, ms": f"{1000 * percentile(gaps, share):.1f}" for share in (50, 90, 99, 100)}
        for column, gaps in found["gaps"].items()
    ]
    table = record.markdown(rows)
    print(table)
    if given.json is not None:
        title = f"Time between tokens beside loads of {given.tokens} tokens, {given.checkpoint}"
        record.write(given.json, "bench.kv_beside", title, table, found)


if __name__ == "__main__":
    main()
