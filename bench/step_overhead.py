"""Measure the part of a decode step outside the model: scheduling, staging, sampling, results, messages.

python -m bench.step_overhead --model FOLDER --batch 32 --load-format dummy

One step is in flight, so all parts run in sequence. With two steps in flight the control thread overlaps the
model on a CPU, so the printed share is an upper bound. The model is ``model.steps``. Everything else in
``EngineCore.step``, and the encoding of its events, counts as overhead.

With --host-alone the replay of a captured step does nothing: only the CPU time of the control thread counts,
which busy machines disturb less. CPU caches are then warmer than beside a model.

With --waits the script prints the number of barriers of the threads in a decode step and their waiting time,
with one region per step (csrc/crew.h) and with one region per operation, alternating every few steps. Set
GOMP_SPINCOUNT=1000, as ``weft serve`` does on AMD CPUs (docs/adr/0007): torch is loaded first here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weft.runner.runner as runner_module
from weft.config.resolve import resolve
from weft.config.sections.all import Config, ModelSection, RunnerSection, SchedulerSection
from weft.engine.core import EngineCore
from weft.types.messages import Submit, Tokens, encode, ids_to_bytes
from weft.types.sampling import TokenParams


class Meter:
    """Sums the milliseconds of named calls."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace ``owner.attribute`` by a wrapper that adds its milliseconds to ``name``."""
        work: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + 1e3 * (time.perf_counter() - began)

        setattr(owner, attribute, timed)

    def take(self) -> dict[str, float]:
        """Return the milliseconds by name since the last call."""
        spent, self.spent = self.spent, {}
        return spent


def instrument(core: EngineCore) -> Meter:
    """Wrap the parts of ``core``'s steps with timers."""
    meter, runner = Meter(), core.runner.runner
    meter.wrap(core.scheduler, "build", "plan")
    meter.wrap(core.scheduler, "freeze", "plan")
    meter.wrap(core.scheduler, "commit", "commit")
    meter.wrap(runner, "forward", "forward")
    meter.wrap(runner, "sample", "sample")
    meter.wrap(runner, "read", "result")
    meter.wrap(runner._state, "apply", "ops")
    meter.wrap(runner._state, "validate", "validate")
    meter.wrap(runner._builder, "build", "build")
    meter.wrap(runner._sampler, "sample", "sampler")
    meter.wrap(runner_module, "drive", "model")
    if runner.graphs is not None:
        meter.wrap(runner.graphs, "replay", "model")
    return meter


def make_core(args: argparse.Namespace) -> EngineCore:
    """Return an engine with room for the batch."""
    config = Config(
        model=ModelSection(
            model=args.model,
            load_format=args.load_format,
            dtype=args.dtype,
            quantization=args.quantization,
            max_model_len=args.prompt + args.steps + 64,
        ),
        scheduler=SchedulerSection(
            max_num_seqs=args.batch, max_num_batched_tokens=max(2048, args.batch + 64), steps_in_flight=1
        ),
        runner=RunnerSection(device=args.device, threads=args.threads),
    )
    return EngineCore(resolve(config), progress=False)


def submit_all(core: EngineCore, args: argparse.Namespace) -> None:
    """Submit ``batch`` sequences that decode for at least ``steps`` steps."""
    rng = np.random.default_rng(0)
    params = TokenParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.steps + 40,
        min_tokens=0,
        stop_ids=(0,) if args.stop else (),
    )
    for number in range(args.batch):
        ids = rng.integers(1, core.config.spec.vocab_size, args.prompt)
        core.submit(
            Submit(sequence=number, request=number, seed=number, prompt_ids=ids_to_bytes(ids), params=params)
        )


def measure(core: EngineCore, batch: int, steps: int) -> list[dict[str, float]]:
    """Return the milliseconds of each part, for each step that only decodes the whole batch."""
    meter, rows = instrument(core), []
    while len(rows) < steps and core.has_work():
        meter.take()
        began = time.perf_counter()
        events = core.step()
        stepped = time.perf_counter()
        encode(Tokens(step=1, events=tuple(events)))
        ended = time.perf_counter()
        spent = meter.take()
        if len(events) == batch and all(len(event.token_ids) == 1 for event in events):
            within = sum(spent.get(name, 0.0) for name in ("ops", "validate", "build", "model"))
            spent["rest of forward"] = spent.pop("forward") - within
            spent["rest of sample"] = spent.pop("sample") - spent.get("sampler", 0.0)
            spent["encode"] = 1e3 * (ended - stepped)
            spent["step"] = 1e3 * (ended - began)
            spent["loop"] = spent["step"] - sum(spent[name] for name in spent if name != "step")
            rows.append(spent)
    return rows[2:]  # the first ones warm up


