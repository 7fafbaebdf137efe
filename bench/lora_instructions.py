"""Count instructions of decode steps without adapter rows, by engines with and without loaded adapters.

    python -m bench.lora_instructions --rows 1 8 64 --dtype bfloat16

valgrind counts the instructions of all threads, so the result does not depend on other programs. Both engines
run in one process, one after the other, with one thread and one step in flight. Random weights, and random
adapters of every linear layer: no token matters. Prints instructions per step and the ratio. Needs
valgrind, the header valgrind/callgrind.h and a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.loras import MODEL, VOCAB, save_adapter

HIDDEN, INNER = 768, 2304
"""Sizes of a layer of the model."""
WARM = 6
"""Steps before the count: the prompts, the capture and its first replays."""
_SOURCE = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
_DUMP = re.compile(r"^desc: Trigger: Client Request: (.+)$", re.MULTILINE)
_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


def compile_marks(folder: Path) -> Path:
    """Compile the library that starts and ends a count. Return its path."""
    source, library = folder / "marks.c", folder / "marks.so"
    source.write_text(_SOURCE)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def make_core(base: Path, options: argparse.Namespace, adapters: dict[str, str]) -> Any:
    """Return an engine of the checkpoint ``base``, with a place for each adapter."""
    from weft.config.resolve import resolve
    from weft.config.sections.all import CacheSection, Config, ModelSection, RunnerSection, SchedulerSection
    from weft.config.sections.lora_section import LoraSection
    from weft.engine.core import EngineCore

    modules = tuple(f"{name}={folder}" for name, folder in adapters.items())
    config = Config(
        model=ModelSection(
            model=str(base),
            dtype=options.dtype,
            quantization=options.quantization,
            max_model_len=256,
            num_hidden_layers_override=options.layers,
        ),
        cache=CacheSection(kv_cache_memory="64M", enable_prefix_caching=False),
        scheduler=SchedulerSection(max_num_seqs=max(options.rows), steps_in_flight=1),
        runner=RunnerSection(device="cpu", threads=1),
        lora=LoraSection(max_loras=len(adapters), max_lora_rank=options.rank, lora_modules=modules),
    )
    return EngineCore(resolve(config), progress=False)


def submit(core: Any, rows: int, steps: int, adapter: str = "") -> None:
    """Submit ``rows`` sequences of 4 random ids, which decode for at least ``steps`` steps."""
    from weft.types.messages import Submit, ids_to_bytes
    from weft.types.sampling import TokenParams

    rng = np.random.default_rng(0)
    params = TokenParams(temperature=0.0, max_tokens=steps + WARM + 4)
    for row in range(rows):
        ids = ids_to_bytes(rng.integers(1, VOCAB, 4))
        core.submit(
            Submit(sequence=row, request=row, seed=row, prompt_ids=ids, params=params, adapter=adapter)
        )


def count(core: Any, rows: int, steps: int, marks: Any, name: str) -> None:
    """Count ``steps`` decode steps of ``rows`` rows, and dump the count with the description ``name``."""
    submit(core, rows, steps)
    for _ in range(WARM):
        core.step()
    marks.begin()
    for _ in range(steps):
        core.step()
    marks.end(name.encode())
    while core.has_work():
        core.step()


def measure(options: argparse.Namespace) -> None:
    """Count all variants. Runs below valgrind."""
    marks = ctypes.CDLL(options.marks)
    adapters: dict[str, str] = json.loads(options.modules)
    for name, own in (("without", dict[str, str]()), ("places", adapters)):
        core = make_core(options.base, options, own)
        for rows in options.rows:
            count(core, rows, options.steps, marks, f"{name} {rows}")
        if own:  # base rows, after rows with an adapter have ended
            submit(core, 1, 1, next(iter(core.adapters.digests.values())))
            while core.has_work():
                core.step()
            for rows in options.rows:
                count(core, rows, options.steps, marks, f"after {rows}")
        core.close()


def measure_operators(options: argparse.Namespace) -> None:
    """Count two calls of a layer's gate and up product with its activation: as one operator (a server without
    places), and as two. Runs below valgrind."""
    import torch

    from weft.ops import cpu

    if not cpu.load():
        raise SystemExit("the C++ operations are not built: run weft build-ops")
    marks, ops = ctypes.CDLL(options.marks), torch.ops.weft_cpu
    weight = torch.randn(2 * INNER, HIDDEN).bfloat16()
    gated, plain, wide = ops.pack(weight, True), ops.pack(weight, False), 2 * INNER
    with torch.inference_mode():
        for rows in options.rows:
            x = torch.randn(rows, HIDDEN).bfloat16()
            calls = {
                "without": lambda x=x: ops.linear(x, gated, wide, None, None, 1),
                "places": lambda x=x: ops.gated(ops.linear(x, plain, wide, None, None, 0), 1),
            }
            for name, call in calls.items():
                call()
                call()
                marks.begin()
                call()
                call()
                marks.end(f"{name} {rows}".encode())


def counted(folder: Path) -> dict[str, int]:
    """Return description -> instructions of all dumps in ``folder``."""
    found = {}
    for path in sorted(folder.glob("counts*")):
        text = path.read_text(errors="replace")
        if (name := _DUMP.search(text)) and (total := _TOTAL.search(text)):
            found[name[1]] = int(total[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--adapters", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument(
        "--layers", type=int, help="only the first layers: faster, with a larger share of other work"
    )
    parser.add_argument("--operators", action="store_true", help="only the operators of a layer that differ")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--keep", help="folder for valgrind's files, for callgrind_annotate")
    for name in ("--base", "--modules", "--marks"):  # set for the process below valgrind
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.marks:
        (measure_operators if options.operators else measure)(options)
        return
    from weft.bench.checkpoints import make

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kept = Path(options.keep) if options.keep else folder
        kept.mkdir(parents=True, exist_ok=True)
        base = make(MODEL, folder / "base", progress=False)
        modules = {
            f"a{number}": str(save_adapter(folder / f"a{number}", base, options.rank, number, options.layers))
            for number in range(options.adapters)
        }
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"]
        command += [
            f"--callgrind-out-file={kept / 'counts'}",
            sys.executable,
            "-m",
            "bench.lora_instructions",
        ]
        command += [*sys.argv[1:], "--base", str(base), "--modules", json.dumps(modules)]
        subprocess.run([*command, "--marks", str(compile_marks(folder))], check=True)
        found = counted(kept)
    if options.operators:
        for rows in options.rows:
            one, two = (found[f"{name} {rows}"] / 2 for name in ("without", "places"))
            print(
                f"{rows} rows: {one:,.0f} instructions as one operator, {two:,.0f} as two: {two - one:+,.0f}"
            )
        return
    print("| rows | no places | places, base rows | ratio | after rows with an adapter | ratio |")
    print("|---|---|---|---|---|---|")
    for rows in options.rows:
        base_count = found[f"without {rows}"]
        cells = [f"{base_count / options.steps:,.0f}"]
        for name in ("places", "after"):
            own = found[f"{name} {rows}"]
            cells += [f"{own / options.steps:,.0f}", f"{own / base_count:.4f}"]
        print(f"| {rows} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
