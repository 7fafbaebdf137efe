"""Measure attention of one layer at long contexts, as a share of the machine's limit.

python -m bench.long_context --json bench/results/long-context-mine.json --before OLD/libweft_cpu.so

Each case is one call of the C++ operations for one layer in bf16, or with an FP8 cache. ``bound`` is the
larger of two times: the bytes of the cache (and of the latent matrices) at the speed of reading memory, and
the operations at the speed of torch's fastest product of 1024 x 1024 matrices. Both speeds are measured
between the rounds of the cases. A choice and the attention of a sparse case are bounded separately.

With ``--before`` a second process loads that library, and both processes take turns round by round. All
times and speeds are the best of all rounds, because a shared machine disturbs single rounds.
"""

from __future__ import annotations

import argparse
import json
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import gemm, record
from bench.sparse import MODELS, Work
from weft.attention.sparse.sparse_cpu import CpuSparse
from weft.ops import kv_fp8
from weft.ops.cpu import build
from weft.ops.cpu import latent as latent_ops

Tensor = torch.Tensor
Call = Callable[[], object]

BLOCK = 64
CHUNK = 64
"""Tokens of a sparse prefill."""
PAUSE = 0.05
"""Seconds before a measurement. The threads of another process's last operation spin for a while."""
WAIT = 300.0
"""Maximum seconds for an answer of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One form of attention. ``heads`` are query heads. Latent cases have a line of ``dim`` per position."""

    kind: str
    heads: int
    kv_heads: int = 1
    dim: int = 128
    fp8: bool = False
    window: int = 0
    rope: int = 64
    tokens: int = 1


