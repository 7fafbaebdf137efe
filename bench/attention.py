"""Compare the CPU extension's paged attention with scaled_dot_product_attention.

python -m bench.attention [--json FILE] [--repeat N]

Prefill: 8 prompts of 2,048 tokens, causal. Decode: 32 rows at 640 tokens, and 1 row at 16,384, over several
layers' caches, so that keys and values come from memory. SDPA gets contiguous keys and values, already
repeated for every query head. Times are minima of interleaved repetitions; the machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from weft.ops import cpu

Tensor = torch.Tensor

HEADS, KV_HEADS, DIM, BLOCK = 12, 4, 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``rows`` sequences with ``context`` computed and ``count`` new tokens, in ``layers`` caches."""

    name: str
    rows: int
    context: int
    count: int
    layers: int

    @property
    def flops(self) -> int:
        """Floating-point operations of one layer."""
        keys = sum(self.context + 1 + i for i in range(self.count))
        return 4 * DIM * HEADS * self.rows * keys

    @property
    def bytes(self) -> int:
        """Bytes of one layer's keys and values, each read once."""
        return self.rows * (self.context + self.count) * KV_HEADS * DIM * 2 * 2


CASES = (
    Case(name="prefill 8 x 2048", rows=8, context=0, count=2048, layers=1),
    Case(name="decode 32 x 640", rows=32, context=639, count=1, layers=6),
    Case(name="decode 1 x 16384", rows=1, context=16383, count=1, layers=6),
)


def paged(case: Case) -> Callable[[], None]:
    """Return a call that runs the extension on all layers of a case, with shuffled blocks."""
    width = -(-(case.context + case.count) // BLOCK)
    table = (torch.randperm(case.rows * width) + 1).view(case.rows, width)
    caches = [
        torch.randn(case.rows * width + 1, 2, KV_HEADS, BLOCK, DIM).bfloat16() for _ in range(case.layers)
    ]
    q = torch.randn(case.rows * case.count, HEADS, DIM).bfloat16()
    out = torch.empty_like(q)
    offsets = torch.arange(case.rows + 1, dtype=torch.int32) * case.count
    starts = torch.full((case.rows,), case.context)

    def run() -> None:
        for cache in caches:
            torch.ops.weft_cpu.attend.default(q, out, cache, offsets, starts, table, 0, DIM**-0.5)

    return run


def sdpa(case: Case) -> Callable[[], None]:
    """Return a call of torch for the same work, on contiguous keys and values of every query head."""
    keys = case.context + case.count
    kv = [torch.randn(2, case.rows, HEADS, keys, DIM).bfloat16() for _ in range(min(case.layers, 2))]
    q = torch.randn(case.rows, HEADS, case.count, DIM).bfloat16()

    def run() -> None:
        for layer in range(case.layers):
            k, v = kv[layer % len(kv)]
            F.scaled_dot_product_attention(q, k, v, is_causal=case.count > 1)

    return run


def seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(case: Case, repeat: int) -> dict[str, float | str]:
    """Minima of ``repeat`` interleaved runs of each."""
    ours, theirs = paged(case), sdpa(case)
    times = [(seconds(ours), seconds(theirs)) for _ in range(repeat)]
    own, other = (min(column) / case.layers for column in zip(*times, strict=True))
    return {
        "case": case.name,
        "threads": torch.get_num_threads(),
        "weft_ms": own * 1e3,
        "sdpa_ms": other * 1e3,
        "weft_gflops": case.flops / own * 1e-9,
        "sdpa_gflops": case.flops / other * 1e-9,
        "weft_gbytes": case.bytes / own * 1e-9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    if not cpu.load():
        raise SystemExit("the C++ operations are not built: run `weft build-ops`")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = [measure(case, options.repeat) for case in CASES]
    for made in results:
        speed = f"{made['weft_gflops']:6.1f} GFLOP/s, {made['weft_gbytes']:5.1f} GB/s"
        other = f"sdpa {made['sdpa_ms']:8.3f} ms ({made['sdpa_gflops']:6.1f} GFLOP/s)"
        print(f"{made['case']:18} weft {made['weft_ms']:8.3f} ms ({speed})   {other}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