def measure_alone(core: EngineCore, batch: int, steps: int) -> np.ndarray:
    """Return the milliseconds of CPU time of steps that decode the whole batch, [steps], without the
    replay."""
    graphs, spent = core.runner.graphs, list[float]()
    assert graphs is not None, "decode steps are not captured: build the C++ operations"
    for _ in range(10):
        core.step()  # prompts, and the capture
    graphs.replay = lambda key: None  # type: ignore[method-assign]
    while len(spent) < steps and core.has_work():
        began = time.thread_time()
        events = core.step()
        encode(Tokens(step=1, events=tuple(events)))
        if len(events) == batch:
            spent.append(1e3 * (time.thread_time() - began))
    return np.array(spent)


def report_alone(spent: np.ndarray) -> dict[str, Any]:
    """Print and return the median and the tenth percentile of the milliseconds ``spent``."""
    middle, tenth = float(np.median(spent)), float(np.percentile(spent, 10))
    print(f"{len(spent)} steps, host alone: median {middle:.4f} ms, a tenth below {tenth:.4f} ms")
    return {"steps": len(spent), "host_ms": [middle, tenth]}


def measure_waits(core: EngineCore, batch: int, turn: int = 5) -> dict[str, list[tuple[float, ...]]]:
    """Return (ms of a step, meetings, ms waited by all threads) of steps that decode the whole batch, in both
    ways.

    The ways alternate every ``turn`` steps. The first step of a turn is not counted.
    """
    ops = torch.ops.weft_cpu
    rows: dict[str, list[tuple[float, ...]]] = {"a region an operation": [], "a region a step": []}
    step = -20  # the first ones warm up, and are captured
    while core.has_work():
        name = list(rows)[step // turn % 2]
        ops.set_crews.default(name == "a region a step")
        ops.take_waits.default()
        began = time.perf_counter()
        events = core.step()
        spent = 1e3 * (time.perf_counter() - began)
        meetings, waited = ops.take_waits.default()
        if step >= 0 and step % turn and len(events) == batch:
            rows[name].append((spent, meetings, waited / 1e6))
        step += 1
    ops.set_crews.default(True)
    return rows


def report_waits(rows: dict[str, list[tuple[float, ...]]]) -> dict[str, Any]:
    """Print and return medians and tenth percentiles of both ways."""
    made: dict[str, Any] = {}
    for name, steps in rows.items():
        of = np.array(steps)
        middle, tenth = np.median(of, axis=0), np.percentile(of, 10, axis=0)
        made[name] = {
            "steps": len(of),
            "meetings": int(middle[1]),
            "step_ms": [float(middle[0]), float(tenth[0])],
            "waited_ms": [float(middle[2]), float(tenth[2])],
        }
        print(
            f"{name:22} {len(of)} steps, {middle[1]:.0f} meetings; a step {middle[0]:.3f} ms "
            f"(a tenth of them {tenth[0]:.3f}), threads waited {middle[2]:.3f} ms ({tenth[2]:.3f})"
        )
    return made


def report(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Print and return the times of all parts, and the share of a step outside the model.

    The sum uses medians (or minima) of the parts. On a busy machine nearly every step has an interrupted
    part, and the interrupted part differs from step to step.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.array([row.get(name, 0.0) for row in rows]) for name in names}
    step = columns.pop("step")
    made: dict[str, Any] = {"steps": len(rows), "step_ms": float(np.median(step))}
    print(f"{len(rows)} steps, median {np.median(step):.3f} ms, fastest {step.min():.3f} ms")
    print(f"  {'':18}{'median':>10}{'fastest':>10}")
    for name in sorted(columns, key=lambda name: -float(np.median(columns[name]))):
        print(f"  {name:18}{np.median(columns[name]):10.3f}{columns[name].min():10.3f}")
    for label, of in (("median", np.median), ("fastest", np.min)):
        parts = {name: float(of(column)) for name, column in columns.items()}
        overhead = sum(parts.values()) - parts["model"]
        share = overhead / (overhead + parts["model"])
        print(f"not the model, by {label} parts: {overhead:.3f} ms, {100 * share:.1f} % of a step")
        made[label] = {"parts_ms": parts, "overhead_ms": overhead, "overhead_share": share}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="spool-text", help="bundled name, folder or hub name")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", help="--quantization of weft serve")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32, help="sequences that decode together")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each")
    parser.add_argument("--steps", type=int, default=100, help="timed steps")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--stop", action="store_true", help="give the sequences a stop id, as in real requests"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads of the model; 0 for torch's default"
    )
    parser.add_argument(
        "--waits", action="store_true", help="count barriers of threads and their waiting time"
    )
    parser.add_argument("--host-alone", action="store_true", help="time the control thread without the model")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    core = make_core(args)
    submit_all(core, args)
    if args.host_alone:
        made = report_alone(measure_alone(core, args.batch, args.steps))
    elif args.waits:
        made = report_waits(measure_waits(core, args.batch))
    else:
        made = report(measure(core, args.batch, args.steps))
    core.close()
    if args.json:
        args.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
