"""Measure output tokens per second with and without replay of decode steps, interleaved in one run.

python -m bench.replay --model spool-mla --dp 2 --ep --batches 1,2,8

Both engines are loaded at once, with the ranks of --tp and --dp. The ranks of the idle engine sleep.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from bench import record
from bench.depth import rate
from bench.speculation import integers
from weft import LLM


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="spool-mla", help="bundled name, folder or hub name")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--batches", type=integers, default=[1, 8], help="requests at once")
    parser.add_argument("--prompt", type=int, default=16, help="prompt tokens of each")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=5, help="times that each variant runs")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank")
    parser.add_argument("--json", type=Path, help="a file for the numbers; a .md beside it gets the table")
    args = parser.parse_args()
    common: dict[str, Any] = {
        "threads": args.threads,
        "enable_prefix_caching": False,
        "kv_cache_memory": "256M",
        "tensor_parallel_size": args.tp,
        "data_parallel_size": args.dp,
        "enable_expert_parallel": args.ep,
    }
    engines = {
        name: LLM(args.model, decode_graphs=replayed, **common)
        for name, replayed in (("op by op", False), ("replayed", True))
    }
    rows = []
    for batch in args.batches:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(args.rounds + 1):
            for name, llm in engines.items():
                made = rate(llm, batch, args.prompt, args.tokens)
                if turn:  # the first round warms up
                    rates[name].append(made)
        shares = [b / a for a, b in zip(rates["op by op"], rates["replayed"], strict=True)]
        rows.append(
            {
                "requests at once": batch,
                **{f"{name}, tok/s": round(statistics.median(made)) for name, made in rates.items()},
                "times as fast": round(statistics.median(shares), 2),
                "each round": " ".join(f"{share:.2f}" for share in shares),
            }
        )
    for llm in engines.values():
        llm.shutdown()
    table = record.markdown(rows)
    print(table)
    if args.json is not None:
        layout = f"TP {args.tp}, DP {args.dp}{', EP' if args.ep else ''}"
        record.write(
            args.json, "bench.replay", f"Replayed steps: {args.model}, {layout}", table, {"rows": rows}
        )


if __name__ == "__main__":
    main()
