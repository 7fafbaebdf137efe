"""Measure the cost of a group's decode step outside the model: CPU time of the engine and of one worker.

python -m bench.control_overhead --ranks 4 --rows 64

Everything except the model is real: scheduler, frames, digests, zmq over ipc, heartbeats, worker processes.
With ``--runner tables`` a rank only keeps its slot table. The rest is the control of a group, which must stay
under 1.5 ms per step. With ``--runner whole`` ranks also stage, sample and write results, around a model with
precomputed logits. The output then also shows one rank alone. CPU time counts all threads of a process, the
threads of zmq and of the heartbeats included.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import Future
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.machine import commit, describe
from weft.cli.processes.rank_main import say_hello
from weft.common.folder import private_folder
from weft.config.group_settings import shared_settings
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig, KVConfig
from weft.config.sections.all import Config, ModelSection, RunnerSection, SchedulerSection
from weft.engine.build import build_runner
from weft.engine.core import EngineCore
from weft.engine.group import GroupExecutor
from weft.engine.group_links import Links, Share
from weft.engine.ranks.executor import RankRunner
from weft.engine.ranks.watch import RankWatch
from weft.engine.ranks.worker import Worker
from weft.engine.start import alone
from weft.group.membership import Membership
from weft.group.sizes import blocks_of
from weft.parallel.control import ZmqHead, ZmqRank
from weft.parallel.mesh import Mesh
from weft.runner.slot_state import SlotState
from weft.runner.step_handle import StepHandle
from weft.types import frames as f
from weft.types.messages import Submit, ids_to_bytes
from weft.types.plan import StepPlan, StepResult, TokenMasks, column
from weft.types.sampling import TokenParams

_DONE: Future[Any] = Future()
_DONE.set_result(None)
LIMIT_MS = 1.5
TIMEOUT = 60.0


class Tables:
    """A rank without a model: slot tables as ever, and one token for every row. Prompts fit in one step."""

    graphs = None
    drafter = None
    varying: tuple[str, ...] = ()

    def __init__(self, kv: KVConfig) -> None:
        self.kv = kv
        self._state = SlotState(kv, torch.device("cpu"))
        self._results: dict[int, StepResult] = {}

    def forward(self, plan: StepPlan) -> StepHandle:
        for op in plan.ops:
            self._state.apply(op)
        self._state.validate(plan.prefill)
        self._state.validate(plan.decode)
        return StepHandle(plan=plan, launched=0.0, forwarded=_DONE)

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        pass

    def done(self, handle: StepHandle) -> bool:
        return True

    def read(self, handle: StepHandle) -> StepResult:
        rows = handle.plan.rows
        if rows not in self._results:
            self._results[rows] = StepResult(
                step=-1,
                rows=column(np.arange(rows)),
                offsets=column(np.arange(rows + 1)),
                tokens=column(np.ones(rows, np.int32)),
                accepted=column(np.zeros(rows, np.int32)),
            )
        return msgspec.structs.replace(self._results[rows], step=handle.plan.step)

    def reset(self) -> None:
        self._state.clear()

    def close(self) -> None:
        pass


class Still:
    """Stand in for a model: return precomputed logits."""

    varying: tuple[str, ...] = ()

    def __init__(self, most: int, vocab: int) -> None:
        self._logits = torch.zeros(most, vocab)
        self._logits[:, 1] = 1.0

    def steps(self, step: Any, *_: Any) -> Generator[Any, None, torch.Tensor]:
        return self._logits[: len(step.logits_index)]
        yield


class Meter:
    """Wrap a rank's runner. Record this process's CPU time when step ``first`` and step ``last`` begin."""

    def __init__(self, runner: Any, first: int, last: int) -> None:
        self._runner, self._at = runner, {first: 0.0, last: 0.0}
        self._span = (first, last)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, plan: StepPlan) -> StepHandle:
        if plan.step in self._at:
            self._at[plan.step] = time.process_time()
        handle: StepHandle = self._runner.forward(plan)
        return handle

    def milliseconds(self) -> float:
        """A step's, on average."""
        first, last = self._span
        return 1e3 * (self._at[last] - self._at[first]) / (last - first)


