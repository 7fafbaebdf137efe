"""Send bursts of requests with large images: measure the times to first token, and count failures.

python -m bench.image_bursts --name image-bursts-mine

One server has groups of each role, and room for the embeddings of one prompt's images at each end. Bursts of
each size of ``--widths`` follow in sequence. The first burst starts when the server becomes ready, so nothing
is warm. After each burst the script sends a single request. All pools must then be as at the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import record
from bench.compare import default_folder, model_folder
from bench.disaggregation import quantile
from bench.drill import comes_back, pools
from bench.pictures import messages, photographs
from bench.rounds import say
from weft.bench.process import ServerProcess


@dataclass
class Answered:
    """Hold the result of one request. Times are seconds after sending."""

    first: float = 0.0
    """Time of the first token; 0 for a failed request."""
    whole: float = 0.0
    failure: str = ""


def longer(model: str, positions: int, folder: Path) -> str:
    """Return ``model`` with ``positions`` positions: a folder with links to the same files and a changed
    configuration.

    The quality of the output does not matter here.
    """
    source = model_folder(model, default_folder())
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = positions
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def ask(http: httpx.AsyncClient, body: bytes) -> Answered:
    """Send one streaming request and return the result. The request is never repeated."""
    made, begun = Answered(), time.monotonic()
    headers = {"content-type": "application/json"}
    try:
        async with http.stream("POST", "/v1/chat/completions", content=body, headers=headers) as answer:
            if answer.status_code != 200:
                made.failure = f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
                return made
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    made.whole = time.monotonic() - begun
                    return made
                # The first token is the first event with content; the role event comes earlier.
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        made.failure = f"error event: {event['error']}"
                        return made
                    if not made.first and event["choices"] and event["choices"][0]["delta"].get("content"):
                        made.first = time.monotonic() - begun
        made.failure = "the stream ended without its last event"
    except httpx.HTTPError as error:
        made.failure = f"{type(error).__name__}: {error}"
    return made


async def run(server: ServerProcess, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """(a row for each burst, why requests failed)."""
    bodies = [
        json.dumps(
            {
                "model": server.model,
                "messages": messages(urls, f"What is in these pictures? {number}"),
                "max_tokens": args.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        for number, urls in enumerate(photographs(args.pictures, max(args.widths) + 1, args.quality))
    ]
    rows, failures = [], []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=args.timeout, trust_env=False, limits=limits
    ) as http:
        free = pools((await http.get("/metrics")).text)
        for width in args.widths:
            begun = time.monotonic()
            made = await asyncio.gather(*(ask(http, body) for body in bodies[:width]))
            seconds = time.monotonic() - begun
            after = await ask(http, bodies[-1])
            failures += [one.failure for one in (*made, after) if one.failure]
            first = sorted(one.first for one in made if not one.failure)
            rows.append(
                {
                    "at once": width,
                    "ok": len(first),
                    "failed": width - len(first),
                    "TTFT p50 s": round(quantile(first, 0.5), 2),
                    "TTFT p99 s": round(quantile(first, 0.99), 2),
                    "all answered s": round(seconds, 1),
                    "one after it, TTFT s": "failed" if after.failure else round(after.first, 2),
                    "pools as before": "yes" if await comes_back(http, "/metrics", free) else "no",
                }
            )
            say(f"{rows[-1]}")
    return rows, failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="spool-vision", help="a bundled model that sees images")
    parser.add_argument("--positions", type=int, default=4096, help="that a prompt may have")
    parser.add_argument("--widths", default="4,8,16,32", help="requests of each burst")
    parser.add_argument("--pictures", default="8x1920x1080,2x3840x2160", help="of each request")
    parser.add_argument("--quality", type=int, default=70, help="of their JPEG files")
    parser.add_argument("--flags", default="--encode 2 --prefill 1 --decode 1", help="of the server")
    parser.add_argument("--mm-cache-bytes", default="1536K", help="of each group")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt in one step at most")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of a request")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds of all of it")
    parser.add_argument("--name", help="of the result in bench/results")
    args = parser.parse_args()
    args.widths = [int(one) for one in args.widths.split(",")]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as checkpoint:
        model = longer(args.model, args.positions, Path(checkpoint))
        command = [sys.executable, "-c", "from weft.cli.main import main; main()", "serve", model]
        command += ["--port", "{port}", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
        command += ["--max-model-len", str(args.positions), "--kv-cache-memory", "256M", *args.flags.split()]
        command += [
            "--mm-cache-bytes",
            args.mm_cache_bytes,
            "--long-prefill-token-threshold",
            str(args.chunk),
        ]
        command += ["--no-enable-prefix-caching"]  # prompts are always computed, whatever the earlier flags
        environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        log = Path(folder) / "server.log"
        with ServerProcess(command, environment=environment, log_file=log) as server:
            server.wait_ready(180)
            rows, failures = asyncio.run(asyncio.wait_for(run(server, args), args.deadline))
    table = record.markdown(rows)
    print(table, *failures[:5], sep="\n")
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        title = f"Bursts of requests with {args.pictures} images each: {args.flags}"
        record.write(path, "bench.image_bursts", title, table, {"rows": rows, "failures": failures})


if __name__ == "__main__":
    main()
