"""Measure decode steps on one GPU by sampling settings: wall time, time of the GPU, launches, kernels.

python -m bench.gpu_steps --model llama-3-8b --json steps.json

The engine has random weights. Each setting runs at each batch size behind prompts of ``--context`` tokens.
The wall time comes from steps without a profiler. Launches and kernels come from later steps under torch's
profiler.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import record
from bench.gpu import DUMMY, MODELS, model_folder, setting
from bench.load import engine
from weft.bench.workloads import random_ids
from weft.engine.core import EngineCore
from weft.types.messages import Submit, ids_to_bytes
from weft.types.sampling import TokenParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
"""Name of a setting -> its TokenParams."""
BEHIND = 24
"""Steps before the first measured step: prompts, captures, compiled kernels."""
PROFILED = 8
CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
"""Prefixes of host calls that start GPU work."""
KERNELS = 20
"""Number of kernels in the JSON file, by descending time."""


class Steps:
    """Runs steps of an engine in this thread."""

    def __init__(self, core: EngineCore, context: int) -> None:
        self._core = core
        self._context = context
        self._numbers = itertools.count(1)

    def submit(self, rows: int, tokens: int, params: dict[str, Any]) -> None:
        vocabulary = self._core.config.spec.vocab_size
        for _ in range(rows):
            number = next(self._numbers)
            prompt = ids_to_bytes(random_ids(str(number), self._context, vocabulary))
            made = TokenParams(max_tokens=tokens, **params)
            self._core.submit(
                Submit(sequence=number, request=number, seed=number, prompt_ids=prompt, params=made)
            )

    def run(self, count: int) -> None:
        for _ in range(count):
            self._core.step()
        torch.cuda.synchronize()

    def drain(self) -> None:
        while self._core.has_work():
            self._core.step()

    def measure(self, rows: int, kind: str, count: int) -> dict[str, Any]:
        """Return the figures of ``rows`` decoding rows with the setting ``kind`` over ``count`` steps."""
        self.submit(rows, BEHIND + count + PROFILED + 8, KINDS[kind])
        self.run(BEHIND)
        began = time.perf_counter()
        self.run(count)
        seconds = (time.perf_counter() - began) / count
        names: collections.Counter[str] = collections.Counter()
        spent: collections.Counter[str] = collections.Counter()
        launched = 0
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiled:
            self.run(PROFILED)
        for event in profiled.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                names[event.name[:80]] += 1
                spent[event.name[:80]] += event.device_time
            elif event.name.startswith(CALLS):
                launched += 1
        self.drain()
        kernels = {name: [names[name] / PROFILED, us / PROFILED] for name, us in spent.most_common(KERNELS)}
        return {
            "ms_per_step": 1e3 * seconds,
            "gpu_ms": sum(spent.values()) / PROFILED / 1e3,
            "host_calls": launched / PROFILED,
            "kernels": sum(names.values()) / PROFILED,
            "by_name": kernels,
        }


def table(found: dict[str, dict[str, Any]]) -> str:
    """One row per setting and batch size."""
    rows = []
    for name, figures in found.items():
        rows.append(
            {
                "rows and setting": name,
                "ms a step": f"{figures['ms_per_step']:.2f}",
                "ms of the GPU": f"{figures['gpu_ms']:.2f}",
                "calls of the host": f"{figures['host_calls']:.0f}",
                "kernels and copies": f"{figures['kernels']:.0f}",
            }
        )
    return record.markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64], help="batch sizes")
    parser.add_argument(
        "--kind", action="append", choices=tuple(KINDS), help="may be repeated; all by default"
    )
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each row")
    parser.add_argument("--steps", type=int, default=60, help="measured steps")
    parser.add_argument(
        "--set", action="append", type=setting, default=[], help="setting of the engine, NAME=VALUE"
    )
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu_steps needs a CUDA GPU, and this torch sees none")
    settings = {
        **DUMMY,
        "max_num_seqs": max(args.rows),
        "max_num_batched_tokens": 8192,
        **dict(args.set),
    }
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        core = engine(str(model_folder(args.model, Path(scratch))), 0, **settings)
        steps = Steps(core, args.context)
        for rows, kind in tqdm(list(itertools.product(args.rows, args.kind or KINDS)), unit="setting"):
            found[f"{rows} {kind}"] = steps.measure(rows, kind, args.steps)
        core.close()
    device = torch.cuda.get_device_name()
    print(table(found))
    if args.json:
        title = f"Decode steps of {args.model}, {device}"
        numbers = {"device": device, "settings": dict(args.set), "steps": found}
        record.write(args.json, "bench.gpu_steps", title, table(found), numbers)


if __name__ == "__main__":
    main()
