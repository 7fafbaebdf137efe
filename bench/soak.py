"""Run two prefill and two decode groups while clients disconnect and groups die or freeze.

python -m bench.soak --requests 2000
python -m bench.soak --requests 400 --images     # two encode groups, one prefill group, one decode group

Every client that stays must get one answer, equal to the answer of the undisturbed server: each choice ends
once, and the stream ends. Clients disconnect at random times, while their sequence is queued, prefilled,
transferred or decoded. Engines get SIGKILL, or SIGSTOP and later SIGCONT. At the end every pool of every
group must be as at the beginning. The exit status is 0 only if all conditions hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from bench.observed import pools, processes, title_of
from bench.pictures import messages, noise
from weft.bench.process import ServerProcess

SENTENCE = "Tom has {0} apples and buys {1} more. He gives {0} to Ann, who has {1} of them. "
GROUPS = "--prefill 2 --decode 2"
GROUPS_OF_IMAGES = "spool-vision --prefill 1 --decode 1 --encode 2 --mm-cache-bytes 256K --role-timeout 120"
"""Flags of the server with images. The embedding cache is minimal, so shared images are mostly encoded or
sent again."""
HEADS = 4
FLAGS = (
    "--dtype float64 --device cpu --threads 1 --engine-restarts 1000 --port {port} "
    "--max-num-seqs 4 --max-num-batched-tokens 128 --kv-cache-memory 16M --block-size 16"
)
WHOLE_S = 180.0
"""Maximum seconds after a kill until all groups are up again."""
IDLE_S = 90.0
"""Maximum seconds after the last request until all pools are free."""
ANSWER_S = 240.0
"""Maximum seconds for one request."""


def bodies(images: bool = False) -> list[dict[str, Any]]:
    """Return requests of all kinds: short, long, greedy, seeded, with choices, with logprobs.

    With ``images`` the requests have 0 to 4 images instead.
    """
    made: list[dict[str, Any]] = []
    if images:
        for number in range(20):
            pictures = [noise(5 * number + one) for one in range(number % 5)]
            asked = messages(pictures, SENTENCE.format(number + 2, 3 * number + 1))
            more = (
                {"temperature": 0.9, "seed": number, "n": 1 + number % 2}
                if number % 3
                else {"temperature": 0}
            )
            made.append({"messages": asked, "max_tokens": (1, 12, 40)[number % 3], **more})
        return made
    for number, (repeat, tokens) in enumerate([(1, 40), (8, 160), (24, 80), (40, 30), (30, 120), (2, 1)]):
        prompt = SENTENCE.format(number + 2, 3 * number + 1) * repeat
        made.append({"prompt": prompt, "max_tokens": tokens, "temperature": 0})
        more = {"n": 2, "logprobs": 1} if number % 2 else {}
        made.append({"prompt": prompt, "max_tokens": tokens, "temperature": 0.9, "seed": number, **more})
    return made


class Answer:
    """Collect the answer to one request. Raise ValueError for an invalid event."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.ends: dict[int, str] = {}
        self.over = False

    def take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if self.over:
            raise ValueError("an event after the end of its stream")
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.over = True
            return
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"error event: {event['error']}")
        self.choices(event["choices"])

    def choices(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            index = choice["index"]
            if index in self.ends:
                raise ValueError(f"choice {index} goes on after its end")
            text = choice.get("text")
            if text is None:
                text = choice["delta" if "delta" in choice else "message"].get("content")
            self.texts[index] = self.texts.get(index, "") + (text or "")
            if choice["finish_reason"] is not None:
                self.ends[index] = choice["finish_reason"]

    @property
    def said(self) -> list[tuple[int, str, str | None]]:
        return [(index, text, self.ends.get(index)) for index, text in sorted(self.texts.items())]


class Soak:
    """Run one server and its clients, and inject faults."""

    def __init__(
        self,
        server: ServerProcess,
        seed: int,
        requests: int,
        clients: int,
        every: float,
        images: bool = False,
    ) -> None:
        """``every``: approximate seconds between two kills. ``images``: True for requests with images."""
        self._server, self._requests, self._clients, self._every = server, requests, clients, every
        self._seed, self._rng = seed, random.Random(seed)
        self._killed = asyncio.Event()
        self._bodies = bodies(images)
        self._due: list[Any] = []
        self._left = iter(range(requests))
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        """Reasons for each wrong answer, and for wrong pools at the end."""

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        url = self._server.url
        async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False, limits=limits) as http:
            self._due = [(await self._ask(http, body, True)).said for body in self._bodies]
            await asyncio.sleep(1.5)  # heartbeats report the free blocks
            free = pools((await http.get("/metrics")).text)
            load = [asyncio.create_task(self._client(http)) for _ in range(self._clients)]
            kills = asyncio.create_task(self._faults(http))
            try:
                await asyncio.gather(*load)
            finally:
                kills.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await kills
                for task in load:
                    task.cancel()
            await self._until_whole(http)
            await self._until_free(http, free)

    # ---- clients

    async def _client(self, http: httpx.AsyncClient) -> None:
        for number in self._left:
            if number >= self._requests // 2:  # only answers after a kill matter
                await asyncio.wait_for(self._killed.wait(), WHOLE_S)
            rng = random.Random(f"{self._seed} {number}")
            which = rng.randrange(len(self._bodies))
            stream = rng.random() < 0.7
            leaves = rng.random() < 0.4
            patience = rng.choice((0.01, 0.05, 0.2, 0.5, 1.0, 2.0)) if leaves else None
            try:
                answer = await asyncio.wait_for(self._ask(http, self._bodies[which], stream), patience)
            except TimeoutError:
                self.counts["left"] += 1
                continue
            except (httpx.HTTPError, ValueError) as error:
                self.wrong.append(f"request {number}: {type(error).__name__}: {error}"[:300])
                continue
            self._check(number, which, answer, stream)

    def _check(self, number: int, which: int, answer: Answer, stream: bool) -> None:
        self.counts["answered"] += 1
        if answer.said != self._due[which]:
            self.wrong.append(f"request {number}: {answer.said} in place of {self._due[which]}")
        elif stream and not answer.over:
            self.wrong.append(f"request {number}: the stream ended without its last event")

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> Answer:
        """Send one request and return its answer. Raise httpx.HTTPError, or ValueError for a wrong answer."""
        answer = Answer()
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = {"model": self._server.model, "ignore_eos": True, "stream": stream, **body}
        if not stream:
            got = await http.post(path, json=body)
            if got.status_code != 200:
                raise ValueError(f"status {got.status_code}: {got.text[:200]}")
            answer.choices(got.json()["choices"])
            return answer
        async with http.stream("POST", path, json=body) as got:
            if got.status_code != 200:
                raise ValueError(f"status {got.status_code}: {(await got.aread())[:200]!r}")
            async for line in got.aiter_lines():
                answer.take(line)
        return answer

    # ---- faults

    async def _faults(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(self._every * self._rng.uniform(0.5, 1.5))
            heads = [pid for pid in processes(self._root) if title_of(pid).startswith("head ")]
            if not heads:  # processes that start have no titles yet
                continue
            pid = self._rng.choice(heads)
            role = title_of(pid).split()[1].rstrip("0123456789")
            if self._rng.random() < 0.3:
                self.counts[f"stopped {role}"] += 1
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self._rng.uniform(0.2, 2.0))
                finally:
                    os.kill(pid, signal.SIGCONT)
            else:
                self.counts[f"killed {role}"] += 1
                os.kill(pid, signal.SIGKILL)
                self._killed.set()
                await self._until_whole(http)

    @property
    def _root(self) -> int:
        if self._server.pid is None:
            raise RuntimeError("the server does not run")
        return self._server.pid

    async def _until_whole(self, http: httpx.AsyncClient) -> None:
        """Wait until all groups are up. Raise RuntimeError after the limit."""
        until = time.monotonic() + WHOLE_S
        while time.monotonic() < until:
            text = (await http.get("/metrics")).text
            up = re.findall(r"^weft:engine_up\{.*\} (\S+)$", text, re.M)
            if sum(map(float, up)) == HEADS and (await http.get("/ready")).status_code == 200:
                return
            await asyncio.sleep(0.3)
        raise RuntimeError(f"the server did not recover: {processes(self._root)}")

    async def _until_free(self, http: httpx.AsyncClient, free: dict[str, float]) -> None:
        until = time.monotonic() + IDLE_S
        while (now := pools((await http.get("/metrics")).text)) != free:
            if time.monotonic() > until:
                differ = {key: (free.get(key), now.get(key)) for key in {*free, *now}}
                self.wrong += [f"{key}: {a} before, {b} after" for key, (a, b) in differ.items() if a != b]
                return
            await asyncio.sleep(0.2)


