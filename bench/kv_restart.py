"""Measure a conversation that continues after a restart, with blocks from disk and with a computed prompt.

    python -m bench.kv_restart [--tokens 8192] [--checkpoint qwen3-dense-s] [--threads 1] [--idle 0]

One engine computes a prompt of random ids and stores the blocks. A second engine loads the blocks past the
page cache, ``--idle`` seconds after its start: an idle engine prepares memory for loads. Both make one token,
and the tokens must be equal. The time of the disk alone is a read of the same files in pieces of 4 MiB with
O_DIRECT. The same prompt again is a hit in memory. Its time is the time of the last chunk, which is always
computed.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

from bench.scratch import scratch_folder
from weft import LLM, SamplingParams
from weft.bench.checkpoints import make
from weft.engine.tiers.read_ahead import RUN_BYTES
from weft.store.records import RecordBuffer

_Made = tuple[float, float, Any]


def first_token(settings: dict[str, Any], prompt: list[int], idle: float = 0.0) -> tuple[_Made, _Made]:
    """Return (seconds to the first token, CPU seconds, the output) of a new engine that was ``idle`` seconds
    idle, and of the same prompt once more."""
    with LLM(**settings) as llm:
        # The first steps of a process are slower than later steps.
        llm.generate([{"prompt_token_ids": [5] * 8}], SamplingParams(max_tokens=2, temperature=0))
        time.sleep(idle)
        made = list[_Made]()
        for _ in range(2):
            wall, cpu = time.perf_counter(), time.process_time()
            (output,) = llm.generate(
                [{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, temperature=0, logprobs=1)
            )
            made.append((time.perf_counter() - wall, time.process_time() - cpu, output))
        return made[0], made[1]


def disk_seconds(folder: Path) -> tuple[int, float]:
    """Return (bytes, seconds) of a read of all segments past the page cache."""
    buffer, nbytes, began = RecordBuffer(RUN_BYTES).payload, 0, time.perf_counter()
    for path in folder.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for at in range(0, os.fstat(fd).st_size, RUN_BYTES):
            nbytes += os.preadv(fd, [buffer.data], at)
        os.close(fd)
    return nbytes, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--checkpoint", default="qwen3-dense-s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds before the prompt after the restart")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: the cache folder"
    )
    given = parser.parse_args()
    with scratch_folder(given.folder) as folder:
        model = make(given.checkpoint, folder / "model")
        rng = random.Random(0)
        prompt = [rng.randrange(10, 1000) for _ in range(given.tokens)]
        settings = {
            "model": str(model),
            "dtype": "bfloat16",
            "threads": given.threads,
            "max_model_len": given.tokens + 64,
            "kv_cache_memory": "1G",
            "kv_disk": "4G",
            "kv_disk_dir": str(folder / "kv"),
            "kv_store": "all",
        }
        computed, _ = first_token(settings, prompt)
        nbytes, seconds = disk_seconds(folder / "kv")
        loaded, hit = first_token(settings, prompt, given.idle)
        same = computed[2].outputs[0].token_ids == loaded[2].outputs[0].token_ids
        print(f"{given.tokens} tokens, {nbytes / 1e6:.0f} MB on disk, load {os.getloadavg()[0]:.1f}")
        print(f"disk alone   {seconds:8.3f} s, {nbytes / 1e9 / seconds:.2f} GB/s")
        for name, (wall, cpu, output) in (("computed", computed), ("loaded", loaded), ("in memory", hit)):
            print(f"{name:10} TTFT {wall:8.3f} s, CPU {cpu:7.3f} s, {output.num_cached_tokens} tokens cached")
        goal = 1.3 * seconds + hit[0]
        print(f"loaded / (1.3 x disk + the last chunk): {loaded[0] / goal:.2f}")
        print(f"{computed[0] / loaded[0]:.1f} times quicker, tokens equal: {same}")


if __name__ == "__main__":
    main()
