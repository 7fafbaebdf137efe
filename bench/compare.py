"""Compare Weft with other engines on this machine: interleaved rounds, a table and every sample.

bash bench/peers/setup.sh                 # once: the peers' environments
python -m bench.compare --name mine       # or: make bench
python -m bench.compare --engines weft-int8,vllm-int8,llamacpp-int8,openvino-int8
python -m bench.compare --engines weft,weft-spec,vllm --weft-args 'weft-spec=--speculative-method ngram'
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine, rows, tables
from bench.record import of_any_machine
from bench.rounds import Deadlines, Session, say
from bench.served import Serving
from weft.bench import checkpoints
from weft.bench.workloads import WORKLOADS, Workload
from weft.common.errors import ConfigError, WeftError
from weft.config.hub import BUNDLED

HERE = Path(__file__).parent
FORMAT = 1
#: Workload of the determinism check.
SAME_TOKENS = WORKLOADS["W1"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ",".join(rows.default(machine.cpuinfo()))
    made.add_argument(
        "--engines",
        default=default,
        help=f"names of rows; {', '.join(rows.QUANTIZED)} also with -int8 or -int4; default {default}",
    )
    made.add_argument(
        "--weft-args",
        action="append",
        default=[],
        metavar="[NAME=]FLAGS",
        help="a row NAME that is Weft with more flags of weft serve (weft itself without NAME); repeatable",
    )
    made.add_argument("--workloads", default=",".join(WORKLOADS), help="default %(default)s")
    made.add_argument("--rounds", type=int, default=5, help="measured rounds, after a warm-up; default 5")
    made.add_argument(
        "--model", default="qwen3-dense-s", help="a checkpoint that weft bench can make, or a folder"
    )
    made.add_argument("--dtype", default="bfloat16", help="default bfloat16")
    made.add_argument("--threads", type=int, default=2, help="CPU threads of every engine; default 2")
    made.add_argument("--name", default="", help="name of the result files; default MODEL")
    made.add_argument("--results", type=Path, default=HERE / "results", help="folder of the result files")
    made.add_argument("--dir", type=Path, default=default_folder(), help="folder of the peers, from setup.sh")
    made.add_argument(
        "--one-at-a-time", action="store_true", help="load one engine at a time, to save memory"
    )
    made.add_argument("--no-determinism", action="store_true", help="don't compare tokens between runs")
    made.add_argument("--load-deadline", type=float, default=600, help="seconds to load; default 600")
    made.add_argument("--run-deadline", type=float, default=600, help="seconds of one run; default 600")
    return made


def default_folder() -> Path:
    return Path(os.environ.get("WEFT_BENCH_DIR") or Path.home() / ".cache/weft/bench")


def weft_rows(given: Sequence[str]) -> dict[str, str]:
    """Return ``--weft-args`` as {row name: flags}. Text that starts with a dash belongs to row ``weft``.

    Raise SystemExit for the name of a peer or an unknown flag.
    """
    found: dict[str, str] = {}
    for text in given:
        name, _, flags = ("weft", "", text) if text.lstrip().startswith("-") else text.partition("=")
        if rows.parted(name)[0] in rows.ENVIRONMENTS:
            raise SystemExit(f"--weft-args: {name} is the name of a peer")
        rows.keywords(shlex.split(flags))  # reject an unknown flag before any engine starts
        found[name] = flags
    return found


def chosen(names: str) -> list[Workload]:
    """Return the workloads in ``names``. Raise SystemExit for an unknown name."""
    unknown = [name for name in names.split(",") if name not in WORKLOADS]
    if unknown:
        raise SystemExit(f"no workload {unknown[0]!r}; known: {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in names.split(",")]


def model_folder(name: str, folder: Path) -> Path:
    """Return the folder of checkpoint ``name``: a bundled model, an existing folder, or a folder made on
    first use.
    """
    if (BUNDLED / name).is_dir():
        return BUNDLED / name
    if Path(name).is_dir():
        return Path(name).resolve()
    say(f"checkpoint {name}")
    target = folder / "models" / name
    try:
        return checkpoints.make(name, target, 0, progress=False)
    except ConfigError:
        # An earlier version of the recipe made the folder of this script: make the folder again.
        if name not in checkpoints.RECIPES or not (target / "weft_bench.json").is_file():
            raise
    shutil.rmtree(target)
    return checkpoints.make(name, target, 0, progress=False)


def sizes(workloads: Sequence[Workload], same_tokens: bool) -> tuple[int, int]:
    """Return (max_len, max_seqs) for every engine: the needs of the workloads, with max_len rounded up to
    256.
    """
    needed = [*workloads, *([SAME_TOKENS] if same_tokens else [])]
    longest = max(one.prompt_tokens + one.output_tokens for one in needed)
    widest = max(one.concurrency or one.requests for one in needed)
    return -(-(longest + 16) // 256) * 256, widest


def measure(
    engines: Sequence[rows.Row],
    setting: rows.Setting,
    args: argparse.Namespace,
    vocabulary: int,
    records: dict[str, dict[str, Any]],
) -> None:
    """Run all measurements on engines that are loaded together. Fill ``records``, also when interrupted."""
    deadlines = Deadlines(load=args.load_deadline, run=args.run_deadline)
    logs = setting.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    workloads = chosen(args.workloads)
    offline = [one for one in workloads if one.concurrency is None]
    records |= {row.name: {"samples": {}} for row in engines}
    if offline:
        session = Session(engines, setting, deadlines, vocabulary, logs)
        records |= session.records
        with session:
            session.rounds(offline, args.rounds)
            if not args.no_determinism:
                session.determinism(SAME_TOKENS, 64)
    for workload in workloads:
        if workload.concurrency is not None:
            serving = Serving(engines, setting, deadlines, logs)
            for name, record in serving.records.items():
                records[name]["server"] = record
            with serving:
                serving.rounds(workload, args.rounds)


def setting_of(args: argparse.Namespace, workloads: Sequence[Workload]) -> rows.Setting:
    """Return the settings that all engines share. Make the checkpoint if absent."""
    max_len, max_seqs = sizes(workloads, same_tokens=not args.no_determinism)
    return rows.Setting(
        model=model_folder(args.model, args.dir),
        dtype=args.dtype,
        threads=args.threads,
        max_len=max_len,
        max_seqs=max_seqs,
        folder=args.dir,
    )


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the comparison and returns the result."""
    begun = machine.describe()
    workloads = chosen(args.workloads)
    given = weft_rows(args.weft_args)
    names = list(dict.fromkeys([*args.engines.split(","), *given]))
    own = rows.own(names, given)
    setting = setting_of(args, workloads)
    built = rows.build(names, own, setting)
    ready = [row for row in built.values() if isinstance(row, rows.Row)]
    missing = {name: str(why) for name, why in built.items() if isinstance(why, rows.Missing)}
    for name, why in missing.items():
        say(f"{name} is missing: {why}")
    vocabulary = json.loads((setting.model / "config.json").read_text())["vocab_size"]
    records: dict[str, dict[str, Any]] = {}
    interrupted = False
    # SIGTERM becomes KeyboardInterrupt, so that finished measurements are still written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for together in [[row] for row in ready] if args.one_at_a_time else [ready]:
            measure(together, setting, args, vocabulary, records)
    except KeyboardInterrupt:
        say("interrupted: the finished measurements are written")
        interrupted = True
    for name, record in records.items():
        record["weft"] = name == "weft" or name in own
        record["flags"] = own.get(name, "")
    return {
        "format": FORMAT,
        "name": args.name or setting.model.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench.compare", *sys.argv[1:]]),
        "commit": machine.commit(HERE.parent),
        "machine": begun,
        "load_average_after": list(os.getloadavg()),
        "model": setting.model.name,
        "dtype": args.dtype,
        "threads": args.threads,
        "max_len": setting.max_len,
        "max_seqs": setting.max_seqs,
        "rounds": args.rounds,
        "interrupted": interrupted,
        "order": "one engine after the other"
        if args.one_at_a_time
        else "interleaved; an engine is stopped (SIGSTOP) while it is not its turn",
        "workloads": {one.name: one.about for one in workloads},
        "missing": missing,
        "engines": {name: records[name] for name in names if name in records},
    }


def main() -> None:
    args = parser().parse_args()
    try:
        # The error text of a peer may contain paths of this machine.
        result = json.loads(of_any_machine(json.dumps(compare(args))))
    except WeftError as error:
        sys.exit(f"compare: {error.message}")
    args.results.mkdir(parents=True, exist_ok=True)
    files = [args.results / f"{result['name']}.{kind}" for kind in ("json", "md")]
    text = tables.page(result)
    files[0].write_text(json.dumps(result, indent=1) + "\n")
    files[1].write_text(text)
    print(text)
    say(f"wrote {files[0]} and {files[1]}")
    sys.exit(1 if not result["engines"] else 0)


if __name__ == "__main__":
    main()