def make_config(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration of an engine with room for the rows."""
    length = args.prompt + args.warm + args.steps + 16
    model = ModelSection(model="spool-text", load_format="dummy", max_model_len=length, dtype="float32")
    scheduler = SchedulerSection(
        max_num_seqs=args.rows, max_num_batched_tokens=8192, steps_in_flight=args.steps_in_flight
    )
    return resolve(
        Config(
            model=model,
            scheduler=scheduler,
            runner=RunnerSection(device="cpu", threads=1, decode_graphs=False),
        )
    )


def make_runner(config: EngineConfig, args: argparse.Namespace) -> Meter:
    """Return the rank's runner: slot tables only, or a whole runner with a stub model."""
    runner: Any = Tables(config.kv)
    if args.runner == "whole":
        runner = build_runner(config, progress=False)
        runner._model = Still(args.rows, config.spec.vocab_size)
    # The first step has the prompts; all rows decode in every other one.
    return Meter(runner, 1 + args.warm, 1 + args.warm + args.steps)


def work(args: argparse.Namespace) -> None:
    """A worker process."""
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    torch.set_num_threads(1)
    channel = ZmqRank(args.address, args.rank)
    welcome = say_hello(channel, config, args.rank)
    meter = make_runner(config, args)
    tables: Any = meter
    worker = Worker(args.rank, tables, Mesh(), channel, rank_timeout=TIMEOUT, incarnation=welcome.incarnation)
    watch = RankWatch(
        ZmqRank(welcome.heartbeats, args.rank), TIMEOUT, worker.heartbeat, worker.ended, worker.orphaned
    )
    watch.start()
    channel.send(f.encode(f.Loaded(rank=args.rank, blocks=blocks_of(config.kv))))
    worker.run()
    watch.close()
    worker.close()
    Path(args.out).write_text(json.dumps(meter.milliseconds()))


def measure(config: EngineConfig, args: argparse.Namespace, ranks: int) -> tuple[float, float, float]:
    """Return milliseconds per step: (engine CPU, one worker's CPU, wall)."""
    folder = private_folder()
    channel, heartbeats = ZmqHead(f"ipc://{folder}/ranks"), ZmqHead(f"ipc://{folder}/heartbeats")
    outs = {rank: folder / f"{rank}.json" for rank in range(1, ranks)}
    workers = []
    for rank, out in outs.items():
        command = [sys.executable, "-m", "bench.control_overhead", *sys.argv[1:]]
        command += ["--rank", str(rank), "--address", channel.address, "--out", str(out)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert worker.stdin is not None
        with worker.stdin as pipe:
            pipe.write(msgspec.msgpack.encode(config))
        workers.append(worker)
    try:
        meter = make_runner(config, args)
        tables: Any = meter
        if ranks > 1:
            executor = group(config, tables, channel, heartbeats, list(outs))
        else:
            executor = alone(config.kv, lambda kv: tables)
        wall = drive(config, args, executor)
        for worker in workers:
            worker.wait(TIMEOUT)
        each = [json.loads(out.read_text()) for out in outs.values()]
        return meter.milliseconds(), float(np.median(each)) if each else 0.0, wall
    finally:
        for worker in workers:
            worker.kill()
        shutil.rmtree(folder, ignore_errors=True)


def group(
    config: EngineConfig,
    runner: RankRunner | Any,
    channel: ZmqHead,
    heartbeats: ZmqHead,
    ranks: list[int],
) -> GroupExecutor:
    """The group, formed."""
    membership = Membership(
        0,
        dict.fromkeys(ranks, False),
        settings=shared_settings(config),
        rank_timeout=TIMEOUT,
        incarnation="head",
        heartbeats=heartbeats.address,
        hello_s=600.0,
    )
    links = Links(channel=channel, heartbeats=heartbeats)
    return GroupExecutor(membership, lambda: Share(config.kv, lambda kv: runner), links, rank_timeout=TIMEOUT)


def drive(config: EngineConfig, args: argparse.Namespace, executor: GroupExecutor) -> float:
    """Return the wall milliseconds per step in which all rows decode."""
    core = EngineCore(config, progress=False, runner=executor)
    params = TokenParams(temperature=0.0, max_tokens=args.warm + args.steps + 8)
    for number in range(args.rows):
        ids = ids_to_bytes([2 + number % 7] * args.prompt)
        core.submit(Submit(sequence=number, request=number, seed=1, prompt_ids=ids, params=params))
    began = 0.0
    for step in range(args.warm + args.steps + 6):
        if step == args.warm:
            began = time.perf_counter()
        if step == args.warm + args.steps:
            wall = time.perf_counter() - began
        core.step()
    core.close()
    return 1e3 * wall / args.steps


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The table, as Markdown."""
    lines = ["| ranks | head ms | one worker ms | together ms | step, wall ms |", "|---|---|---|---|---|"]
    for ranks in sorted({row["ranks"] for row in rows}):
        of = [row for row in rows if row["ranks"] == ranks]
        cells = []
        for name in ("head", "worker", "together", "wall"):
            values = sorted(row[name] for row in of)
            cells.append(f"{np.median(values):.3f} ({values[0]:.3f} to {values[-1]:.3f})")
        lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="sequences that decode together")
    parser.add_argument("--runner", choices=["tables", "whole"], default="tables")
    parser.add_argument("--steps-in-flight", type=int, choices=[1, 2], default=1)
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens of each sequence")
    parser.add_argument("--warm", type=int, default=30, help="decode steps before the first that counts")
    parser.add_argument("--steps", type=int, default=300, help="decode steps that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        work(args)
        return
    torch.set_num_threads(1)
    config = make_config(args)
    rows = []
    for _ in range(args.rounds):
        for ranks in dict.fromkeys((1, args.ranks)):
            head, worker, wall = measure(config, args, ranks)
            rows.append(
                {"ranks": ranks, "head": head, "worker": worker, "together": head + worker, "wall": wall}
            )
            print(
                f"{ranks} ranks: head {head:.3f} ms, one worker {worker:.3f} ms, together "
                f"{head + worker:.3f} ms of CPU a step; wall {wall:.3f} ms",
                flush=True,
            )
    print(f"\n{report(rows, args)}\n\nlimit for control ({args.ranks} ranks, --runner tables): {LIMIT_MS} ms")
    if args.json:
        made = {
            "date": date.today().isoformat(),
            "machine": describe(),
            "commit": commit(Path(__file__).parent),
            "command": f"python -m bench.control_overhead {' '.join(sys.argv[1:])}",
            "rows": rows,
        }
        args.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
