"""Measure the harm of a killed process: lost requests, changed tokens, seconds without a token.

python -m bench.drill --name drill-mine
python -m bench.drill --victims front,head,rank --clients 8 --requests 100 --kills 5
python -m bench.drill --victims head --tree ../weft-before --name drill-before

Each kind of victim gets a fresh server. Clients send streaming requests in sequence. After a broken
connection a client sends the request again, as OpenAI's clients do. Every answer is compared with the answer
before the first kill. The server recovers fully between kills. The gap of a kill is, for each client, the
longest time between two tokens around the kill, pauses between requests included. ``--tree`` runs the server
of another working tree, to compare versions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench import record
from bench.observed import pools, processes, title_of
from bench.pictures import messages, noise, photographs
from weft.bench.process import ServerProcess


class Victim(NamedTuple):
    """Describe a process to kill, and its server."""

    process: str
    """Beginning of the process title, after ``weft: ``."""
    flags: str = ""
    decode_flags: str = ""
    """Flags of the decode group. If set, the server runs a topology with one group of each role."""
    stops: bool = False
    """True to send SIGSTOP instead of SIGKILL."""
    wakes_after: float = 0.0
    """Seconds until a stopped process continues; 0 for never."""

    @property
    def images(self) -> bool:
        """True if requests have images that encode groups process."""
        return "--encode" in self.flags

    @property
    def roles(self) -> bool:
        """True if prefill and decode run in separate groups."""
        return "--prefill" in self.flags or bool(self.decode_flags)

    @property
    def described(self) -> str:
        one_each = f"a group that prefills, one that decodes with {self.decode_flags}"
        return one_each if self.decode_flags else self.flags or "-"


VICTIMS = {
    "front": Victim("front ", "--fronts 2"),
    "head": Victim("head "),
    "head-of-two": Victim("head ", "--data-parallel-size 2"),
    "rank": Victim("worker ", "--tensor-parallel-size 2"),
    "rank-stopped": Victim("worker ", "--tensor-parallel-size 2 --rank-timeout 5", stops=True),
    "prefill": Victim("head prefill", "--prefill 1 --decode 2"),
    "decode": Victim("head decode", "--prefill 1 --decode 2"),
    "prefill-of-two": Victim("head prefill", "--prefill 2 --decode 1"),
    "decode-alone": Victim("head decode", "--prefill 2 --decode 1"),
    "encode": Victim("head encode", "--prefill 1 --decode 1 --encode 2 --mm-cache-bytes 256K"),
    "encode-alone": Victim("head encode", "--encode 1 --mm-cache-bytes 256K --role-timeout 60"),
    "front-roles": Victim("front ", "--fronts 2 --prefill 1 --decode 1"),
    "decode-rank": Victim("worker ", decode_flags="--tensor-parallel-size 2"),
    "prefill-stopped": Victim("head prefill", "--prefill 1 --decode 2", stops=True, wakes_after=3.0),
    "decode-stopped": Victim("head decode", "--prefill 1 --decode 2", stops=True, wakes_after=3.0),
}
PROMPTS = [
    f"Tom has {12 + number} apples and buys {7 * number + 1} more. He gives {number} to Ann."
    for number in range(16)
]
LONG = 24
"""Repetitions of a prompt for servers with roles, so that kills hit transfers. Prefix caching is off there
for the same reason."""
PICTURES = 2
"""Images per prompt where prompts have images. The images are noise, too large to keep all embeddings cached.
"""
TRIES = 60
"""Attempts of a client before a request counts as lost."""
IDLE_S = 60.0
"""Maximum seconds after the last request until all pools are as at the beginning."""
BEFORE_S, AFTER_S = 2.0, 30.0
"""Seconds around a kill in which gaps count."""


def small_pictures() -> list[list[str]]:
    """Return noise images, one list per prompt."""
    return [[noise(PICTURES * number + one) for one in range(PICTURES)] for number in range(len(PROMPTS))]


async def comes_back(http: httpx.AsyncClient, page: str, free: dict[str, float]) -> bool:
    """Poll the metrics at ``page`` until the pools equal ``free``. Return False after IDLE_S seconds."""
    deadline = time.monotonic() + IDLE_S
    while (now := pools((await http.get(page)).text)) != free:
        if time.monotonic() > deadline:
            print({name: (free.get(name), now.get(name)) for name in {*free, *now}})
            return False
        await asyncio.sleep(0.2)
    return True


@dataclass
class Client:
    """Hold the observations of one client."""

    arrivals: list[float] = field(default_factory=list)
    """Arrival times of tokens, over all requests of the client."""
    done: int = 0
    sent_again: int = 0
    lost: list[str] = field(default_factory=list)
    different: int = 0


class Drill:
    """Run clients against one server and kill processes under load."""

    def __init__(self, server: ServerProcess, args: argparse.Namespace) -> None:
        self._server = server
        self._args = args
        self._expected: dict[str, str] = {}
        self.clients = [Client() for _ in range(args.clients)]
        self.kills: list[float] = []
        self.prompts = PROMPTS
        self._pictures: dict[str, list[str]] = {}
        """Prompt -> data URLs; empty where prompts have no images."""
        self.whole: bool | None = None
        """True if all pools end as they began; None before the check."""

    async def run(self, victim: Victim) -> None:
        """Learns the answers, then kills ``--kills`` times under load. Raises RuntimeError."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=self._args.timeout, trust_env=False, limits=limits) as http:
            self.prompts = [
                prompt * (LONG if victim.roles and not victim.images else 1) for prompt in PROMPTS
            ]
            if victim.images:
                asked, quality = self._args.pictures, self._args.quality
                shown = photographs(asked, len(PROMPTS), quality) if asked else small_pictures()
                self._pictures = dict(zip(self.prompts, shown, strict=True))
            for prompt in self.prompts:
                self._expected[prompt] = await self._stream(http, prompt, Client())
            await asyncio.sleep(2.0)
            # The reference state: all pools idle, all processes with their roles.
            free = await self._pools(http)
            whole = set(processes(self._root).values()), len(processes(self._root))
            load = [asyncio.create_task(self._client(http, number)) for number in range(self._args.clients)]
            try:
                for _ in range(self._args.kills):
                    await asyncio.sleep(self._args.every)
                    if all(task.done() for task in load):
                        break
                    await self._kill(victim)
                    await self._wait_whole(http, whole)
                await asyncio.gather(*load)
                self.whole = await comes_back(http, f"{self._server.url}/metrics", free)
            finally:
                for task in load:
                    task.cancel()

    @property
    def _root(self) -> int:
        if self._server.pid is None:
            raise RuntimeError("the server does not run")
        return self._server.pid

    async def _kill(self, victim: Victim) -> None:
        pids = [pid for pid in processes(self._root) if title_of(pid).startswith(victim.process)]
        if not pids:
            titles = [title_of(pid) for pid in processes(self._root)]
            raise RuntimeError(f"the server has no process {victim.process!r}: {titles}")
        self.kills.append(time.monotonic())
        pid = pids[len(self.kills) % len(pids)]
        os.kill(pid, signal.SIGSTOP if victim.stops else signal.SIGKILL)
        if victim.wakes_after:
            await asyncio.sleep(victim.wakes_after)
            os.kill(pid, signal.SIGCONT)

    async def _pools(self, http: httpx.AsyncClient) -> dict[str, float]:
        return pools((await http.get(f"{self._server.url}/metrics")).text)

    async def _wait_whole(self, http: httpx.AsyncClient, whole: tuple[set[str], int]) -> None:
        """Wait until the roles and the number of processes are as before, and the server is ready.

        Raise RuntimeError after 120 s.
        """
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            await asyncio.sleep(0.3)
            found = processes(self._root)
            if (set(found.values()), len(found)) != whole:
                continue
            with contextlib.suppress(httpx.HTTPError):
                ready = (await http.get(f"{self._server.url}/ready")).status_code == 200
                if ready and (not self._pictures or await self._all_up(http)):
                    return
        raise RuntimeError(f"the server did not recover: {processes(self._root)}")

    async def _all_up(self, http: httpx.AsyncClient) -> bool:
        """Return True if all engines are up. A server is ready even without its encode engines."""
        text = (await http.get(f"{self._server.url}/metrics")).text
        return set(re.findall(r"^weft:engine_up\{.*\} (\S+)$", text, re.M)) == {"1.0"}

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        client = self.clients[number]
        for request in range(self._args.requests):
            prompt = self.prompts[(number * 5 + request) % len(self.prompts)]
            reason = ""
            for attempt in range(TRIES):
                client.sent_again += attempt > 0
                try:
                    text = await self._stream(http, prompt, client)
                except (httpx.HTTPError, RuntimeError) as error:
                    reason = f"{type(error).__name__}: {error}"
                    if not isinstance(error, httpx.TransportError):
                        break
                    await asyncio.sleep(0.1)
                else:
                    client.done += 1
                    client.different += text != self._expected[prompt]
                    reason = ""
                    break
            if reason:
                client.lost.append(reason[:300])

    async def _stream(self, http: httpx.AsyncClient, prompt: str, client: Client) -> str:
        """Return the text of an answer. Raise httpx.TransportError for a broken connection, otherwise
        RuntimeError.
        """
        pictures = self._pictures.get(prompt)
        path, asked = "completions", dict[str, Any](prompt=prompt)
        if pictures is not None:
            path, asked = "chat/completions", {"messages": messages(pictures, prompt)}
        body = {
            "model": self._server.model,
            **asked,
            "max_tokens": self._args.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text = ""
        async with http.stream("POST", f"{self._server.url}/v1/{path}", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(f"error event: {event['error']}")
                    client.arrivals.append(time.monotonic())
                    for choice in event["choices"]:
                        text += choice["text"] if pictures is None else choice["delta"].get("content") or ""
        raise httpx.RemoteProtocolError("the stream ended without its last event")

    def gaps(self) -> list[float]:
        """Return the longest pause in seconds for each kill and each client with tokens before and after the
        kill.
        """
        gaps = []
        for kill in self.kills:
            for client in self.clients:
                near = [at for at in client.arrivals if kill - BEFORE_S <= at <= kill + AFTER_S]
                if near and near[0] < kill < near[-1]:
                    gaps.append(max(later - at for at, later in itertools.pairwise(near)))
        return gaps

    def row(self, victim: str, seconds: float) -> dict[str, Any]:
        gaps = self.gaps()
        arrivals = [client.arrivals for client in self.clients]
        between = sorted(b - a for times in arrivals for a, b in itertools.pairwise(times))
        return {
            "killed": victim,
            "flags": VICTIMS[victim].described,
            "kills": len(self.kills),
            "requests": sum(client.done for client in self.clients),
            "lost": sum(len(client.lost) for client in self.clients),
            "other tokens": sum(client.different for client in self.clients),
            "sent again": sum(client.sent_again for client in self.clients),
            "pools as before": {True: "yes", False: "no", None: None}[self.whole],
            "gap median s": round(statistics.median(gaps), 2) if gaps else None,
            "gap largest s": round(max(gaps), 2) if gaps else None,
            "between tokens p50 ms": round(between[len(between) // 2] * 1e3, 1) if between else None,
            "seconds": round(seconds),
        }


def command_of(victim: Victim, model: str, file: Path) -> list[str]:
    """Return the command of the server for ``victim``. Write the topology to ``file`` if the server has
    one.
    """
    program = [sys.executable, "-c", "from weft.cli.main import main; main()"]
    front = ["--port", "{port}", "--engine-restarts", "100"]
    engine = ["--dtype float64", "--device cpu", "--threads 1"]
    model = model or ("spool-vision" if victim.images else "")
    if victim.roles:
        engine += ["--enable-prefix-caching", "--kv-cache-memory 64M"]
    if not victim.decode_flags:
        settings = " ".join([*engine, victim.flags]).replace("--enable-p", "--no-enable-p").split()
        return [*program, "serve", *([model] if model else []), *front, *settings]
    common = [f"--model {model or 'spool-text'}", *engine]
    lines = [f"{flag[2:]}: {value or 'false'}" for flag, _, value in (each.partition(" ") for each in common)]
    flag, _, value = victim.decode_flags.partition(" ")
    groups = ["groups:", "  - role: prefill", "  - role: decode", f"    {flag[2:]}: {value}"]
    file.write_text("\n".join([*lines, *groups]))
    return [*program, "up", str(file), *front]


def drill(victim: str, args: argparse.Namespace, log: Path) -> tuple[dict[str, Any], list[str]]:
    """Run one server. Return its row and the reasons of lost requests. Raise RuntimeError or WeftError."""
    environment = {"PYTHONPATH": str(Path(args.tree).resolve()), "OMP_NUM_THREADS": "1"}
    victims = VICTIMS[victim]
    flags = victims.flags.replace("--mm-cache-bytes 256K", f"--mm-cache-bytes {args.mm_cache_bytes}")
    flags += f" --max-request-bytes {args.max_request_bytes}" if args.max_request_bytes else ""
    command = command_of(victims._replace(flags=flags), args.model, log.with_suffix(".yaml"))
    with ServerProcess(command, environment=environment, log_file=log) as server:
        server.wait_ready(180)
        under = Drill(server, args)
        began = time.monotonic()
        asyncio.run(asyncio.wait_for(under.run(VICTIMS[victim]), args.deadline))
        reasons = [reason for client in under.clients for reason in client.lost]
        return under.row(victim, time.monotonic() - began), reasons


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--victims", default=",".join(VICTIMS), help=f"processes to kill: {', '.join(VICTIMS)}"
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=100, help="requests of each client")
    parser.add_argument("--pictures", default="", help="e.g. 5x1920x1080,2x3840x2160; by default noise")
    parser.add_argument("--quality", type=int, default=70, help="JPEG quality of --pictures")
    parser.add_argument(
        "--mm-cache-bytes", default="256K", help="embedding cache of each group, for requests with images"
    )
    parser.add_argument(
        "--max-request-bytes",
        default="",
        help="memory of a request body; all bodies share four times as much",
    )
    parser.add_argument("--timeout", type=float, default=180.0, help="maximum seconds of a request")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=4.0, help="seconds of load before each kill")
    parser.add_argument("--deadline", type=float, default=900.0, help="maximum seconds of a drill")
    parser.add_argument("--model", default="", help="model; default: a bundled model")
    parser.add_argument(
        "--tree", default=str(Path(__file__).parents[1]), help="the working tree of the server"
    )
    parser.add_argument("--name", help="name of the result in bench/results")
    args = parser.parse_args()
    rows, reasons = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for victim in args.victims.split(","):
            if victim not in VICTIMS:
                parser.error(f"--victims {victim}: known are {', '.join(VICTIMS)}")
            row, reasons[victim] = drill(victim, args, Path(folder) / f"{victim}.log")
            rows.append(row)
            print(row, *reasons[victim][:3], sep="\n", flush=True)
    table = record.markdown(rows)
    print(table)
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        title = "Clients of a server whose processes are killed"
        record.write(path, "bench.drill", title, table, {"rows": rows, "lost": reasons})


if __name__ == "__main__":
    main()
