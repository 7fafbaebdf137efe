"""Measure the harm of one careless client: a canary runs beside each attack of ``bench.hostile``.

python -m bench.canary --seconds 30 --out bench/results/canary.json

The canary sends a request every 0.1 s from a separate process, even if earlier requests are unanswered. The
kinds in ``CANARIES`` alternate. The canary and the attacker have different API keys. The output has, for each
attack and kind: latency, refusals, and the memory of the API server and of the whole server before the
attack, at the peak and afterwards. Every attack gets a fresh server.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from PIL import Image

from bench import record
from bench.hostile import ATTACKS, RESPONSES, SHARED_PATTERN
from weft.bench.process import ServerProcess
from weft.bench.process_memory import tree

INTERVAL = 0.1
SETTLE = 5.0
"""Seconds after an attack in which the API server may free memory."""
NONE = "none"
SEES = "spool-vision"
"""Name of the bundled model with image input."""


KEYS = ("canary", "attacker")
"""API keys of the server."""
SPARE = 1000
"""First number of a canary request. Attacks use smaller numbers, so no canary request equals an attack
request."""


def _chat(number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }


def _grammar(number: int) -> tuple[str, dict[str, Any]]:
    """Return a chat request with a schema that no other request uses."""
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    path, body = _chat(number)
    return path, {**body, "ignore_eos": False, "response_format": form}


def _shared_grammar(number: int) -> tuple[str, dict[str, Any]]:
    """Return a chat request with a pattern that one attack also uses."""
    path, body = _chat(number)
    return path, {**body, "ignore_eos": False, "guided_regex": SHARED_PATTERN}


def _stored(number: int) -> tuple[str, dict[str, Any]]:
    """Return a request for a response; the caller continues the first stored response."""
    return RESPONSES, {"input": "Hi", "max_output_tokens": 1, "temperature": 0}


def _image(number: int) -> tuple[str, dict[str, Any]]:
    """Return a chat request with a unique image. The model must accept images: ``--model spool-vision``."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (number % 256, number // 256 % 256, 77)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    path, body = _chat(number)
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return path, {**body, "messages": [{"role": "user", "content": parts}]}


CANARIES: dict[str, Callable[[int], tuple[str, dict[str, Any]]]] = {
    "text": _chat,
    "grammar": _grammar,
    "shared_grammar": _shared_grammar,
    "stored": _stored,
    "image": _image,
}
"""Request builders by kind. A builder takes the number of a request and returns the path and the body."""


@dataclass
class Row:
    """Hold the figures of one attack and one kind of canary request.

    Latencies are milliseconds. Memory is resident MB of the API server, of the engine and of all processes of
    the server, guard processes included.
    """

    attack: str
    canary: str
    requests: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    refused: int
    answers: str
    """Statuses of the attack's requests, with counts."""
    front_mb: float
    peak_mb: float
    after_mb: float
    engine_mb: float
    engine_after_mb: float
    all_mb: float
    all_peak_mb: float
    all_after_mb: float


class Canary:
    """Send requests at fixed times until stopped. The ``kinds`` alternate."""

    def __init__(self, url: str, model: str, kinds: Sequence[str] = ("text",), key: str = "") -> None:
        self._url = url
        self._model = model
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.kinds = tuple(kinds)
        self.by_kind: dict[str, list[float]] = {kind: [] for kind in kinds}
        """Seconds of each request."""
        self._first: str | None = None
        """Id of the first stored response."""
        self.refusals: dict[str, list[str]] = {kind: [] for kind in kinds}

    @property
    def seconds(self) -> list[float]:
        return [each for found in self.by_kind.values() for each in found]

    @property
    def refused(self) -> list[str]:
        return [each for found in self.refusals.values() for each in found]

    async def run(self, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(
            timeout=60, trust_env=False, headers=self._headers, limits=httpx.Limits(max_connections=None)
        ) as link:
            asked = []
            start = time.perf_counter()
            while not stop.is_set():
                due = start + len(asked) * INTERVAL
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                kind = self.kinds[len(asked) % len(self.kinds)]
                asked.append(asyncio.create_task(self._ask(link, kind, SPARE + len(asked))))
            await asyncio.gather(*asked)

    async def _ask(self, link: httpx.AsyncClient, kind: str, number: int) -> None:
        path, body = CANARIES[kind](number)
        if path == RESPONSES and self._first is not None:
            body = {**body, "previous_response_id": self._first}
        begun = time.perf_counter()
        try:
            answer = await link.post(self._url + path, json={"model": self._model, **body})
            if answer.status_code != 200:
                self.refusals[kind].append(str(answer.status_code))
            elif path == RESPONSES and self._first is None:
                self._first = answer.json()["id"]
        except httpx.HTTPError as error:
            self.refusals[kind].append(type(error).__name__)
        self.by_kind[kind].append(time.perf_counter() - begun)


class Memory:
    """Sample the resident megabytes of one process, or with ``whole`` of the process and all its
    descendants.
    """

    def __init__(self, pid: int, *, whole: bool = False) -> None:
        self._pid = pid
        self._whole = whole
        self.peak = 0.0
        self._stop = threading.Event()

    def now(self) -> float:
        pids = [one.pid for one in tree(self._pid)] if self._whole else [self._pid]
        found = sum(map(_resident, pids))
        self.peak = max(self.peak, found)
        return found

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


def is_engine(pid: int) -> bool:
    """Return True if process ``pid`` has the title of an engine."""
    with contextlib.suppress(OSError):  # the process has just ended
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"weft: head")
    return False


