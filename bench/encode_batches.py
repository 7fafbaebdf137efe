"""Compare one call of a vision tower for several images with one call per image.

python -m bench.encode_batches --threads 1 --turns 5

Two towers: the tower of spool-vision (4 layers of 128), and a tower of random weights with 6 layers of 384
and patches of 16 pixels. Images have one size and variants take turns. Each number is the minimum over the
turns, in CPU seconds: on a shared machine other clocks measure the neighbours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

import weft
from bench import machine
from weft.config.families import load_spec
from weft.config.spec import VisionSpec
from weft.layers.build import Build, pack_all
from weft.models.loader import fill_randomly
from weft.models.tower import TowerAlone, load_tower
from weft.models.vision import Tower

SIDES = (64, 128, 256)
"""Pixels of an image's side."""
TOGETHER = (1, 2, 4, 8, 16)
MOST_PATCHES = 16384
CPU = torch.device("cpu")


def towers() -> dict[str, tuple[Tower, int]]:
    """Name -> (tower, pixels of a patch's side)."""
    folder = str(Path(weft.__file__).parent / "checkpoints" / "spool-vision")
    spec = load_spec(folder)
    assert spec.vision is not None
    small = load_tower(folder, spec, torch.float32, CPU, progress=False)
    large = msgspec.structs.replace(spec, vision=_large(spec.vision))
    built = TowerAlone(large, Build(dtype=torch.float32, device=CPU))
    fill_randomly(built, 0)
    pack_all(built)
    return {"4 x 128": (small.vision, spec.vision.media.patch), "6 x 384": (built.vision, 16)}


def _large(vision: VisionSpec) -> VisionSpec:
    media = msgspec.structs.replace(vision.media, patch=16, max_pixels=1 << 22)
    sizes = {"hidden": 384, "layers": 6, "heads": 6, "intermediate": 1536, "output": 768, "side": 48}
    return msgspec.structs.replace(vision, media=media, levels=(), **sizes)


def least(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the minimum CPU seconds of each call. The calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for name, call in calls.items():
            began = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - began)
    return best


@torch.inference_mode()
def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu = machine.describe()["cpu"]
    print(f"{cpu['model']}, family {cpu['family']}")
    print(f"\ntorch {torch.__version__}, {options.threads} thread(s), float32, CPU ms an image\n")
    print("| tower | pixels | patches | " + " | ".join(f"{n} together" for n in TOGETHER) + " |")
    print("|---" * (3 + len(TOGETHER)) + "|")
    for name, (tower, patch) in towers().items():
        for side in SIDES:
            patches = (side // patch) ** 2
            image = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8)
            calls: dict[str, Callable[[], object]] = {
                str(n): partial(tower.embed_batch, [image] * n)
                for n in TOGETHER
                if n == 1 or n * patches <= MOST_PATCHES
            }
            found = least(calls, options.turns)
            cells = [f"{1000 * found[str(n)] / n:.2f}" if str(n) in found else "" for n in TOGETHER]
            print(f"| {name} | {side} x {side} | {patches} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
