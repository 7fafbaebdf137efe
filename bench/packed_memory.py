"""Measure the peak memory of checkpoints of 8 and 4 bits relative to their size on disk.

python -m bench.packed_memory --json bench/results/packed-memory-mine.json
python -m bench.packed_memory --cases "dense GGUF Q4_K_M,dense AWQ"

A real engine in a separate process loads a model of about 650 M parameters, fills its caches and answers a
prompt of 256 tokens with 8 tokens. The script makes the checkpoints, in every supported format. The baseline
is the process after the same work with a tiny model of the same format: torch, libraries and threads. The
baseline is subtracted.

Peaks count from the baseline. The kernel reports the peak of resident memory. Anonymous memory and file pages
are sampled every 2 ms, so shorter peaks may be missed, and the two peaks may be at different times. The
kernel can reclaim file pages at any time; pages of the checkpoint count while the engine reads the
checkpoint. The caches are subtracted too. Loading creates the caches at its end, so the peak of loading is a
separate figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench import gguf, long_work, record
from bench.load import engine, request
from bench.packed_checkpoints import FORMATS, MODELS, write
from weft.bench.process_memory import own_peak, own_resident, reset_own_peak
from weft.common.allocator import trim_heap

CACHE = 64 << 20
PROMPT, TOKENS = 256, 8
#: Table name -> (model, format of the matrices, --quantization).
CASES: dict[str, tuple[str, str, str]] = {
    **{f"dense, --quantization {kind}": ("dense", "16 bits", kind) for kind in ("int8", "fp8", "int4")},
    **{f"dense {form}": ("dense", form, "none") for form in FORMATS if form != "16 bits"},
    **{f"dense GGUF {kind}": ("dense", f"GGUF {kind}", "none") for kind in ("Q8_0", "Q4_K", "Q4_K_M")},
    **{f"experts, --quantization {kind}": ("experts", "16 bits", kind) for kind in ("int8", "int4")},
    **{f"experts {form}": ("experts", form, "none") for form in ("FP8", "GPTQ", "AWQ", "packed 4 bits")},
    **{f"experts {form}": ("experts", form, "none") for form in ("NVFP4", "MXFP4")},
    "gpt-oss MXFP4": ("gpt-oss", "MXFP4", "none"),
}


def made(folder: Path, case: str, *, tiny: bool) -> tuple[Path, int]:
    """Make the checkpoint of ``case``, or a tiny variant. Return its path and its bytes on disk."""
    model, form, _ = CASES[case]
    path = folder / ("tiny" if tiny else "large")
    if form.startswith("GGUF "):
        gguf.make(path.with_suffix(".gguf"), path.name, form.removeprefix("GGUF "))
        return path.with_suffix(".gguf"), path.with_suffix(".gguf").stat().st_size
    write(path, model, form, tiny=tiny)
    return path, sum(file.stat().st_size for file in path.iterdir())


def use(path: str, quantization: str, threads: int) -> tuple[int, int]:
    """Load a model, fill its caches and answer a prompt. Return (cache bytes, peak bytes of loading)."""
    core = engine(
        path,
        threads,
        dtype="bfloat16",
        quantization=quantization,
        max_num_seqs=1,
        max_num_batched_tokens=PROMPT,
        max_model_len=2 * PROMPT,
        kv_cache_memory=str(CACHE),
        steps_in_flight=1,
    )
    loaded = own_peak()
    caches = list(long_work.cache_tensors(core.runner.runner.cache))
    for tensor in caches:
        tensor.fill_(0.5)
    core.submit(request(1, PROMPT, TOKENS, core.config.spec.vocab_size, random.Random(0)))
    while core.has_work():
        core.step()
    KEPT.append(core)
    return sum(tensor.nbytes for tensor in caches), loaded


KEPT: list[Any] = []
"""Reference that keeps the engine alive until the process has reported its memory."""


def load(small: str, path: str, quantization: str, threads: int) -> None:
    """Run in the measured process: report the baseline, wait for a line, and report the memory at the end."""
    torch.set_num_threads(threads)
    use(small, quantization, threads)
    KEPT.clear()
    gc.collect()
    trim_heap()
    before = own_resident()
    reset_own_peak()
    print(json.dumps({"before": before}), flush=True)
    sys.stdin.readline()
    caches, loaded = use(path, quantization, threads)
    found = {"caches": caches, "loading": loaded - before}
    found |= {"peak": own_peak() - before, "resident": own_resident() - before}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


class Watch:
    """Samples anonymous memory and file pages of a process."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/status")
        self._begun = self._now()
        self._most = dict(self._begun)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _now(self) -> dict[str, int]:
        found = re.findall(r"Rss(Anon|File|Shmem):\s+(\d+) kB", self._path.read_text())
        return {kind: int(size) * 1024 for kind, size in found}

    def _run(self) -> None:
        while not self._ended.wait(0.002):
            for kind, size in self._now().items():
                self._most[kind] = max(self._most[kind], size)

    def end(self) -> dict[str, int]:
        """Stop sampling. Return the peak bytes of each kind minus the bytes at the start."""
        self._ended.set()
        self._thread.join(10)
        return {kind: size - self._begun[kind] for kind, size in self._most.items()}


