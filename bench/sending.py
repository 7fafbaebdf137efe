"""Compare prefill that sends its caches with prefill that sends nothing, in one process and one run.

    python -m bench.sending [--model FOLDER] [--prompts 8] [--length 1024] [--rounds 9]

A runner computes prompts in chunks, with plans made by this script. In every other turn each prompt is a
transfer: its chunks are exported, and a process on another core receives the bytes. The difference is the
cost of sending in the computing process: callbacks, plans of spans, digests. Both processes are pinned.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

from weft.bench.checkpoints import make
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.config.sections.all import TransferSection
from weft.disagg.protocol.events import RankReport
from weft.disagg.protocol.group_layout import blocks_of
from weft.engine.build import build_runner
from weft.engine.disagg.rank_rooms import open_rooms
from weft.runner.runner import Runner
from weft.types import plan as p
from weft.types import rooms as r
from weft.types.rooms import Outcome, RoomKey
from weft.types.sampling import TokenParams

CHUNK = 512
PARAMS = TokenParams(temperature=0.0)


def config_of(model: str, length: int, prompts: int, role: Any, dtype: str) -> EngineConfig:
    settings = {
        "model": model,
        "device": "cpu",
        "dtype": dtype,
        "max_model_len": length + 64,
        "max_num_seqs": prompts,
        "kv_cache_memory": "1G",
        "threads": 1,
    }
    return msgspec.structs.replace(resolve(from_keywords(settings)), transfer=TransferSection(role=role))


class Receiver:
    """Receive transfers in a process of its own, without computing."""

    def __init__(self, config: EngineConfig) -> None:
        rooms = open_rooms(config, config.kv, 0)
        assert rooms is not None
        self.rooms = rooms

    def expect(self, offer: r.Admitted, tables: Sequence[bytes]) -> r.Bound:
        bound = r.Bound(
            key=offer.key,
            start=0,
            dims=self.rooms.transfer.dims,
            blocks=tuple(r.Blocks(first=0, ids=ids) for ids in tables),
            endpoints=(self.rooms.endpoint,),
        )
        self.rooms.transfer.expect(offer, bound)
        return bound

    def wait(self, count: int) -> None:
        while count:
            for said in self.rooms.reports.take():
                if isinstance(said, RankReport) and said.outcome is not Outcome.pending:
                    assert said.outcome is Outcome.done, said.error
                    self.rooms.transfer.stop(said.key)
                    count -= 1
            time.sleep(0.001)


def receive(config: EngineConfig, core: int, pipe: Connection) -> None:
    os.sched_setaffinity(0, {core})
    receiver = Receiver(config)
    pipe.send("ready")
    while (word := pipe.recv()) is not None:
        if isinstance(word, int):
            receiver.wait(word)
            pipe.send("done")
        else:
            offer, tables = word
            pipe.send(receiver.expect(msgspec.msgpack.decode(offer, type=r.Admitted), tables))
    receiver.rooms.close()


class Sender:
    """Compute prompts with hand-made plans."""

    def __init__(self, runner: Runner, prompts: int, length: int, pipe: Connection) -> None:
        self.runner, self.prompts, self.length, self.pipe = runner, prompts, length, pipe
        self.step = self.gen = 0
        self.tables = []
        for pool in runner.kv.pools:
            each = -(-length // pool.block_size)
            lines = 1 + np.random.default_rng(0).permutation(pool.num_blocks)
            self.tables.append([lines[n * each : (n + 1) * each] for n in range(prompts)])

    def round(self, sends: bool) -> float:
        """Tokens a second."""
        self.gen += 1
        keys = [RoomKey(prompt, self.gen, 1) for prompt in range(self.prompts)] if sends else []
        transfer = self.runner.transfer
        assert transfer is not None
        # Transfers are set up before the clock starts; only prefill and its exports are timed.
        for prompt, key in enumerate(keys):
            offer = r.Admitted(key=key, num_prompt=self.length, dims=transfer.dims)
            tables = tuple(blocks_of(kind[prompt]) for kind in self.tables)
            self.pipe.send((msgspec.msgpack.encode(offer), [table.ids for table in tables]))
            transfer.begin(offer, self.pipe.recv(), tables)
        began = time.perf_counter()
        for prompt in range(self.prompts):
            self._prefill(prompt, keys[prompt] if sends else None)
        took = time.perf_counter() - began
        if sends:
            self.pipe.send(self.prompts)
            self.pipe.recv()
            for key in keys:
                transfer.stop(key)
        assert self.runner.reports is not None
        self.runner.reports.take()
        return self.prompts * self.length / took

    def _prefill(self, prompt: int, key: RoomKey | None) -> None:
        entry = p.AllocSlot(
            slot=prompt,
            gen=self.gen,
            choice=0,
            seed=1,
            params=PARAMS,
            num_prompt=self.length,
            num_cached=0,
            token_ids=p.column((np.arange(self.length) * 7 + prompt) % 1000),
        )
        ops: list[p.Op] = [entry]
        for kind, tables in enumerate(self.tables):
            ops.append(p.AppendBlocks(slot=prompt, kind=kind, blocks=p.column(tables[prompt])))
        for begin in range(0, self.length, CHUNK):
            end = min(begin + CHUNK, self.length)
            if key is not None:
                places = tuple(
                    blocks_of(tables[prompt][: -(-end // pool.block_size)])
                    for tables, pool in zip(self.tables, self.runner.kv.pools, strict=True)
                )
                ops.append(p.Export(slot=prompt, key=key, start=begin, end=end, blocks=places))
            last = p.column([int(end == self.length)])
            row = p.Segment(
                slot=p.column([prompt]),
                gen=p.column([self.gen]),
                start=p.column([begin]),
                count=p.column([end - begin]),
                logits=last,
                sample=last,
                next_k=p.column([0]),
            )
            self._run(p.StepPlan(step=self.step, ops=tuple(ops), prefill=row))
            ops = []
        self._run(p.StepPlan(step=self.step, ops=(p.FreeSlot(slot=prompt, gen=self.gen),)))

    def _run(self, plan: p.StepPlan) -> None:
        self.step += 1
        handle = self.runner.forward(plan)
        self.runner.sample(handle)
        self.runner.read(handle)


def random_model(folder: str) -> str:
    """Make ``qwen3-dense-s`` with random weights in ``folder``. Return its path."""
    model = os.path.join(folder, "model")
    make("qwen3-dense-s", model, 0)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder; by default qwen3-dense-s, made with random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        model = args.model or random_model(folder)
        shape = model, args.length, args.prompts
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        config = config_of(*shape, "decode", args.dtype)
        process = context.Process(target=receive, args=(config, cores[-1], there), daemon=True)
        process.start()
        assert here.recv() == "ready"
        os.sched_setaffinity(0, {cores[0]})
        runner = build_runner(config_of(*shape, "prefill", args.dtype), progress=False)
        sender = Sender(runner, args.prompts, args.length, here)
        rates: dict[bool, list[float]] = {False: [], True: []}
        shares = []
        for number in range(args.rounds + 1):
            made = {sends: sender.round(sends) for sends in ((False, True) if number % 2 else (True, False))}
            if number:  # the first round warms up
                shares.append(made[True] / made[False])
                for sends, rate in made.items():
                    rates[sends].append(rate)
        for sends, found in rates.items():
            name = "sends" if sends else "alone"
            print(f"{name}: {statistics.median(found):8.0f} tok/s   {[round(x) for x in found]}")
        each = [round(share, 3) for share in shares]
        print(f"sending over alone, in each round: median {statistics.median(shares):.3f}   {each}")
        here.send(None)
        process.join(10)
        runner.close()


if __name__ == "__main__":
    main()
