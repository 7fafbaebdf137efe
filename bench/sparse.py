"""Compare sparse attention of the CPU extension and of torch, by context.

python -m bench.sparse [--json FILE] [--repeat N] [--contexts 8192,32768]

One layer has the published sizes of a rank with 16 heads, in bf16: V3.2 (entries of 576 elements, a token
selects 2,048 positions) and V4 (entries of 512; a window of 128, and 512 of the groups of 4 positions). The
cases are a decode row, and a chunk of 64 tokens at the end of a prompt. Times are minima of interleaved
repetitions, for selection (64 index heads of 128) and for core attention. With --json the figures go to FILE
and a page beside it. The machine should be idle.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import record
from weft.attention.base import CoreInput, SegmentInput
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.attention.sparse.sparse_cpu import CpuSparse
from weft.attention.sparse.sparse_torch import TorchSparse
from weft.ops import cpu

Tensor = torch.Tensor

HEADS, INDEX_HEADS, INDEX_DIM, BLOCK = 16, 64, 128, 64
MODELS = {
    "V3.2": Reads(entries=None, groups=0, top=2048, heads=HEADS, dim=576, index_heads=INDEX_HEADS),
    "V4": Reads(
        entries=1, window=128, groups=0, ratio=4, top=512, heads=HEADS, dim=512, index_heads=INDEX_HEADS
    ),
}
VALUES = 512
"""Elements of a value."""


class Work:
    """``count`` tokens at the end of ``context`` positions, for each of ``rows`` sequences."""

    def __init__(self, reads: Reads, context: int, count: int, rows: int = 1) -> None:
        torch.manual_seed(0)
        self.reads = reads
        self.context, self.tokens = context, count * rows
        blocks = -(-context // BLOCK)
        table = (torch.randperm(rows * blocks) + 1).view(rows, blocks)
        per_block = BLOCK // reads.ratio
        self.caches = {0: (torch.randn(rows * blocks + 1, per_block, reads.dim + INDEX_DIM).bfloat16(),)}
        if reads.entries is not None:
            self.caches[reads.entries] = (torch.randn(rows * blocks + 1, BLOCK, reads.dim).bfloat16(),)
        self.q = torch.randn(self.tokens, HEADS, reads.dim).bfloat16()
        self.index_q = torch.randn(self.tokens, INDEX_HEADS, INDEX_DIM).bfloat16()
        self.weights = torch.randn(self.tokens, INDEX_HEADS)
        self.out = torch.empty(self.tokens, HEADS, VALUES, dtype=torch.bfloat16)
        self.segment = SegmentInput(
            begin=0,
            rows=rows,
            tokens=self.tokens,
            host_counts=np.full(rows, count, np.int32),
            host_starts=np.full(rows, context - count, np.int32),
            q_offsets=torch.arange(rows + 1, dtype=torch.int32) * count,
            starts=torch.full((rows,), context - count),
            slots=torch.zeros(rows, dtype=torch.int64),
            live=torch.zeros(rows, dtype=torch.int64),
            tables=(table, table),
        )

    @property
    def flops(self) -> tuple[float, float]:
        """Operations of (selection, core attention)."""
        seen = self.context // self.reads.ratio
        keys = min(seen, self.reads.top) + self.reads.window
        choice = 2.0 * self.tokens * seen * INDEX_HEADS * INDEX_DIM if seen > self.reads.top else 0.0
        return choice, 2.0 * self.tokens * keys * HEADS * (self.reads.dim + self.out.shape[2])

    def core(self, plan: Any) -> CoreInput:
        """Return the input of core attention with a backend's plan."""
        return CoreInput(self.segment, self.caches, self.reads.dim**-0.5, plan)

    def seconds(self, backend: SparseBackend) -> tuple[float, float]:
        """Return the seconds of (plan and selection, core attention)."""
        began = time.perf_counter()
        core = self.core(backend.plan(self.segment, self.reads, self.caches))
        chosen = backend.select(self.index_q, self.weights, core, self.reads)
        between = time.perf_counter()
        backend.attend(self.q, self.out, core, self.reads, chosen)
        return between - began, time.perf_counter() - between


def measure(name: str, context: int, count: int, repeat: int) -> dict[str, Any]:
    """Return the minima of ``repeat`` interleaved runs."""
    work = Work(MODELS[name], context, count)
    ours, torchs = CpuSparse(), TorchSparse()
    times = [(work.seconds(ours), work.seconds(torchs)) for _ in range(repeat)]
    own = [min(run[0][part] for run in times) for part in (0, 1)]
    other = [min(run[1][part] for run in times) for part in (0, 1)]
    flops = work.flops
    return {
        "model": name,
        "context": context,
        "tokens": count,
        "threads": torch.get_num_threads(),
        "choice_ms": own[0] * 1e3,
        "attention_ms": own[1] * 1e3,
        "torch_choice_ms": other[0] * 1e3,
        "torch_attention_ms": other[1] * 1e3,
        "choice_gflops": flops[0] / own[0] * 1e-9,
        "attention_gflops": flops[1] / own[1] * 1e-9,
        "ratio": sum(other) / sum(own),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the table as Markdown, with torch's times in brackets."""
    return record.markdown(
        [
            {
                "model": made["model"],
                "context": f"{made['context']:,}",
                "tokens": made["tokens"],
                "choice ms (torch)": f"{made['choice_ms']:.3f} ({made['torch_choice_ms']:.3f})",
                "attention ms (torch)": f"{made['attention_ms']:.3f} ({made['torch_attention_ms']:.3f})",
                "choice GFLOP/s": f"{made['choice_gflops']:.0f}",
                "attention GFLOP/s": f"{made['attention_gflops']:.0f}",
                "torch's time / ours": f"{made['ratio']:.1f}",
            }
            for made in results
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the figures, with a .md beside")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--contexts", default="2048,8192,32768,131072", help="positions, with commas")
    options = parser.parse_args()
    if not cpu.load():
        raise SystemExit("the C++ operations are not built: run `weft build-ops`")
    torch.set_num_threads(options.threads)
    results = [
        measure(name, context, count, options.repeat)
        for name in MODELS
        for context in map(int, options.contexts.split(","))
        for count in (1, 64)
    ]
    shown = table(results)
    print(shown)
    if options.json:
        title = f"Sparse attention of a layer, C++ beside torch: {options.threads} threads, bf16"
        numbers = {"threads": options.threads, "results": results}
        record.write(options.json, "bench.sparse", title, shown, numbers)


if __name__ == "__main__":
    main()
