"""Time the matrix products of one forward pass by torch and by the CPU extension, in milliseconds.

python -m bench.gemm --rows 1,8,32,64,512,2048 --threads 2 --json gemm.json

A pass has every matrix of qwen3-dense-s (12 layers and the output head) in model order, so that CPU caches
have the same data as in a model. Variants alternate. The output is the sum over matrices of the shortest time
of each matrix, because other programs of a shared machine disturb nearly every whole pass. GB/s counts each
weight once.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from bench import machine
from weft.ops import coded, cpu, ggml, torch_ops
from weft.ops.coded import Codes
from weft.ops.cpu import linear as ops

Tensor = torch.Tensor
Call = Callable[[], object]

#: (outputs, inputs, True for the gated matrix) of one layer of qwen3-dense-s, and its output head.
LAYER = ((1280, 768, False), (768, 768, False), (4608, 768, True), (768, 2304, False))
LAYERS = 12
HEAD = (16384, 768, False)
SHAPES = (*LAYER * LAYERS, HEAD)
PARAMETERS = sum(outputs * inputs for outputs, inputs, _ in SHAPES)

#: Bytes per element of a matrix, scales included.
BYTES = {
    "torch bf16": 2,
    "bf16": 2,
    "int8": 1,
    "w8a8": 1,
    "w4a8": 0.5 + 5 / 64,
    "int4": 0.5 + 5 / 64,
    "fp8": 1 + 4 / 128,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
    "q4_k": 148 / 256,
    "q6_k": 210 / 256,
    "torch f32": 4,
    "f32": 4,
}
PACKS = {
    "int8": (ops.pack_int8, ops.pack_gated_int8),
    "w8a8": (ops.pack_w8a8, ops.pack_gated_w8a8),
    "w4a8": (ops.pack_w4a8, ops.pack_gated_w4a8),
}
CODED = ("int4", "fp8", "mxfp4", "nvfp4", "q8_0", "q4_0", "q4_k", "q6_k")


def make(name: str) -> Callable[[int], list[Call]]:
    """Return a function for a variant of ``BYTES``: from a number of rows to the products of one pass.

    Every variant has weights of its own.
    """
    dtype = torch.float32 if name.endswith("f32") else torch.bfloat16
    layers: list[Callable[[Tensor], Tensor]] = []
    for outputs, inputs, gated in SHAPES:
        weight = (torch.randn(outputs, inputs) * 0.02).to(dtype)
        layers.append(_torch(weight, gated) if name.startswith("torch") else _packed(weight, gated, name))

    def of_rows(rows: int) -> list[Call]:
        xs = {inputs: torch.randn(rows, inputs).to(dtype) for _, inputs, _ in SHAPES}
        return [
            functools.partial(layer, xs[inputs]) for layer, (_, inputs, _) in zip(layers, SHAPES, strict=True)
        ]

    return of_rows


def _torch(weight: Tensor, gated: bool) -> Callable[[Tensor], Tensor]:
    if gated:
        return lambda x: torch_ops.gated_linear(x, weight, None, "silu")
    return lambda x: F.linear(x, weight)


def codes_of(weight: Tensor, name: str) -> Codes:
    """Return ``weight`` rounded as by --quantization. For 4-bit floats: random codes, which take equal
    time."""
    if name in ("int4", "fp8"):
        return coded.to_int4(weight) if name == "int4" else coded.to_fp8(weight)
    outputs, inputs = weight.shape
    if name.startswith("q"):
        return _blocks(name.upper(), outputs, inputs)
    group, scale = (32, torch.float8_e8m0fnu) if name == "mxfp4" else (16, torch.float8_e4m3fn)
    scales = torch.full((outputs, inputs // group), 120 if group == 32 else 32, dtype=torch.uint8).view(scale)
    values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    return Codes(numbers="e2m1", values=values, inputs=inputs, group=group, scales=scales)


def _blocks(kind: str, outputs: int, inputs: int) -> Codes:
    """Return GGML blocks [outputs, inputs] with random codes. The float16 scales at the main offsets are
    2^-10.
    """
    size = ggml.BLOCKS[kind]
    raw = torch.randint(0, 256, (outputs, inputs // size.numbers, size.bytes), dtype=torch.uint8)
    for at in (0, 2) if kind == "Q4_K" else (208,) if kind == "Q6_K" else (0,):
        raw[..., at : at + 2] = torch.tensor([0, 0x14], dtype=torch.uint8)
    return coded.of_blocks(kind, raw.flatten(1))


def _packed(weight: Tensor, gated: bool, name: str) -> Callable[[Tensor], Tensor]:
    if name in CODED:
        codes = codes_of(weight, name)
        if gated:
            packed = ops.pack_gated_codes(codes)
            return lambda x: ops.gated_linear(x, packed, None, "silu")
        packed = ops.pack_codes(codes)
        return lambda x: ops.linear(x, packed)
    pack, pack_gated = PACKS.get(name, (ops.pack, ops.pack_gated))
    if gated:
        packed = pack_gated(weight)
        return lambda x: ops.gated_linear(x, packed, None, "silu")
    packed = pack(weight)
    return lambda x: ops.linear(x, packed)


def least(passes: dict[str, list[Call]], turns: int) -> dict[str, float]:
    """Return the seconds of each pass as the sum of the minimum of each call. The passes take turns."""
    best = {name: [float("inf")] * len(calls) for name, calls in passes.items()}
    for _ in range(turns):
        for name, calls in passes.items():
            for number, call in enumerate(calls):
                began = time.perf_counter()
                call()
                best[name][number] = min(best[name][number], time.perf_counter() - began)
    return {name: sum(seconds) for name, seconds in best.items()}


def limits(turns: int) -> dict[str, float]:
    """Return the limits of this machine: GB/s of reading and copying memory, GFLOP/s of torch's square
    products.
    """
    big = torch.ones(64 << 20)  # 256 MiB, in calls of 8
    other = torch.empty_like(big)
    parts = list(zip(big.split(2 << 20), other.split(2 << 20), strict=True))
    square = torch.randn(1024, 1024)
    narrow = square.bfloat16()
    passes: dict[str, list[Call]] = {
        "read GB/s": [functools.partial(torch.sum, part) for part, _ in parts],
        "copy GB/s": [functools.partial(copy.copy_, part) for part, copy in parts],
        "bf16 GFLOP/s": [lambda: F.linear(narrow, narrow)],
        "f32 GFLOP/s": [lambda: F.linear(square, square)],
    }
    work = {"read GB/s": big.nbytes, "copy GB/s": 2 * big.nbytes}
    best = least(passes, turns)
    return {name: work.get(name, 2 * 1024**3) / seconds / 1e9 for name, seconds in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,32,64,512,2048", help="rows of x, separated by commas")
    parser.add_argument("--variants", default=",".join(BYTES), help="names of variants, separated by commas")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's default")
    parser.add_argument("--turns", type=int, default=40, help="repetitions of each variant with few rows")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    names = args.variants.split(",")
    if unknown := set(names) - set(BYTES):
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(BYTES)}")
    if args.threads:
        torch.set_num_threads(args.threads)
    if not cpu.load():
        parser.error("the C++ operations are not built: weft build-ops")
    bounds = limits(args.turns)
    print("   ".join(f"{name} {value:.0f}" for name, value in bounds.items()))
    made = {name: make(name) for name in names}
    results = []
    print(f"{'rows':>5}  {'variant':11} {'ms a pass':>9} {'GB/s':>7} {'GFLOP/s':>8}")
    for rows in (int(number) for number in args.rows.split(",")):
        turns = max(3, args.turns // max(1, rows // 16))
        best = least({name: of_rows(rows) for name, of_rows in made.items()}, turns)
        for name, seconds in best.items():
            rates = (BYTES[name] * PARAMETERS / seconds / 1e9, 2 * rows * PARAMETERS / seconds / 1e9)
            print(f"{rows:5}  {name:11} {seconds * 1e3:9.2f} {rates[0]:7.1f} {rates[1]:8.0f}", flush=True)
            results.append({"rows": rows, "variant": name, "seconds": seconds})
    if args.json:
        record = {
            "machine": machine.describe(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "limits": bounds,
            "parameters": PARAMETERS,
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