CASES = {
    "dense 12/4 x 64": Case(kind="dense", heads=12, kv_heads=4, dim=64),
    "dense 32/8 x 128": Case(kind="dense", heads=32, kv_heads=8),
    "dense 64/8 x 128": Case(kind="dense", heads=64, kv_heads=8),
    "dense 32/8 x 128, fp8": Case(kind="dense", heads=32, kv_heads=8, fp8=True),
    "window 4096, 32/8 x 128": Case(kind="dense", heads=32, kv_heads=8, window=4096),
    "latent, 8 heads, 128 + 32": Case(kind="latent", heads=8, dim=160, rope=32),
    "latent, 16 heads, 512 + 64": Case(kind="latent", heads=16, dim=576),
    "latent, 128 heads, 512 + 64": Case(kind="latent", heads=128, dim=576),
    "V3.2 decode": Case(kind="V3.2", heads=16),
    "V4 decode": Case(kind="V4", heads=16),
    "V3.2 prefill": Case(kind="V3.2", heads=16, tokens=CHUNK),
    "V4 prefill": Case(kind="V4", heads=16, tokens=CHUNK),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A timed call with its least bytes from memory and its operations."""

    call: Call
    bytes: float
    flops: float


def dense(case: Case, context: int, rows: int) -> list[Part]:
    """Return one call over ``rows`` sequences with shuffled blocks, each at the end of its context."""
    blocks = -(-context // BLOCK)
    table = (torch.randperm(rows * blocks) + 1).view(rows, blocks)
    some = torch.randn(64, 2, case.kv_heads, BLOCK, case.dim).bfloat16()
    scales = None
    if case.fp8:
        some, scales = kv_fp8.quantize(some)
        scales = _repeated(scales, rows * blocks + 1)
    cache = _repeated(some, rows * blocks + 1)
    q = torch.randn(rows, case.heads, case.dim).bfloat16()
    out = torch.empty_like(q)
    offsets, starts = torch.arange(rows + 1, dtype=torch.int32), torch.full((rows,), context - 1)

    def call() -> None:
        attend = torch.ops.weft_cpu.attend.default
        attend(q, out, cache, offsets, starts, table, case.window, case.dim**-0.5, 0, None, scales)

    seen = rows * (min(context, case.window) if case.window else context)
    line = case.dim + 4 if case.fp8 else 2 * case.dim
    flops = 4.0 * seen * case.heads * case.dim
    return [Part(call=call, bytes=2.0 * seen * case.kv_heads * line, flops=flops)]


def latent(case: Case, context: int, rows: int) -> list[Part]:
    """Return one call of the absorbed form, with the products before and after."""
    blocks, lora = -(-context // BLOCK), case.dim - case.rope
    table = (torch.randperm(rows * blocks) + 1).view(rows, blocks)
    cache = _repeated(torch.randn(64, BLOCK, case.dim).bfloat16(), rows * blocks + 1)
    nope = value = 128 if lora == 512 else 64
    ups = (torch.randn(2, case.heads, nope, lora) * 0.02).bfloat16()
    packed = latent_ops.latent_up(ups[0], ups[1])
    q = torch.randn(rows, case.heads, nope + case.rope).bfloat16()
    out = torch.empty(rows, case.heads, value, dtype=torch.bfloat16)
    cos, sin = torch.rand(2, rows, case.rope // 2)
    offsets, starts = torch.arange(rows + 1, dtype=torch.int32), torch.full((rows,), context - 1)
    scale = (nope + case.rope) ** -0.5

    def call() -> None:
        absorbed = torch.ops.weft_cpu.latent_absorbed.default
        of_rows = (q, cos, sin, True, out, cache, offsets, starts, table)
        absorbed(*of_rows, packed.absorb, packed.values, lora, 0, scale)

    flops = 2.0 * rows * (context * case.heads * (case.dim + lora) + ups.numel())
    return [Part(call=call, bytes=2.0 * (rows * context * case.dim + ups.numel()), flops=flops)]


def sparse(case: Case, context: int, rows: int) -> list[Part]:
    """Return the choice and the attention of ``case.tokens`` tokens of each of ``rows`` sequences."""
    work = Work(MODELS[case.kind], context, case.tokens, rows)
    backend, reads = CpuSparse(), work.reads
    core = work.core(None)
    chosen = backend.select(work.index_q, work.weights, core, reads)
    choice, attention = work.flops
    groups = context // reads.ratio
    keys = min(groups, reads.top) + reads.window
    # At best the tokens of a sequence share all reads.
    index_bytes = 2.0 * rows * groups * work.index_q.shape[2] if groups > reads.top else 0.0
    return [
        Part(
            call=lambda: backend.select(work.index_q, work.weights, core, reads),
            bytes=index_bytes,
            flops=choice,
        ),
        Part(
            call=lambda: backend.attend(work.q, work.out, core, reads, chosen),
            bytes=2.0 * rows * keys * reads.dim,
            flops=attention,
        ),
    ]


def _repeated(some: Tensor, blocks: int) -> Tensor:
    """Return ``blocks`` blocks that repeat the contents of ``some``."""
    made = torch.empty(blocks, *some.shape[1:], dtype=some.dtype)
    for part in made.split(len(some)):
        part.copy_(some[: len(part)])
    return made


def parts_of(name: str, context: int, rows: int) -> list[Part]:
    case = CASES[name]
    torch.manual_seed(0)
    return {"dense": dense, "latent": latent}.get(case.kind, sparse)(case, context, rows)


def best(part: Part, seconds: float) -> float:
    """Return the shortest time of a call, from at least one call and about ``seconds``."""
    least, until = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < until or least == float("inf"):
        part.call()
        least = min(least, time.perf_counter() - began)
    return least


class Limits:
    """Speeds of memory and of products, the best of all rounds."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def measure(self, turns: int) -> None:
        for name, value in gemm.limits(turns).items():
            self.found[name] = max(value, self.found.get(name, 0.0))

    def seconds(self, part: Part) -> tuple[float, float]:
        """Return the least seconds of reading and of multiplying."""
        rate = max(self.found["bf16 GFLOP/s"], self.found["f32 GFLOP/s"])
        return part.bytes / self.found["read GB/s"] / 1e9, part.flops / rate / 1e9


def work_for_parent(library: str, threads: int) -> None:
    """Answer the parent's requests on stdin: ["make", name, context, rows] or ["time", seconds]."""
    torch.set_num_threads(threads)
    torch.ops.load_library(library)
    parts: list[Part] = []
    answer: list[Any]
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "make":
            parts = []  # frees the memory of the last case first
            parts = parts_of(*arguments)
            answer = [[part.bytes, part.flops] for part in parts]
        else:
            answer = [best(part, arguments[0]) for part in parts]
        print(json.dumps(answer), flush=True)


class Worker:
    """A process with one library. Every answer has a deadline of ``WAIT`` seconds."""

    def __init__(self, library: Path, threads: int) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.long_context",
            "--threads",
            str(threads),
            "--worker",
            str(library),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *request: object) -> Any:
        """Return the answer to a request. Raise SystemExit if the worker ends or is late."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if ready.select(WAIT) else ""
        if not line:
            self.close()
            raise SystemExit(f"the worker gave no answer to {request}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(workers: dict[str, Worker], limits: Limits, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each case, context and number of rows: the work and the best times by worker."""
    results = []
    for name in args.cases:
        for context in args.contexts:
            for rows in args.rows if CASES[name].tokens == 1 else [1]:
                for worker in workers.values():
                    work = worker.ask("make", name, context, rows)
                times: dict[str, list[float]] = {}
                for _ in range(args.rounds):
                    limits.measure(1)
                    for label, worker in workers.items():
                        time.sleep(PAUSE)
                        found = worker.ask("time", args.seconds)
                        least = times.get(label, found)
                        times[label] = [min(pair) for pair in zip(found, least, strict=True)]
                results.append({"case": name, "context": context, "rows": rows, "work": work, "times": times})
                print(name, context, rows, times, file=sys.stderr)
    return results


