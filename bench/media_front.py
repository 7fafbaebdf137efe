"""Measure the harm of images to other streams: gaps between chunks with and without decoding of large images.

python -m bench.media_front --out bench/results/media_front.json

The API server is real and has media workers. The engine is a script that repeats prompts (``tests/front``),
so no model uses CPU cores. Rounds with and without images take turns on the same streams. Every image is a
JPEG with different content. Separate processes read the streams and send the images.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench import record
from bench.pictures import messages, picture
from tests.support.servers import Servers

ROOT = Path(__file__).parents[1]
MODEL = "fake"


async def send(url: str, bodies: list[bytes], at_once: int) -> float:
    """Seconds until all of ``bodies`` are answered."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as link:

        async def one(body: bytes) -> None:
            async with gate:
                headers = {"content-type": "application/json"}
                answer = await link.post("/v1/chat/completions", content=body, headers=headers)
                answer.raise_for_status()

        begun = time.perf_counter()
        await asyncio.gather(*map(one, bodies))
        return time.perf_counter() - begun


def sender(url: str, images: int, at_once: int) -> None:
    """Send all images whenever a line arrives on stdin, and print the seconds. Runs as a process of its
    own.
    """
    bodies = []
    for number in range(images):
        body = {"model": MODEL, "max_tokens": 1, "messages": messages([picture(number)])}
        bodies.append(json.dumps(body).encode())
    print(sum(map(len, bodies)) // images, flush=True)
    for _ in sys.stdin:
        print(asyncio.run(send(url, bodies, at_once)), flush=True)


class Streams:
    """Read streams continuously. ``gaps`` holds the seconds between two chunks of a stream."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.gaps: list[float] = []

    async def read(self) -> None:
        body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 3000, "messages": []}
        body["messages"] = [{"role": "user", "content": "a stream"}]
        async with httpx.AsyncClient(base_url=self._url, timeout=600, trust_env=False) as link:
            while True:
                async with link.stream("POST", "/v1/chat/completions", json=body) as answer:
                    last = None
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if last is not None:
                                self.gaps.append(now - last)
                            last = now


async def measure(url: str, args: argparse.Namespace) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "bench.media_front", "--send-to", url]
    command += ["--images", str(args.images), "--at-once", str(args.at_once)]
    pipe = asyncio.subprocess.PIPE
    sending = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert sending.stdin is not None
    assert sending.stdout is not None
    size = int(await sending.stdout.readline())
    streams = Streams(url)
    reading = [asyncio.create_task(streams.read()) for _ in range(args.streams)]
    await asyncio.sleep(2.0)
    rows = []
    for number in range(2 * args.rounds + 1):
        streams.gaps = []
        seconds = 0.0
        if number % 2:
            sending.stdin.write(b"\n")
            seconds = float(await sending.stdout.readline())
        else:
            await asyncio.sleep(args.seconds)
        gaps = sorted(streams.gaps)
        at = {
            name: gaps[int(share * (len(gaps) - 1))]
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))
        }
        rows.append(
            {
                "images": args.images * (number % 2),
                "seconds": round(seconds, 2),
                "chunks": len(gaps),
                "bytes": size,
            }
            | {f"{name}_ms": round(1e3 * value, 2) for name, value in at.items()}
        )
        print(rows[-1], flush=True)
    for task in reading:
        task.cancel()
    sending.kill()
    await sending.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=8, help="images that are sent at once")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round without images")
    parser.add_argument("--tick", type=float, default=0.02, help="seconds of a token")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--send-to", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send_to:
        sender(args.send_to, args.images, args.at_once)
        return
    os.environ |= {"FAKE_LENGTH": "8192", "FAKE_TICK": str(args.tick), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        fields = {"vision": {"max_pixels": 1 << 20}, "max_request_bytes": 32 << 20}
        servers = Servers()
        with servers.scope():
            program = str(ROOT / "tests/front/fake_server.py")
            server = servers.start([sys.executable, program, folder, json.dumps(fields)], 180)
            rows = asyncio.run(measure(server.url, args))
    lines = ["| images | seconds | chunks | p50 ms | p99 ms | max ms |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row[name] for name in ("images", "seconds", "chunks", "p50_ms", "p99_ms", "max_ms")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    print("\n".join(lines))
    if args.out:
        title = "Streams beside large images"
        record.write(args.out, "bench.media_front", title, "\n".join(lines), {"rows": rows})


if __name__ == "__main__":
    main()
