"""Count requests that meet their limits: groups with roles against the same number of unified groups.

    python -m bench.goodput [--variants unified-x3,1p2d] [--rate 0.8] [--ttft 2500] [--tpot 15,40]

Real servers over HTTP run in sequence. Every round sends the same requests at the same times (open loop). A
request counts if its time to first token and its mean time between tokens meet the limits. Each run is
counted once per value of ``--tpot``. All processes of every server may use all cores: no engine is pinned, so
three engines on two cores have equal chances in every role.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench import record
from bench.compare import default_folder, model_folder
from bench.disaggregation import VARIANTS, chosen, serving
from bench.rounds import say
from weft.bench.client import ServerTarget, base_url, http_client, prepare
from weft.bench.load import Limits, run_load
from weft.bench.records import RequestRecord
from weft.bench.schedule import parse_lengths, random_plan
from weft.common.cores import usable_cores


async def load(url: str, args: argparse.Namespace, number: int) -> list[RequestRecord]:
    """Run one round against a warm server and return the records."""
    base = base_url(url)
    limits = Limits(concurrency=None, requests=args.requests, duration=None)
    async with http_client(base, None, None) as client:
        model, kind, words = await prepare(client, base, None, "completions", "ids", 4096, 60.0)
        target = ServerTarget(
            base_url=base,
            model=model,
            endpoint="completions",
            prompts=kind,
            vocab_size=4096,
            words_per_token=words,
            ignore_eos=True,
            extra={"temperature": 0},
        )
        few = Limits(concurrency=4, requests=4, duration=None)
        for key, bounds, rate in ((f"warm-up {number}", few, None), (f"round {number}", limits, args.rate)):
            plan = random_plan(args.input_len, args.output_len, rate, 1.0, number)
            run = await run_load(client, target, plan, bounds, key=key, progress=False)
    bad = [one for one in run.records if one.outcome != "ok"]
    if bad:
        raise RuntimeError(f"{len(bad)} requests failed: {bad[0].outcome}: {bad[0].message}")
    return run.records


def row(name: str, rounds: list[list[RequestRecord]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds."""

    def times(of: str, share: float) -> float:
        found = []
        for records in rounds:
            values = sorted(1e3 * (getattr(one, of) or 0.0) for one in records)
            found.append(values[min(int(share * len(values)), len(values) - 1)])
        return statistics.median(found)

    def gaps(share: float) -> float:
        values = sorted(1e3 * gap for records in rounds for one in records for gap in one.itl)
        return values[min(int(share * len(values)), len(values) - 1)]

    made: dict[str, Any] = {"groups": name}
    for limit in args.tpot:
        kept = [
            sum((one.ttft or 0.0) <= args.ttft / 1e3 and (one.tpot or 0.0) <= limit / 1e3 for one in records)
            for records in rounds
        ]
        shares = [count / len(records) for count, records in zip(kept, rounds, strict=True)]
        each = ", ".join(f"{share:.0%}" for share in shares)
        made[f"met, TPOT {limit:g} ms"] = f"{statistics.median(shares):.0%} ({each})"
        made[f"goodput, {limit:g} ms"] = round(args.rate * statistics.median(shares), 2)
    return made | {
        "TTFT p50 ms": round(times("ttft", 0.5)),
        "TTFT p99": round(times("ttft", 0.99)),
        "TPOT p50 ms": round(times("tpot", 0.5), 1),
        "TPOT p99": round(times("tpot", 0.99), 1),
        "ITL p99 ms": round(gaps(0.99), 1),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-dense-s", help="bundled, a name of weft bench, or a folder")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="for checkpoints")
    parser.add_argument("--variants", default="unified-x3,1p2d")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second, Poisson")
    parser.add_argument("--input-len", default="512:1024")
    parser.add_argument("--output-len", default="32:64")
    parser.add_argument("--ttft", type=float, default=2500.0, help="limit in ms")
    parser.add_argument("--tpot", default="15,40", help="limits in ms")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds until a server answers")
    parser.add_argument("--name", help="of the result in bench/results")
    args = parser.parse_args()
    args.variants = chosen(parser, args.variants)
    args.tpot = [float(one) for one in args.tpot.split(",")]
    args.input_len = parse_lengths(args.input_len, "--input-len")
    args.output_len = parse_lengths(args.output_len, "--output-len")
    return args


def main() -> None:
    args = arguments()
    model = str(model_folder(args.model, args.folder))
    found: dict[str, list[list[RequestRecord]]] = {name: [] for name in args.variants}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name in args.variants if number % 2 == 0 else args.variants[::-1]:
                longest = args.input_len.high + args.output_len.high + 64
                flags = VARIANTS[name].format(cores=usable_cores(), target=min(args.tpot))
                flags = f"--max-model-len {longest} {flags}"
                with serving(flags, model, args.dtype, args.deadline, Path(folder) / f"{name}.log") as server:
                    found[name].append(asyncio.run(load(server.url, args, number)))
                say(f"round {number + 1}/{args.rounds}: {row(name, found[name][-1:], args)}")
    rows = [row(name, rounds, args) for name, rounds in found.items()]
    table = record.markdown(rows)
    print(table)
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        title = f"Requests within limits, TTFT {args.ttft:g} ms: {args.rate:g} a second of {args.model}"
        record.write(path, "bench.goodput", title, table, {"rows": rows})


if __name__ == "__main__":
    main()
