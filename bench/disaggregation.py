"""Measure how arriving prompts disturb decoding streams: one group for everything, or separate roles.

python -m bench.disaggregation --name disaggregation-mine
python -m bench.disaggregation --model qwen3-dense-s --variants unified,1p1d --rounds 5
python -m bench.disaggregation --model qwen3vl-s --images 1 --variants unified,1e1u,1e1p1d --rounds 3

Every round runs one real server after another, over HTTP. Streams decode all the time: first alone, then
beside one prompt every ``--every`` seconds. With several engines, each engine is pinned to one core.
``unified`` has all cores. The API server and the clients use idle time of the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import record
from bench.compare import default_folder, model_folder
from bench.observed import processes
from bench.pictures import messages, picture
from bench.rounds import say
from weft.bench.process import ServerProcess
from weft.bench.workloads import random_ids
from weft.common.cores import usable_cores

VARIANTS = {
    "unified": "--threads {cores}",
    "unified-x1": "--threads 1",
    "unified-target": "--threads {cores} --itl-target-ms {target}",
    "unified-x2": "--threads 1 --data-parallel-size 2",
    "1p1d": "--threads 1 --prefill 1 --decode 1",
    "unified-x3": "--threads 1 --data-parallel-size 3",
    "unified-x3-target": "--threads 1 --data-parallel-size 3 --itl-target-ms {target}",
    "1p2d": "--threads 1 --prefill 1 --decode 2",
    "1e1u": "--threads 1 --encode 1",
    "1e1u-host": "--threads 1 --encode 1 --mm-cache-bytes 32M --mm-host-cache-bytes 1G",
    "1e1p1d": "--threads 1 --encode 1 --prefill 1 --decode 1",
    "2e1p1d": "--threads 1 --encode 2 --prefill 1 --decode 1",
}
"""Flags of the server."""


@dataclass
class Load:
    """Hold the observations of one run: token times of the decoding streams, and the outcome of the
    prompts.
    """

    streams: list[list[float]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Seconds from sending each prompt to its first token."""
    come: float = 0.0
    """Time of the first prompt."""
    end: float = 0.0

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between two tokens of a stream, both in [begin, end)."""
        inside = [[at for at in times if begin <= at < end] for times in self.streams]
        return sorted(b - a for times in inside for a, b in itertools.pairwise(times))

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second of all decoding streams."""
        return sum(begin <= at < end for times in self.streams for at in times) / (end - begin)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of sorted ``values``, or 0 if ``values`` is empty."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


class Clients:
    """The clients of one server."""

    def __init__(self, server: ServerProcess, args: argparse.Namespace, vocabulary: int, seed: int) -> None:
        self._server, self._args, self._vocabulary, self._seed = server, args, vocabulary, seed
        self.load = Load()
        self._pictures = [self._pictures_of(number) for number in range(args.prompts if args.images else 0)]

    async def run(self) -> Load:
        """Streams alone, then beside prompts. Raises RuntimeError when a request fails."""
        args, load = self._args, self.load
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=args.deadline, trust_env=False, limits=limits) as http:
            streams = [asyncio.create_task(self._decode(http, number)) for number in range(args.streams)]
            await asyncio.sleep(args.warm_up + args.alone)
            load.come = time.monotonic()
            prompts = []
            for number in range(args.prompts):
                prompts.append(asyncio.create_task(self._prompt(http, number)))
                await asyncio.sleep(max(load.come + (number + 1) * args.every - time.monotonic(), 0.0))
            load.first = sorted(await asyncio.gather(*prompts))
            load.end = time.monotonic()
            for task in streams:
                task.cancel()
            for outcome in await asyncio.gather(*streams, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, asyncio.CancelledError):
                    raise outcome
        return load

    async def _decode(self, http: httpx.AsyncClient, number: int) -> None:
        for turn in itertools.count():
            times: list[float] = []
            self.load.streams.append(times)
            key, args = f"decode {number} {turn}", self._args
            await self._stream(http, key, args.decode_context, args.tokens, times)

    async def _prompt(self, http: httpx.AsyncClient, number: int) -> float:
        args, times = self._args, list[float]()
        if not args.images:
            began = time.monotonic()
            await self._stream(http, f"prompt {number}", args.prompt_tokens, args.output_tokens, times)
            return times[0] - began
        asked = {"messages": messages(self._pictures[number], f"picture {number}")}
        began = time.monotonic()
        await self._read(http, "chat/completions", asked, args.output_tokens, times)
        return times[0] - began

    def _pictures_of(self, number: int) -> list[str]:
        """Return the images of a prompt. The share ``--duplicates`` of all images repeats an earlier
        image.
        """
        side, share = self._args.image_side, self._args.duplicates
        seeds = range(number * self._args.images, (number + 1) * self._args.images)
        fresh = [seed if int(seed * (1 - share)) != int((seed - 1) * (1 - share)) else 0 for seed in seeds]
        return [picture(1000 * self._seed + seed, (side, side)) for seed in fresh]

    async def _stream(
        self, http: httpx.AsyncClient, key: str, length: int, tokens: int, times: list[float]
    ) -> None:
        prompt = random_ids(f"{self._seed} {key}", length, self._vocabulary)
        await self._read(http, "completions", {"prompt": prompt}, tokens, times)

    async def _read(
        self, http: httpx.AsyncClient, route: str, asked: dict[str, Any], tokens: int, times: list[float]
    ) -> None:
        more = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = {"model": self._server.model, **asked, **more}
        async with http.stream("POST", f"{self._server.url}/v1/{route}", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(f"error event: {event['error']}")
                    choice = event["choices"][0] if event["choices"] else {}
                    if "text" in choice or choice.get("delta", {}).get("content"):
                        times.append(time.monotonic())


def pin(root: int, cores: Sequence[int]) -> None:
    """Pin each engine to a core of its own, in order. Do nothing for a single engine."""
    heads = [pid for pid, role in processes(root).items() if role == "head"]
    if len(heads) < 2:
        return
    for number, pid in enumerate(heads):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                os.sched_setaffinity(int(task.name), {cores[number % len(cores)]})


@contextlib.contextmanager
def serving(flags: str, model: str, dtype: str, deadline: float, log: Path) -> Iterator[ServerProcess]:
    """Yield a server that is ready. Raise WeftError if the server does not become ready."""
    program = "from weft.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", model, "--port", "{port}", "--device", "cpu"]
    command += ["--dtype", dtype, *flags.split()]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with ServerProcess(command, environment=environment, log_file=log) as server:
        server.wait_ready(deadline)
        yield server


