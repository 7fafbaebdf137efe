"""What one careless client does to others: a canary beside each attack of ``bench.hostile``.

python -m bench.canary --seconds 30 --out bench/results/canary.json

The canary asks for a chat of two tokens every 0.1 s, whether the last one was answered or not, from a process
of its own. For each attack: its latency, what was refused, and the memory of the front before, at its peak
and after. Every attack meets a fresh server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import msgspec

from bench import record
from bench.hostile import ATTACKS
from weft.bench.process import ServerProcess
from weft.bench.process_memory import tree

INTERVAL = 0.1
SETTLE = 5.0
"""Seconds after an attack in which the front may give memory back."""
NONE = "none"


@dataclass
class Row:
    """One attack: milliseconds of the canary, its refusals, and MB of the front."""

    attack: str
    requests: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    refused: int
    answers: str
    """Statuses that the attack got, with their counts."""
    front_mb: float
    peak_mb: float
    after_mb: float


class Canary:
    """Asks at fixed times for a while."""

    def __init__(self, url: str, model: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._body = {
            "model": model,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
        }
        self.seconds: list[float] = []
        self.refused: list[str] = []

    async def run(self, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(
            timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None)
        ) as link:
            asked = []
            start = time.perf_counter()
            while not stop.is_set():
                due = start + len(asked) * INTERVAL
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                asked.append(asyncio.create_task(self._ask(link)))
            await asyncio.gather(*asked)

    async def _ask(self, link: httpx.AsyncClient) -> None:
        begun = time.perf_counter()
        try:
            answer = await link.post(self._url, json=self._body)
            if answer.status_code != 200:
                self.refused.append(str(answer.status_code))
        except httpx.HTTPError as error:
            self.refused.append(type(error).__name__)
        self.seconds.append(time.perf_counter() - begun)


class Memory:
    """Resident megabytes of one process, watched."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.peak = 0.0
        self._stop = threading.Event()

    def now(self) -> float:
        for line in self._status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                found = int(line.split()[1]) / 1024
                self.peak = max(self.peak, found)
                return found
        return 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        def watch() -> None:
            while not self._stop.wait(0.05):
                self.now()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def beside(canary: Canary, command: list[str] | None, seconds: float, settle: float = SETTLE) -> str:
    """Runs the canary beside an attack, from a second before it to ``settle`` seconds after it.

    Returns what the attack printed.
    """
    stop = asyncio.Event()
    running = asyncio.create_task(canary.run(stop))
    await asyncio.sleep(1.0)
    told = ""
    if command is None:
        await asyncio.sleep(seconds)
    else:
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), seconds + 300)
        told = out.decode().strip()
    await asyncio.sleep(settle)
    stop.set()
    await running
    return told


def measure(attack: str, args: argparse.Namespace) -> Row:
    """One attack on a fresh server. Raises ServerFailed when it does not start."""
    command = [sys.executable, "-m", "weft", "serve", args.model, "--port", "{port}", *args.flags]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(command, log_file=args.log or Path(folder) / "log") as server,
    ):
        server.wait_ready(180)
        assert server.pid is not None
        asyncio.run(beside(Canary(server.url, args.model), None, 1.0))  # warm
        front = Memory(tree(server.pid)[0].pid)
        before = front.now()
        canary = Canary(server.url, args.model)
        hostile = [sys.executable, "-m", "bench.hostile", attack, server.url, "--model", args.model]
        hostile += [
            "--seconds",
            str(args.seconds),
            "--scale",
            str(args.scale),
            "--streams",
            str(args.streams),
        ]
        with front.watched():
            told = asyncio.run(beside(canary, None if attack == NONE else hostile, args.seconds))
        time.sleep(SETTLE)
        after = front.now()
        return Row(
            attack=attack,
            requests=len(canary.seconds),
            p50_ms=round(1e3 * percentile(canary.seconds, 0.5), 1),
            p99_ms=round(1e3 * percentile(canary.seconds, 0.99), 1),
            max_ms=round(1e3 * max(canary.seconds), 1),
            refused=len(canary.refused),
            answers=told or "-",
            front_mb=round(before),
            peak_mb=round(front.peak),
            after_mb=round(after),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="spool-text")
    parser.add_argument("--attacks", nargs="+", choices=[NONE, *ATTACKS], default=[NONE, *ATTACKS])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each attack")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the attacks")
    parser.add_argument("--streams", type=int, default=64, help="streams that are never read")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the server; last")
    parser.add_argument("--log", help="file for the log of the last server")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for attack in args.attacks:
        row = measure(attack, args)
        print(json.dumps(asdict(row)), flush=True)
        rows.append(asdict(row))
    table = record.markdown(rows)
    print(table)
    if args.out is not None:
        title = "A canary beside hostile clients: a chat of two tokens every 0.1 s"
        record.write(args.out, "bench.canary", title, table, {"rows": msgspec.to_builtins(rows)})


if __name__ == "__main__":
    main()