def measure(case: str, threads: int) -> dict[str, Any]:
    """Return the figures of one case in bytes."""
    quantization = CASES[case][2]
    with tempfile.TemporaryDirectory() as folder:
        small, _ = made(Path(folder), case, tiny=True)
        path, size = made(Path(folder), case, tiny=False)
        command = [sys.executable, "-m", "bench.packed_memory", "--threads", str(threads)]
        command += ["--load", str(small), str(path), quantization]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        begun = json.loads(process.stdout.readline())
        watch = Watch(process.pid)
        print(file=process.stdin, flush=True)
        found = json.loads(process.stdout.readline())
        most = watch.end()
        process.stdin.close()
        process.wait(60)
    found |= {"disk": size, "process": begun["before"], "anonymous": most["Anon"], "files": most["File"]}
    found["ratio"] = round((found["peak"] - found["caches"]) / size, 3)
    return {"checkpoint": case, **found}


def table(found: list[dict[str, Any]]) -> str:
    """Return the table of the page, in MB."""
    rows = []
    for one in found:
        caches = one["caches"]
        rows.append(
            {
                "checkpoint": one["checkpoint"],
                "on disk": f"{one['disk'] / 1e6:.0f}",
                "peak": f"{(one['peak'] - caches) / 1e6:.0f}",
                "while loading": f"{one['loading'] / 1e6:.0f}" if "loading" in one else None,
                "anonymous": f"{(one['anonymous'] - caches) / 1e6:.0f}",
                "of files": f"{one['files'] / 1e6:.0f}",
                "in the end": f"{(one['resident'] - caches) / 1e6:.0f}",
                "peak / disk": f"{one['ratio']:.2f}",
            }
        )
    processes = [one["process"] / 1e6 for one in found]
    return (
        f"{record.markdown(rows)}\n\nMB; without the caches ({found[0]['caches'] / 1e6:.0f} MB) and the "
        f"process before ({min(processes):.0f} to {max(processes):.0f} MB: torch, its libraries, threads)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help=f"names separated by ;, from {'; '.join(CASES)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the figures, with a .md beside")
    parser.add_argument("--keep", action="store_true", help="keep the cases that are in the file of --json")
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        return load(*args.load, args.threads)  # type: ignore[call-arg]
    cases = [case.strip() for case in args.cases.split(";")] if args.cases else list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {'; '.join(CASES)}")
    known: dict[str, dict[str, Any]] = {}
    if args.keep and args.json and args.json.exists():
        known = {row["checkpoint"]: row for row in json.loads(args.json.read_text())["rows"]}
    for case in cases:
        if case not in known:
            began = time.monotonic()
            known[case] = measure(case, args.threads)
            print(f"{case}: {known[case]['ratio']}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    found = [known[case] for case in CASES if case in known]
    shown = table(found)
    print(shown)
    if args.json:
        title = f"Peak memory of packed checkpoints of {len(MODELS)} models against their size on disk"
        record.write(args.json, "bench.packed_memory", title, shown, {"threads": args.threads, "rows": found})


if __name__ == "__main__":
    main()
