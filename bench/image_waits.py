"""Measure the loss of a prefill group while prompts wait for embeddings of images.

python -m bench.image_waits --name image-waits-mine

Each group has one role. The prefill engine has the last core alone; all other processes share the other
cores.

**Ready and not computed.** Prompts with an image run beside prompts of text. The data are the spans of
``--trace-requests``. The time from the first to the last span at the prefill engine has four parts:

    computing     a prompt is in a step, or between two of its steps
    lost          no prompt is computed, but a ready prompt (no image is missing) waits for a step
    only images   all prompts wait for images
    nothing       no prompt is present

**Text beside prompts that wait.** Prompts of text run as fast as possible, in turns alone and beside
``--waiting`` prompts without their images: the encode group is stopped (SIGSTOP) meanwhile. The loss is the
slowdown of the prompts of text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench import record
from bench.compare import default_folder, model_folder
from bench.drill import processes, title_of
from bench.pictures import messages, picture
from bench.rounds import say
from weft.bench.process import ServerProcess
from weft.bench.process_memory import tree
from weft.bench.workloads import random_ids
from weft.tracing.merge import ReadSpan, read_folder

Interval = tuple[int, int]
"""Nanoseconds: [begin, end)."""
End = tuple[float, float]
"""(time of an answer, CPU seconds of the prefill process at that time)."""
FLAGS = "--threads 1 --encode 1 --prefill 1 --decode 1 --no-enable-prefix-caching"
TEXTS = 4
"""Number of concurrent prompts of text, so that a ready prompt always exists."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same moments as disjoint intervals in order."""
    made: list[Interval] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        elif end > begin:
            made.append((begin, end))
    return made


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in union(intervals))


def shares(spans: Sequence[ReadSpan], head: str = "prefill") -> dict[str, float]:
    """Return shares of the time of the engine whose name begins with ``head``; the module docstring defines
    them.

    Raise ValueError if the engine has no spans.
    """
    found: dict[str, list[Interval]] = {"prefill": [], "queue": [], "await images": []}
    for one in spans:
        if one.process.startswith(head) and one.name in found:
            found[one.name].append((one.start, one.end))
    whole = [interval for intervals in found.values() for interval in intervals]
    if not whole:
        raise ValueError(f"no head {head} wrote spans of prompts")
    computing, ready, waiting = found.values()
    seconds = max(end for _, end in whole) - min(begin for begin, _ in whole)
    # Each state counts only where no earlier state applies: lengths of unions, minus the union of earlier
    # states.
    lost = length(computing + ready) - length(computing)
    images = length(computing + ready + waiting) - length(computing + ready)
    nothing = seconds - length(whole)
    parts = {"computing": length(computing), "lost": lost, "only images": images, "nothing": nothing}
    return {name: part / seconds for name, part in parts.items()}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def give_cores(root: int) -> None:
    """Give the last core to the prefill engine alone. Give the other cores to this process and the rest."""
    cores = sorted(os.sched_getaffinity(0))
    for process in [os.getpid(), *(one.pid for one in tree(root))]:
        alone = title_of(process).startswith("head prefill")
        mine = set(cores[-1:] if alone else cores[:-1] or cores)
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                os.sched_setaffinity(int(task.name), mine)


class Asked:
    """Requests to one server. All have other prompts."""

    def __init__(self, http: httpx.AsyncClient, server: ServerProcess, args: argparse.Namespace) -> None:
        self._http, self._server, self._args = http, server, args
        self._numbers = itertools.count()

    async def text(self) -> None:
        """Send one prompt of text and wait for the answer."""
        prompt = random_ids(f"text {next(self._numbers)}", self._args.prompt_tokens, 4096)
        await self._post("completions", {"prompt": prompt})

    async def image(self) -> None:
        """Send one prompt with an image and wait for the answer."""
        number = next(self._numbers)
        side = self._args.image_side
        shown = await asyncio.to_thread(picture, number, (side, side))
        await self._post("chat/completions", {"messages": messages([shown], f"picture {number}")})

    async def _post(self, route: str, asked: dict[str, Any]) -> None:
        body = {"model": self._server.model, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **asked}
        (await self._http.post(f"/v1/{route}", json=body)).raise_for_status()

    async def awaiting(self) -> int:
        """Return the number of prompts that wait for images, over all engines."""
        page = (await self._http.get("/metrics")).text
        name = "weft:embedding_transfers_awaiting"
        return int(sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)))


@contextlib.asynccontextmanager
async def texts(asked: Asked, head: int) -> AsyncIterator[list[End]]:
    """Keep ``TEXTS`` prompts of text running inside the context. Yield the list of their ends.

    ``head`` is the id of the prefill process. Raise the error of a failed prompt on exit.
    """
    ends: list[End] = []

    async def one() -> None:
        while True:
            await asked.text()
            ends.append((time.monotonic(), cpu_seconds(head)))

    tasks = [asyncio.create_task(one()) for _ in range(TEXTS)]
    try:
        yield ends
        for task in tasks:
            if task.done():
                task.result()  # raise the error of a failed prompt
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def beside(asked: Asked, head: int, args: argparse.Namespace, text: bool) -> None:
    """Send images at a fixed rate for ``--seconds``, with or without prompts of text beside them."""
    async with contextlib.AsyncExitStack() as held:
        if text:
            await held.enter_async_context(texts(asked, head))
        begun, tasks = time.monotonic(), list[asyncio.Task[None]]()
        while (left := args.seconds - (time.monotonic() - begun)) > 0:
            tasks.append(asyncio.create_task(asked.image()))
            await asyncio.sleep(min(args.every, left))
        await asyncio.gather(*tasks)


