"""Measure milliseconds per step of one, two and four streams: Weft and llama.cpp in 16, 8 and 4 bits.

python -m bench.streams --server llama-server --gguf bf16=A.gguf,q8_0=B.gguf --weft 'int8=--quantization int8'

All engines are loaded; SIGSTOP stops the idle engines. A run generates some greedy tokens after a short
prompt. The figure is the time of the run, prompt included, divided by the tokens of one stream. llama.cpp
runs as its server with non-streaming answers. Weft runs as an ``LLM`` in a process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import record
from bench.compare import model_folder
from bench.peers.protocol import tree
from bench.rounds import Deadlines, Session
from bench.rows import PEERS, Row, Setting, weft
from bench.speculation import integers
from weft.bench.workloads import Workload

VOCABULARY = 16384


class CpuSession(Session):
    """Count the CPU time of an engine's processes, for single-threaded runs on a shared machine."""

    def _run(self, name: str, label: str, asked: list[list[int]], output_tokens: int) -> dict[str, Any]:
        root = self._drivers[name].process.pid
        before = _cpu_seconds(root)
        answer = super()._run(name, label, asked, output_tokens)
        return answer | {"seconds": _cpu_seconds(root) - before}


def _cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and all descendants."""
    ticks = 0
    for pid in tree(root):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def named(text: str) -> dict[str, str]:
    """``a=x,b=y``."""
    return dict(part.split("=", 1) for part in text.split(",") if part)


def llama(name: str, server: Path, file: str, setting: Setting) -> Row:
    """llama.cpp's server on a GGUF file, a slot for each stream."""
    threads, slots = str(setting.threads), setting.max_seqs
    command = (
        *(str(server), "--model", file, "--host", "127.0.0.1", "--port", "{port}"),
        *("--threads", threads, "--threads-batch", threads, "--parallel", str(slots)),
        *("--no-kv-unified", "--ctx-size", str(slots * setting.max_len), "--flash-attn", "on"),
        *("--no-cache-prompt", "--cache-ram", "0", "--fit", "off"),
    )
    said = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=60, check=False)
    version = (said.stderr + said.stdout).partition("version: ")[2].partition("\n")[0]
    return Row(
        name=f"llama.cpp {name}",
        driver=(sys.executable, str(PEERS / "drive_llamacpp.py")),
        environment={"OMP_NUM_THREADS": threads},
        args={"command": command, "version": version},
    )


def measure(rows: Sequence[Row], setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Return the records of ``Session``, by row."""
    logs = setting.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    works = [Workload(f"B{n}", n, args.prompt, args.tokens, None, "token_seconds") for n in args.batches]
    kind = CpuSession if args.cpu_time else Session
    with kind(rows, setting, Deadlines(load=300, run=120), VOCABULARY, logs) as session:
        session.rounds(works, args.rounds)
    return session.records


def table(records: dict[str, Any], args: argparse.Namespace) -> str:
    """Medians, with the smallest and the largest round."""
    lines = []
    for name, made in records.items():
        line: dict[str, Any] = {"ms a step": name}
        for batch in args.batches:
            found = [1e3 * seconds / args.tokens for seconds in made["samples"].get(f"B{batch}", [])]
            text = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else None
            line[f"{batch} at once"] = text
        lines.append(line)
    return record.markdown(lines)


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-dense-s", help="a checkpoint that weft bench can make")
    parser.add_argument("--weft", action="append", default=[], help="NAME=FLAGS of one more row; repeatable")
    parser.add_argument("--server", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--gguf", type=named, default={}, help="NAME=FILE,.. of the same model")
    parser.add_argument("--batches", type=integers, default=[1, 2, 4], help="streams at once")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens of each")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time; with --threads 1")
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache/weft/bench")
    parser.add_argument("--json", type=Path, help="a file for the numbers; a .md beside it gets the table")
    args = parser.parse_args()
    setting = Setting(
        model=model_folder(args.model, args.dir),
        dtype="bfloat16",
        threads=args.threads,
        max_len=-(-(args.prompt + args.tokens + 16) // 256) * 256,
        max_seqs=max(args.batches),
        folder=args.dir,
    )
    flags = {"weft": ""} | {
        f"weft {name}": text for name, _, text in (one.partition("=") for one in args.weft)
    }
    rows = [replace(weft(name, text, setting), name=name) for name, text in flags.items()]
    rows += [llama(name, args.server, file, setting) for name, file in args.gguf.items()]
    records = measure(rows, setting, args)
    text = table(records, args)
    print(text)
    if args.json is not None:
        title = f"Few streams: {setting.model.name}, {args.prompt} + {args.tokens} tokens"
        record.write(args.json, "bench.streams", title, text, {"engines": records})


if __name__ == "__main__":
    main()