def table(results: Sequence[dict[str, Any]], limits: Limits) -> str:
    """Return the results in Markdown."""
    lines = []
    for made in results:
        bounds = [limits.seconds(Part(call=int, bytes=b, flops=f)) for b, f in made["work"]]
        reading, products = (sum(column) for column in zip(*bounds, strict=True))
        bound = sum(max(pair) for pair in bounds)
        line = {
            "case": made["case"],
            "context": f"{made['context']:,}",
            "rows": made["rows"],
            "reading ms": f"{1e3 * reading:.3f}",
            "products ms": f"{1e3 * products:.3f}",
        }
        for label, seconds in made["times"].items():
            line[f"{label} ms"] = f"{1e3 * sum(seconds):.3f}"
            line[f"{label} of bound"] = f"{bound / sum(seconds):.0%}"
        if len(made["times"]) == 2:
            old, new = (sum(seconds) for seconds in made["times"].values())
            line["times"] = f"{old / new:.2f}"
        lines.append(line)
    return record.markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = "parts of case names, separated by semicolons"
    parser.add_argument("--cases", default=";".join(CASES), help=cases)
    parser.add_argument("--contexts", default="8192,32768,131072", help="positions, with commas")
    parser.add_argument("--rows", default="1,4", help="numbers of sequences of decode cases")
    parser.add_argument("--before", type=Path, help="library of earlier sources, for comparison")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="seconds of each part of a case in a round"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="file for the figures, with a .md beside")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work_for_parent(args.worker, args.threads)
    library = build.find()
    if library is None:
        parser.error("the C++ operations are not built: run `weft build-ops`")
    wanted = args.cases.split(";")
    args.cases = [name for name in CASES if any(part in name for part in wanted)]
    args.contexts, args.rows = ([int(n) for n in text.split(",")] for text in (args.contexts, args.rows))
    torch.set_num_threads(args.threads)
    libraries = {"before": args.before, "after": library} if args.before else {"now": library}
    limits = Limits()
    limits.measure(5)
    workers = {label: Worker(path, args.threads) for label, path in libraries.items()}
    try:
        results = measure(workers, limits, args)
    finally:
        for worker in workers.values():
            worker.close()
    speeds = ", ".join(f"{name} {value:.1f}" for name, value in limits.found.items())
    shown = f"Best of all rounds: {speeds}.\n\n{table(results, limits)}"
    print(shown)
    if args.json:
        title = f"Attention of a layer at long contexts: {args.threads} threads"
        numbers = {"threads": args.threads, "limits": limits.found, "results": results}
        record.write(args.json, "bench.long_context", title, shown, numbers)


if __name__ == "__main__":
    main()
