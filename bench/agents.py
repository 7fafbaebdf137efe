"""Measure sessions of coding agents on a real server, without and with a disk tier.

    python -m bench.agents --json bench/results/agents-mine.json
    python -m bench.agents --sessions 20 --turns 8

The traffic equals ``weft sim agents``, with every length divided by ``--shorter`` and every pause by
``--faster``: the prompt of a turn is the last prompt, the last output, and a tool's result. ``--active``
sessions run at a time. The cache in memory has room for the share ``--kv-share`` of the final tokens of the
active sessions. The model has the weights of the bundled model, with a longer maximum length. Each server
runs alone, with the same sessions. Outputs must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import record
from bench.scratch import scratch_folder
from weft.bench.process import ServerProcess
from weft.bench.stats import percentile
from weft.common.progress import progress_bar
from weft.sim.agents import Agents

READY_S = 180.0
TURN_S = 600.0
"""Maximum seconds of one turn."""
KV_TOKEN_BYTES = 1024
"""Bytes of a token in the caches of the bundled model: keys and values of 4 layers with 2 heads of 32, in
bfloat16."""
MODEL = Path(__file__).parent.parent / "weft" / "checkpoints" / "spool-text"


@dataclass(slots=True)
class Turns:
    """Results of all turns of one server. The rates leave out first turns, which have no cached history."""

    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    outputs: dict[int, str] = field(default_factory=dict)
    """Session -> digest of the token ids of all outputs."""
    seconds: float = 0.0

    def row(self, name: str) -> dict[str, Any]:
        """Return the row of the table."""
        return {
            "server": name,
            "turns after the first": len(self.ttft),
            "prompt tokens of a turn": round(self.prompt_tokens / len(self.ttft)),
            "of them cached": f"{self.cached_tokens / self.prompt_tokens:.1%}",
            "TTFT p50, ms": round(1000 * percentile(self.ttft, 50)),
            "TTFT p99, ms": round(1000 * percentile(self.ttft, 99)),
            "seconds": round(self.seconds),
        }


async def turn(
    client: httpx.AsyncClient, url: str, prompt: list[int], tokens: int, session: int
) -> tuple[float, int, list[int]]:
    """Send one request. Return (seconds to the first token, cached tokens, output token ids). Raises
    RuntimeError for an incomplete answer."""
    body = {
        "model": "agents",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    began, first, cached, made = time.monotonic(), 0.0, 0, list[int]()
    headers = {"x-session-id": str(session)}
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line[len("data: ") :])
            if "error" in part:
                raise RuntimeError(str(part["error"]))
            for choice in part["choices"]:
                made += choice.get("token_ids") or []
                first = first or time.monotonic() - began
            if part.get("usage"):
                cached = (part["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if len(made) != tokens:
        raise RuntimeError(f"{len(made)} of {tokens} tokens came")
    return first, cached, made


async def run(url: str, agents: Agents, active: int) -> Turns:
    """Run all sessions against the server."""
    made, began = Turns(), time.monotonic()
    common = [random.Random(0).randrange(10, 1000) for _ in range(agents.shared)]
    places = asyncio.Semaphore(active)
    limits = httpx.Limits(max_connections=active)

    async def one(number: int) -> None:
        rng = random.Random(number)
        prompt = common + [rng.randrange(10, 1000) for _ in range(agents.first - agents.shared)]
        digest = hashlib.blake2b(digest_size=8)
        async with places:
            for at in range(agents.turns):
                first, cached, output = await turn(client, url, prompt, agents.output, number)
                digest.update(repr(output).encode())
                if at:
                    made.ttft.append(first)
                    made.prompt_tokens += len(prompt)
                    made.cached_tokens += cached
                bar.update(1)
                prompt += output
                prompt += [rng.randrange(10, 1000) for _ in range(rng.randint(1, 2 * agents.grows))]
                if at + 1 < agents.turns:
                    long = 2.5 if rng.random() < 0.2 else 1.0
                    await asyncio.sleep(rng.random() * 2 * agents.pause * long)
        made.outputs[number] = digest.hexdigest()

    with progress_bar(total=agents.sessions * agents.turns, title="sessions", unit=" turns") as bar:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=TURN_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(agents.sessions):
                group.create_task(one(number))
    made.seconds = time.monotonic() - began
    return made


def checkpoint(folder: Path, longest: int) -> Path:
    """Copy the bundled model, with room for ``longest`` tokens."""
    shutil.copytree(MODEL, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": longest}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--active", type=int, default=24, help="sessions at the same time")
    parser.add_argument("--shorter", type=float, default=15.0, help="divides every length")
    parser.add_argument("--faster", type=float, default=60.0, help="divides every pause")
    parser.add_argument("--kv-share", type=float, default=0.3)
    parser.add_argument("--store", default="sessions", help="--kv-store of the server with a disk tier")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    real = Agents()
    agents = Agents(
        sessions=given.sessions,
        turns=given.turns,
        first=round(real.first / given.shorter),
        grows=round(real.grows / given.shorter),
        output=round(real.output / given.shorter),
        shared=round(real.shared / given.shorter),
        pause=real.pause / given.faster,
        others=0,
    )
    at_ends = agents.first + agents.turns * (agents.grows + agents.output)
    cache = int(max(given.kv_share * given.active * at_ends, 1.1 * agents.longest) * KV_TOKEN_BYTES)
    results: dict[str, Turns] = {}
    with scratch_folder() as folder:
        model = checkpoint(folder / "model", agents.longest)
        command = [sys.executable, "-m", "weft", "serve", str(model), "--served-model-name", "agents"]
        command += ["--port", "{port}", "--kv-cache-memory", str(cache)]
        tier = ["--kv-disk", "8G", "--kv-disk-dir", str(folder / "kv"), "--kv-store", given.store]
        for name, more in (("memory", []), ("memory and disk", tier)):
            with ServerProcess([*command, *more], log_file=folder / "log") as server:
                server.wait_ready(READY_S)
                results[name] = asyncio.run(run(server.url, agents, given.active))
            print(results[name].row(name), flush=True)
    table = record.markdown([made.row(name) for name, made in results.items()])
    print(table)
    one, other = results.values()
    same = sum(one.outputs[number] == other.outputs[number] for number in one.outputs)
    print(f"outputs equal in {same} of {len(one.outputs)} sessions")
    if given.json is not None:
        title = f"{agents.sessions} sessions of agents, {given.active} at a time"
        table += (
            f"\n\nThe cache in memory has {cache / 1e6:.0f} MB; the active sessions at their ends have "
            f"{cache / given.kv_share / 1e6:.0f} MB. "
            f"Outputs are equal in {same} of {len(one.outputs)} sessions."
        )
        numbers = {name: asdict(made) for name, made in results.items()}
        record.write(given.json, "bench.agents", title, table, numbers)


if __name__ == "__main__":
    main()