def rates(ends: Sequence[End]) -> tuple[float, float]:
    """(prompts a second, CPU milliseconds of each) between the first end and the last. Raises ValueError of
    less than two."""
    if len(ends) < 2:
        raise ValueError("too few prompts were computed: make rounds longer")
    (begun, before), (ended, after) = ends[0], ends[-1]
    count = len(ends) - 1
    return count / (ended - begun), 1e3 * (after - before) / count


async def in_turns(asked: Asked, root: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return prompts of text per second of each round, in turns alone and beside waiting prompts."""
    rounds: list[dict[str, float]] = []
    for number in range(2 * args.rounds + 1):
        count = args.waiting * (number % 2)
        encoder = heads(root)["encode"]  # look up again: an encoder stopped during its transfers is replaced
        try:
            # a group that is stopped for long receives no requests, so stop the group just before the round
            if count:
                os.kill(encoder, signal.SIGSTOP)
            rounds.append(await _round(asked, heads(root)["prefil"], count, args))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(encoder, signal.SIGCONT)
        say(f"{rounds[-1]}")
    return rounds


async def _round(asked: Asked, head: int, count: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure prompts of text beside ``count`` waiting prompts. Raise RuntimeError if the prompts do not
    wait.
    """
    waiting = [asyncio.create_task(asked.image()) for _ in range(count)]
    until = time.monotonic() + args.deadline
    try:
        while (there := await asked.awaiting()) != count:
            if time.monotonic() > until:
                raise RuntimeError(f"{there} prompts wait for images, not {count}")
            await asyncio.sleep(0.2)
        async with texts(asked, head) as ends:
            await asyncio.sleep(args.seconds)
        if any(task.done() for task in waiting):
            raise RuntimeError("a prompt did not wait for its image")
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    rate, cpu = rates(ends)
    return {"waiting": count, "prompts": len(ends), "rate": rate, "cpu_ms": cpu}


def heads(root: int) -> dict[str, int]:
    """Return engine process ids by the first six letters of their roles."""
    titles = ((pid, title_of(pid).split()) for pid in processes(root))
    return {words[1][:6]: pid for pid, words in titles if len(words) > 1 and words[0] == "head"}


async def load(server: ServerProcess, args: argparse.Namespace, kind: str) -> list[dict[str, float]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=args.deadline, trust_env=False, limits=limits
    ) as http:
        asked = Asked(http, server, args)
        root = server.pid or 0
        await asked.image()  # warm up
        if kind == "turns":
            return await in_turns(asked, root, args)
        await beside(asked, heads(root)["prefil"], args, kind == "images and text")
        await asyncio.sleep(1.0)  # until spans are written
        return []


def once(kind: str, model: str, args: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Run one server under one kind of load. Return (shares of the engine's time, rounds)."""
    program = "from weft.cli.main import main; main()"
    with tempfile.TemporaryDirectory() as folder:
        spans = Path(folder) / "spans"
        command = [sys.executable, "-c", program, "serve", model, "--port", "{port}", "--device", "cpu"]
        command += ["--dtype", args.dtype, "--max-model-len", "4096", *FLAGS.split(), "--role-timeout", "900"]
        command += ["--engine-timeout", "900"] + ([] if kind == "turns" else ["--trace-requests", str(spans)])
        environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        log = Path(folder) / "server.log"
        with ServerProcess(command, environment=environment, log_file=log) as server:
            server.wait_ready(args.deadline)
            give_cores(server.pid or 0)
            rounds = asyncio.run(asyncio.wait_for(load(server, args, kind), args.deadline))
        return ({} if kind == "turns" else shares(read_folder(spans)[0])), rounds


def turns(rounds: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """The table of rounds in turns."""
    made: list[dict[str, Any]] = []
    alone = statistics.median(one["rate"] for one in rounds if not one["waiting"])
    for count in sorted({one["waiting"] for one in rounds}):
        those = [one for one in rounds if one["waiting"] == count]
        rate = statistics.median(one["rate"] for one in those)
        cpu = statistics.median(one["cpu_ms"] for one in those)
        made.append(
            {
                "prompts that wait": count,
                "prompts of text/s, each round": ", ".join(f"{one['rate']:.3f}" for one in those),
                "median": round(rate, 3),
                "lost %": round(100 * (1 - rate / alone), 2),
                "CPU ms of a prompt": round(cpu, 1),
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3vl-s", help="bundled, a name of weft bench, or a folder")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="for checkpoints")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of prompts of text")
    parser.add_argument("--image-side", type=int, default=512, help="pixels")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two images")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a load, and of a round")
    parser.add_argument("--waiting", type=int, default=16, help="prompts that wait beside those of text")
    parser.add_argument("--rounds", type=int, default=3, help="with those that wait; one more without")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds of one load")
    parser.add_argument("--name", help="of the result in bench/results")
    args = parser.parse_args()
    model = str(model_folder(args.model, args.folder))
    made: list[dict[str, Any]] = []
    for kind in ("images", "images and text"):
        of = once(kind, model, args)[0]
        made.append({"prompts": kind, **{f"{name} %": round(100 * share, 2) for name, share in of.items()}})
        say(f"{made[-1]}")
    rounds = once("turns", model, args)[1]
    table = f"{record.markdown(made)}\n\n{record.markdown(turns(rounds))}"
    print(table)
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        title = f"What a group that computes prompts loses to waits for embeddings: {args.model}"
        record.write(path, "bench.image_waits", title, table, {"shares": made, "rounds": rounds})


if __name__ == "__main__":
    main()