def once(flags: str, model: str, vocabulary: int, args: argparse.Namespace, seed: int, log: Path) -> Load:
    """Return the load of one fresh server. Raise RuntimeError or WeftError."""
    longest = max(args.prompt_tokens + args.output_tokens, args.decode_context + args.tokens)
    flags = f"--max-model-len {longest + 64} {flags}"
    with serving(flags, model, args.dtype, args.deadline, log) as server:
        assert server.pid is not None
        pin(server.pid, sorted(os.sched_getaffinity(0)))
        return asyncio.run(asyncio.wait_for(Clients(server, args, vocabulary, seed).run(), args.deadline))


def line(name: str, loads: Sequence[Load], args: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the table: medians over rounds."""

    def of(measure: Any) -> float:
        return statistics.median(measure(load) for load in loads)

    def ms(begin: str, end: str, share: float) -> float:
        return round(1e3 * of(lambda one: quantile(one.gaps(*span(one, begin, end)), share)), 1)

    def span(one: Load, begin: str, end: str) -> tuple[float, float]:
        at = {"alone": one.come - args.alone, "come": one.come, "end": one.end}
        return at[begin], at[end]

    size, unit = (args.images, "images/s") if args.images else (args.prompt_tokens, "prompt tok/s")
    asked = {unit: round(of(lambda one: args.prompts * size / (one.end - one.come)), 1)}
    return {
        "groups": name,
        "alone p50 ms": ms("alone", "come", 0.5),
        "alone p99": ms("alone", "come", 0.99),
        "beside p50": ms("come", "end", 0.5),
        "beside p99": ms("come", "end", 0.99),
        "beside max": ms("come", "end", 1.0),
        "decode tok/s": round(of(lambda one: one.rate(one.come, one.end)), 1),
        "TTFT p50 s": round(of(lambda one: quantile(one.first, 0.5)), 2),
        "TTFT p99 s": round(of(lambda one: quantile(one.first, 0.99)), 2),
        **asked,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-dense-s", help="bundled, a name of weft bench, or a folder")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="folder for checkpoints")
    parser.add_argument("--variants", default="unified,unified-target,unified-x2,1p1d")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=4, help="streams that decode all the time")
    parser.add_argument("--decode-context", type=int, default=64, help="prompt tokens of the streams")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a stream before its replacement")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument(
        "--images", type=int, default=0, help="images of each prompt, instead of --prompt-tokens"
    )
    parser.add_argument("--image-side", type=int, default=512, help="width and height of an image in pixels")
    parser.add_argument("--duplicates", type=float, default=0.0, help="share of repeated images")
    parser.add_argument("--output-tokens", type=int, default=8, help="output tokens of each prompt")
    parser.add_argument("--every", type=float, default=2.5, help="seconds between two prompts")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds")
    parser.add_argument("--alone", type=float, default=5.0, help="seconds of streams without prompts")
    parser.add_argument("--itl-target-ms", type=float, default=0.0, help="0: 1.6 times the median alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds of one run")
    parser.add_argument("--name", help="name of the result in bench/results")
    args = parser.parse_args()
    args.variants = chosen(parser, args.variants)
    return args


def chosen(parser: argparse.ArgumentParser, variants: str) -> list[str]:
    """The names in ``--variants``, each of ``VARIANTS``."""
    names = variants.split(",")
    for variant in names:
        if variant not in VARIANTS:
            parser.error(f"--variants {variant}: known are {', '.join(VARIANTS)}")
    return names


def main() -> None:
    args = arguments()
    model = str(model_folder(args.model, args.folder))
    config = json.loads((Path(model) / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    loads: dict[str, list[Load]] = {name: [] for name in args.variants}
    target = args.itl_target_ms
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name in args.variants:
                values = {"cores": usable_cores(), "target": f"{target:.1f}"}
                log = Path(folder) / f"{name}.log"
                load = once(VARIANTS[name].format(**values), model, vocabulary, args, number, log)
                loads[name].append(load)
                target = target or 1.6e3 * quantile(load.gaps(load.come - args.alone, load.come), 0.5)
                say(f"round {number + 1}/{args.rounds}: {json.dumps(line(name, [load], args))}")
    table = record.markdown([line(name, found, args) for name, found in loads.items()])
    print(table)
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        rows = [line(name, found, args) for name, found in loads.items()]
        size = f"{args.prompt_tokens} tokens"
        if args.images:
            size = (
                f"{args.images} images of {args.image_side} x {args.image_side} ({args.duplicates:.0%} again)"
            )
        said = f"{args.prompts} prompts of {size} against {args.streams} streams"
        title = f"{said}: {args.model}"
        record.write(path, "bench.disaggregation", title, table, {"rows": rows, "target_ms": target})


if __name__ == "__main__":
    main()