def _resident(pid: int) -> float:
    with contextlib.suppress(OSError):  # the process has just ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def beside(canary: Canary, command: list[str] | None, seconds: float, settle: float = SETTLE) -> str:
    """Run the canary beside an attack, from 1 s before the attack until ``settle`` seconds after the attack.

    Return the output of the attack.
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


def measure(attack: str, args: argparse.Namespace) -> list[Row]:
    """Run one attack on a fresh server. Raise ServerFailed if the server does not start."""
    keys = [word for key in KEYS for word in ("--api-key", key)]
    command = [sys.executable, "-m", "weft", "serve", args.model, "--port", "{port}", *keys, *args.flags]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(command, log_file=args.log or Path(folder) / "log") as server,
    ):
        server.wait_ready(180, KEYS[0])
        assert server.pid is not None
        asyncio.run(beside(Canary(server.url, args.model, args.canaries, KEYS[0]), None, 3.0))  # warm
        front, whole = Memory(tree(server.pid)[0].pid), Memory(server.pid, whole=True)
        (head,) = (one.pid for one in tree(server.pid) if is_engine(one.pid))
        engine = Memory(head)
        before, engine_before, whole_before = front.now(), engine.now(), whole.now()
        canary = Canary(server.url, args.model, args.canaries, KEYS[0])
        hostile = [sys.executable, "-m", "bench.hostile", attack, server.url, "--model", args.model]
        hostile += [
            "--seconds",
            str(args.seconds),
            "--scale",
            str(args.scale),
            "--streams",
            str(args.streams),
            "--key",
            KEYS[1],
        ]
        with front.watched(), whole.watched():
            told = asyncio.run(beside(canary, None if attack == NONE else hostile, args.seconds))
        time.sleep(SETTLE)
        after, engine_after, whole_after = front.now(), engine.now(), whole.now()
        return [
            Row(
                attack=attack,
                canary=kind,
                requests=len(seconds),
                p50_ms=round(1e3 * percentile(seconds, 0.5), 1),
                p99_ms=round(1e3 * percentile(seconds, 0.99), 1),
                max_ms=round(1e3 * max(seconds), 1),
                refused=len(canary.refusals[kind]),
                answers=told or "-",
                front_mb=round(before),
                peak_mb=round(front.peak),
                after_mb=round(after),
                engine_mb=round(engine_before),
                engine_after_mb=round(engine_after),
                all_mb=round(whole_before),
                all_peak_mb=round(whole.peak),
                all_after_mb=round(whole_after),
            )
            for kind, seconds in canary.by_kind.items()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="spool-text")
    parser.add_argument("--attacks", nargs="+", choices=[NONE, *ATTACKS], default=[NONE, *ATTACKS])
    parser.add_argument(
        "--canaries",
        nargs="+",
        choices=CANARIES,
        help="kinds of requests; default: all, with images for spool-vision",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of each attack")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the attacks")
    parser.add_argument("--streams", type=int, default=64, help="streams that are never read")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="flags of the server; must be the last argument"
    )
    parser.add_argument("--log", help="file for the log of the last server")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.canaries is None:
        args.canaries = [kind for kind in CANARIES if kind != "image" or args.model == SEES]
    rows = []
    for attack in args.attacks:
        for row in measure(attack, args):
            print(json.dumps(asdict(row)), flush=True)
            rows.append(asdict(row))
    table = record.markdown(rows)
    print(table)
    if args.out is not None:
        title = "A canary beside hostile clients: a request every 0.1 s, of each kind in turn"
        record.write(args.out, "bench.canary", title, table, {"rows": msgspec.to_builtins(rows)})


if __name__ == "__main__":
    main()
