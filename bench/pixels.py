"""Measure the transport of image pixels from a media worker to an engine and a second rank: by name or as
bytes.

python -m bench.pixels --json bench/results/pixels.json

All processes are real: the media worker, the API server (this process), an engine and a second rank. Each
process reports when the pixels are in its own memory, in the layout of a tower. Both ways take turns. The
output has medians.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import zmq

from bench import record
from bench.pictures import picture
from weft.config.sections.media_section import MediaSection
from weft.engine.ranks.step_pixels import StepPixels, opened
from weft.engine.server.pixel_inbox import PixelInbox
from weft.media.headers import read_header
from weft.media.messages import Target
from weft.media.pictures import Picture
from weft.media.service import MediaService
from weft.types import frames as f
from weft.types.attachments import decode_parts, encode_parts
from weft.types.media import MediaItem
from weft.types.messages import Submit
from weft.types.plan import Encode, StepPlan
from weft.types.sampling import TokenParams

LEGS = ("decoded at the front", "at the head", "at a second rank", "CPU time of the front")


def plan_of(item: MediaItem) -> StepPlan:
    op = Encode(blocks=bytes(4), count=1, grid=item.grid, pixels=item.pixels, shared=item.shared)
    return StepPlan(step=0, ops=(op,))


class Local:
    local = True


def head(address: str, to_rank: str) -> None:
    context = zmq.Context()
    front, rank = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    front.connect(address)
    rank.bind(to_rank)
    inbox = PixelInbox(shows=True)
    while True:
        frames = [front.recv()]
        while front.getsockopt(zmq.RCVMORE):
            frames.append(front.recv(copy=False).buffer)
        if frames == [b""]:
            return
        message = decode_parts(frames[0], frames[1:])
        assert isinstance(message, Submit)
        (item,) = inbox.take(message).media
        np.frombuffer(item.pixels, np.uint8).copy()
        here = time.perf_counter()
        plan = StepPixels().framed(plan_of(item), [Local()])
        rank.send(f.encode(f.StepFrame(step=0, epoch=0, plan=plan, digest=0)))
        there = msgspec.msgpack.decode(rank.recv())
        front.send(msgspec.msgpack.encode((here, there)))


def beside(address: str) -> None:
    link = zmq.Context().socket(zmq.PAIR)
    link.connect(address)
    while True:
        frame = f.decode_to_rank(link.recv())
        assert isinstance(frame, f.StepFrame)
        (op,) = opened(frame.plan).ops
        assert isinstance(op, Encode)
        np.frombuffer(op.pixels, np.uint8).copy()
        link.send(msgspec.msgpack.encode(time.perf_counter()))


async def measure(link: zmq.Socket[bytes], file: bytes, turns: int) -> dict[str, list[float]]:
    """Way -> milliseconds of each leg, from the end of the one before, and CPU time."""
    header = read_header(file)
    size = (header.height // 28 * 28, header.width // 28 * 28)
    target = Target(height=size[0], width=size[1], canvas=size, resample=3, fingerprint=b"")
    media = MediaService(MediaSection())
    one = Picture(where="", header=header, target=target, grid=(1, 2, 2), count=1, data=memoryview(file))
    found: dict[str, list[tuple[float, ...]]] = {"shown": [], "sent": []}
    share = media.memory.share
    for turn in range(2 * turns + 2):
        way = ("shown", "sent")[turn % 2]
        media.memory.share = share if way == "shown" else lambda size: None  # type: ignore[method-assign]
        with media.memory.lease() as lease:
            began, busy = time.perf_counter(), time.process_time()
            items = await media.decode([one], {}, lease)
            decoded = time.perf_counter()
            params = TokenParams(max_tokens=1)
            submit = Submit(sequence=1, request=1, seed=1, prompt_ids=bytes(4), params=params, media=items)
            link.send_multipart(encode_parts(submit, by_name=True), copy=False)
            here, there = msgspec.msgpack.decode(link.recv())
            busy = time.process_time() - busy
        if turn > 1:
            found[way].append((decoded - began, here - decoded, there - here, busy))
    await media.close()
    return {way: [1e3 * median(leg) for leg in zip(*rows, strict=True)] for way, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--size", default="3840x2160")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        head(*args.play[1:]) if args.play[0] == "head" else beside(*args.play[1:])
        return
    width, height = map(int, args.size.split("x"))
    file = base64.b64decode(picture(0, (width, height)).partition(",")[2])
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/{name}" for name in ("head", "rank")]
        link = zmq.Context().socket(zmq.PAIR)
        link.bind(addresses[0])
        play = [sys.executable, "-m", "bench.pixels", "--play"]
        others = [
            subprocess.Popen([*play, "head", *addresses]),
            subprocess.Popen([*play, "rank", addresses[1]]),
        ]
        try:
            found = asyncio.run(measure(link, file, args.turns))
        finally:
            for process in others:
                process.kill()
                process.wait()
    lines = ["| way | " + " | ".join(f"{leg}, ms" for leg in LEGS) + " |", "|---|---|---|---|---|"]
    lines += [f"| {way} | " + " | ".join(f"{one:.1f}" for one in legs) + " |" for way, legs in found.items()]
    print("\n".join(lines))
    if args.json:
        title = f"Pixels of an image of {args.size} between processes"
        record.write(args.json, "bench.pixels", title, "\n".join(lines), {"found": found})


if __name__ == "__main__":
    main()