def soak(
    requests: int,
    log: Path,
    *,
    seed: int = 0,
    clients: int = 12,
    every: float = 4.0,
    deadline: float = 7200.0,
    images: bool = False,
) -> Soak:
    """Run one soak and return its result. Raise RuntimeError or WeftError if the server fails as a whole."""
    program = "from weft.cli.main import main; main()"
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        program,
        "serve",
        *(GROUPS_OF_IMAGES if images else GROUPS).split(),
        *FLAGS.split(),
    ]
    with ServerProcess(command, environment=environment, log_file=log) as server:
        server.wait_ready(240)
        run = Soak(server, seed, requests, clients, every, images)
        asyncio.run(asyncio.wait_for(run.run(), deadline))
        return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--every", type=float, default=4.0, help="approximate seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--images", action="store_true", help="requests with images, and groups that encode images"
    )
    parser.add_argument("--log", help="file for the server's log; default: none")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(args.log or f"{folder}/log")
        run = soak(
            args.requests, log, seed=args.seed, clients=args.clients, every=args.every, images=args.images
        )
    print(*(f"{what}: {count}" for what, count in sorted(run.counts.items())), sep="\n")
    print(f"seconds: {time.monotonic() - began:.0f}\nwrong: {len(run.wrong)}", *run.wrong[:20], sep="\n")
    sys.exit(bool(run.wrong))


if __name__ == "__main__":
    main()
