"""Split the time of a request with images into stages, for one group and for several groups.

python -m bench.request_split --name request-split-mine
python -m bench.request_split --variants unified,1e1p1d --images 4 --every 1

Real servers over HTTP run in turn; their processes write spans (``--trace-requests``). One request with new
images arrives every ``--every`` seconds. A unified group reports the time of its tower in metrics; the time
is subtracted from prefill.

    media       body, fetching and decoding, token counts (API server and media workers)
    queue       at the encode engine until the image is in a step
    encode      the step of the image
    transfer    of the embeddings until all are received; of the caches, the time after the first token
    prefill     waiting for a slot, and the prompt
    decode      slot and tokens of the answer
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench import record
from bench.compare import default_folder, model_folder
from bench.disaggregation import VARIANTS, pin
from bench.pictures import messages, picture
from bench.rounds import say
from weft.bench.plots import plot_stages
from weft.bench.process import ServerProcess
from weft.common.cores import usable_cores
from weft.tracing.merge import ReadSpan, read_folder
from weft.tracing.slowest import rows

STAGES = ("media", "queue", "encode", "transfer", "prefill", "decode")


async def ask(url: str, model: str, args: argparse.Namespace) -> float:
    """Send all requests. Return the tower seconds per request if prefill engines have a tower, otherwise
    0.
    """
    side = (args.image_side, args.image_side)
    pictures = [
        [picture(number * args.images + one, side) for one in range(args.images)]
        for number in range(args.requests)
    ]
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:

        async def one(number: int) -> None:
            body = {
                "model": model,
                "messages": messages(pictures[number], f"picture {number}"),
                "max_tokens": args.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
            (await http.post("/v1/chat/completions", json=body)).raise_for_status()

        began, tasks = time.monotonic(), []
        for number in range(args.requests):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(max(began + (number + 1) * args.every - time.monotonic(), 0))
        await asyncio.gather(*tasks)
        await asyncio.sleep(1.0)  # wait until engines have reported counters and spans are on disk
        page = (await http.get("/metrics")).text
    return metric(page, "weft:image_encode_seconds_total") / args.requests


def metric(page: str, name: str) -> float:
    """The sum over all labels."""
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def stages(spans: Sequence[ReadSpan], tower: float, tokens: int) -> dict[str, float]:
    """Return median seconds of each stage over requests with ``tokens`` output tokens.

    ``tower`` is the encode time per request for groups whose prefill includes the tower.
    """
    named: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    parts = {one.span: one for one in spans if one.name == "placement"}
    for one in spans:
        part = parts.get(one.parent)
        if part is not None and part.attributes["weft.part"] == "encode" and one.name in ("queue", "encode"):
            named[one.trace][one.name] = max(named[one.trace][one.name], one.seconds)
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows(spans):
        if row.tokens != tokens:  # a readiness probe, not a measured request
            continue
        of = row.stages
        apart = named.get(row.trace)
        encode = tower if apart is None else min(apart["encode"], of.get("images", 0.0))
        queue = 0.0 if apart is None else min(apart["queue"], of.get("images", 0.0) - encode)
        images = 0.0 if apart is None else of.get("images", 0.0)
        found["media"].append(of.get("read", 0.0))
        found["queue"].append(queue)
        found["encode"].append(encode)
        found["transfer"].append(max(images - encode - queue, 0.0) + of.get("transfer", 0.0))
        prefill = of.get("queue", 0.0) + of.get("prefill", 0.0)
        found["prefill"].append(max(prefill - (tower if apart is None else 0.0), 0.0))
        found["decode"].append(of.get("slot", 0.0) + of.get("decode", 0.0))
        found["total"].append(row.total)
    return {name: statistics.median(values) for name, values in found.items()}


def once(flags: str, model: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the stage times of one server under load."""
    program = "from weft.cli.main import main; main()"
    spans = folder / "spans"
    command = [sys.executable, "-c", program, "serve", model, "--port", "{port}", "--device", "cpu"]
    command += ["--max-model-len", "8192", "--dtype", args.dtype, *flags.split()]
    command += ["--trace-requests", str(spans)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with ServerProcess(command, environment=environment, log_file=folder / "server.log") as server:
        server.wait_ready(args.deadline)
        assert server.pid is not None
        pin(server.pid, sorted(os.sched_getaffinity(0)))
        tower = asyncio.run(asyncio.wait_for(ask(server.url, server.model, args), args.deadline))
    return stages(read_folder(spans)[0], 0.0 if "--encode" in flags else tower, args.output_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen3vl-s", help="bundled, a name of weft bench, or a folder")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="for checkpoints")
    parser.add_argument("--variants", default="unified,1e1u,1e1p1d")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--images", type=int, default=1, help="of each request")
    parser.add_argument("--image-side", type=int, default=512, help="pixels")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--every", type=float, default=2.5, help="seconds between two requests")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds of one run")
    parser.add_argument("--name", help="of the result in bench/results")
    args = parser.parse_args()
    model = str(model_folder(args.model, args.folder))
    found: dict[str, dict[str, float]] = {}
    for name in args.variants.split(","):
        with tempfile.TemporaryDirectory() as folder:
            flags = VARIANTS[name].format(cores=usable_cores(), target=0)
            found[name] = once(flags, model, args, Path(folder))
        say(f"{name}: {found[name]}")
    made = [
        {"groups": name, **{f"{stage} ms": round(1e3 * one[stage], 1) for stage in (*STAGES, "total")}}
        for name, one in found.items()
    ]
    table = record.markdown(made)
    print(table)
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        size = f"{args.images} images of {args.image_side} x {args.image_side}"
        title = f"Time of a request with {size}: {args.model}"
        record.write(path, "bench.request_split", title, table, {"rows": made})
        plot_stages(found, STAGES, title, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
