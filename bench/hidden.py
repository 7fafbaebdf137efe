"""Measure how much of a transfer prefill hides, with one prefill and one decode group.

    python -m bench.hidden [--model qwen3-dense-s] [--lengths 512,1024,2048,4096] [--name NAME]

Prompts arrive one at a time over HTTP. Each group has a core of its own. The prefill engine reports two times
per transfer: from the first byte to the last byte (``weft:transfer_seconds``), and from the first token until
the decode engine has the whole cache (``weft:transfer_exposed_seconds``). A client waits for the second time.
The hidden share is 1 minus the second divided by the first.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench import record
from bench.compare import default_folder, model_folder
from bench.disaggregation import VARIANTS, pin, serving
from bench.rounds import say
from weft.bench.process import ServerProcess
from weft.bench.workloads import random_ids

HEARTBEAT_S = 1.2
"""Maximum seconds until an engine has reported its counters."""


def counters(url: str) -> dict[str, float]:
    """Return sums of the prefill engine's transfer metrics at ``url``."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    found = {}
    for name in ("transfer_exposed_seconds_sum", "transfer_seconds_sum", "transfers_sent_bytes_total"):
        line = re.search(rf'^weft:{name}\{{[^}}]*role="prefill"[^}}]*\}} (\S+)$', text, re.MULTILINE)
        found[name] = float(line[1]) if line else 0.0
    done = re.search(r'^weft:transfers_done_total\{[^}]*role="prefill"[^}]*\} (\S+)$', text, re.MULTILINE)
    return found | {"done": float(done[1]) if done else 0.0}


def prompts(server: ServerProcess, length: int, count: int, key: str, vocabulary: int) -> list[float]:
    """Seconds to the answer's end of each, which has four tokens."""
    took = []
    with httpx.Client(timeout=120, trust_env=False) as http:
        for number in range(count):
            ids = random_ids(f"{key} {length} {number}", length, vocabulary)
            body = {"model": server.model, "prompt": ids, "max_tokens": 4, "temperature": 0}
            began = time.monotonic()
            answer = http.post(f"{server.url}/v1/completions", json={**body, "ignore_eos": True})
            answer.raise_for_status()
            took.append(time.monotonic() - began)
    return took


def measure(server: ServerProcess, length: int, count: int, vocabulary: int) -> dict[str, Any]:
    """Return one row of a transport: means over ``count`` prompts. Raise RuntimeError if transfers are
    missing.
    """
    prompts(server, length, 1, "warm-up", vocabulary)
    time.sleep(HEARTBEAT_S)
    before = counters(server.url)
    took = prompts(server, length, count, "measured", vocabulary)
    time.sleep(HEARTBEAT_S)
    after = counters(server.url)
    made = {name: (after[name] - before[name]) / count for name in before}
    if made["done"] != 1:
        raise RuntimeError(f"{made['done'] * count:g} transfers of {count} prompts")
    exposed, whole = made["transfer_exposed_seconds_sum"], made["transfer_seconds_sum"]
    return {
        "prompt": length,
        "MB": round(made["transfers_sent_bytes_total"] / 1e6, 1),
        "answer ms": round(1e3 * statistics.median(took)),
        "first to last byte ms": round(1e3 * whole, 1),
        "exposed ms": round(1e3 * exposed, 2),
        "hidden": f"{1 - exposed / whole:.1%}" if whole > 0 else "-",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-dense-s", help="bundled, a name of weft bench, or a folder")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="for checkpoints")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="prompt tokens")
    parser.add_argument("--count", type=int, default=6, help="prompts of each length")
    parser.add_argument("--name", help="of the result in bench/results")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    model = str(model_folder(args.model, args.folder))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        for transport in ("shm", "tcp"):
            flags = f"--transfer {transport} --group-secret {secret} --max-model-len {max(lengths) + 64}"
            flags = f"{flags} {VARIANTS['1p1d']}"
            with serving(flags, model, args.dtype, 300, Path(folder) / "log") as server:
                assert server.pid is not None
                pin(server.pid, sorted(os.sched_getaffinity(0)))
                for length in lengths:
                    rows.append({"transport": transport, **measure(server, length, args.count, 4096)})
                    say(str(rows[-1]))
    table = record.markdown(rows)
    print(table)
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        title = f"What of a transfer is hidden under prefill: {args.model} in {args.dtype}"
        record.write(path, "bench.hidden", title, table, {"rows": rows})


if __name__ == "__main__":
    main()
