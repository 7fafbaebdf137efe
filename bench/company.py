"""Measure an engine beside busy processes: decode and start-up beside 0, 2 and 4 processes.

python -m bench.company --name company-mine
python -m bench.company --engines weft,weft-tp2,vllm --model qwen3-dense-s --rounds 5

Each round starts every engine anew for every number of busy processes; the engine then decodes one request.
With N busy processes on C cores, an engine of T threads has a fair share of the cores if the engine takes
max(1, (N + T) / C) / max(1, T / C) times as long as alone. Engines without a set-up are skipped
(bench/README.md explains the set-up).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.compare import default_folder, model_folder
from bench.driver import Driver, PeerError, pinned
from bench.rounds import say
from bench.rows import Missing, Row, Setting, build
from weft.bench.workloads import WORKLOADS, prompts
from weft.common.cores import usable_cores

HERE = Path(__file__).parent
BUSY = "while True: pass"
ENGINES = {"weft": "", "weft-tp2": "--tensor-parallel-size 2 --threads 1"}
"""Rows of Weft. Peers are added to these rows."""


@contextlib.contextmanager
def company(count: int) -> Iterator[None]:
    """Run ``count`` processes that only compute. The processes end with the context, also after an
    exception.
    """
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def fair(count: int, threads: int, cores: int) -> float:
    """Return the slowdown of work with a fair share of the cores beside ``count`` processes."""
    return max(1.0, (count + threads) / cores) / max(1.0, threads / cores)


def once(
    row: Row, setting: Setting, ids: Sequence[Sequence[int]], args: argparse.Namespace
) -> dict[str, float]:
    """Start the engine, decode one request, end the engine. Raise PeerError.

    Return the seconds of the start and the milliseconds per token.
    """
    log = setting.folder / "logs" / f"{row.name}-company.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    driver = Driver(pinned(row.driver, setting.threads), row.environment, log)
    try:
        ready = driver.ask(row.load_message(setting), args.deadline)["ready_s"]
        message = {"run": "company", "prompts": ids, "output_tokens": args.tokens}
        driver.ask({**message, "output_tokens": 8}, args.deadline)
        seconds = driver.ask(message, args.deadline)["seconds"]
    finally:
        driver.close()
    return {"start_s": ready, "ms_per_token": 1e3 * seconds / args.tokens}


def measure(
    rows: Sequence[Row], setting: Setting, args: argparse.Namespace
) -> dict[str, dict[int, list[Any]]]:
    """Return samples by engine and by number of busy processes, one sample per round. Drop an engine after a
    failure.
    """
    samples: dict[str, dict[int, list[Any]]] = {row.name: {count: [] for count in args.busy} for row in rows}
    vocabulary = json.loads((setting.model / "config.json").read_text())["vocab_size"]
    for number in range(args.rounds):
        for count in args.busy:
            for row in rows:
                if row.name not in samples:
                    continue
                try:
                    with company(count):
                        found = once(row, setting, prompts(WORKLOADS["W2"], number, vocabulary), args)
                except PeerError as error:
                    say(f"{row.name} beside {count}: FAILED: {error}")
                    del samples[row.name]
                    continue
                samples[row.name][count].append(found)
                say(
                    f"round {number + 1}/{args.rounds}: {row.name} beside {count}: ready in "
                    f"{found['start_s']:.1f} s, {found['ms_per_token']:.2f} ms a token"
                )
    return samples


def table(samples: Mapping[str, Mapping[int, Sequence[Mapping[str, float]]]], threads: int) -> str:
    """Return a table of medians and of ratios to the medians alone."""
    rows = []
    for name, by_count in samples.items():
        alone = min(by_count)
        for count in by_count:
            row: dict[str, Any] = {"engine": name, "busy processes": count}
            for measure in ("ms_per_token", "start_s"):
                here, base = (
                    statistics.median(one[measure] for one in by_count[number]) for number in (count, alone)
                )
                row |= {measure: f"{here:.2f}", f"{measure}, times alone": f"{here / base:.2f}"}
            rows.append({**row, "fair share": f"{fair(count, threads, usable_cores()):.2f}"})
    return record.markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="weft,weft-tp2,vllm,llamacpp", help="default %(default)s")
    parser.add_argument("--model", default="spool-text", help="bundled, a name of weft bench, or a folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4], help="default 0 2 4")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=600, help="seconds of a start or a run")
    parser.add_argument("--dir", type=Path, default=default_folder(), help="where setup.sh put the peers")
    parser.add_argument("--name", help="of result files in bench/results; without it nothing is written")
    args = parser.parse_args()
    setting = Setting(
        model=model_folder(args.model, args.dir),
        dtype=args.dtype,
        threads=args.threads,
        max_len=512,
        max_seqs=4,
        folder=args.dir,
    )
    built = build(args.engines.split(","), ENGINES, setting)
    for name, row in built.items():
        if isinstance(row, Missing):
            say(f"{name} is missing: {row}")
    samples = measure([row for row in built.values() if isinstance(row, Row)], setting, args)
    made = table(samples, args.threads)
    print(made)
    if args.name:
        title = "Weft beside busy processes"
        path = HERE / "results" / f"{args.name}.json"
        record.write(path, "bench.company", title, made, {"samples": samples})


if __name__ == "__main__":
    main()
