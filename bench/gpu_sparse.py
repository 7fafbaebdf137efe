"""Time the kernels of sparse attention on a GPU, in the sizes of DeepSeek V3.2, beside torch.

python -m bench.gpu_sparse --json sparse.json

Scores, choice and attention of one layer, for decode rows and for a chunk of a prompt. The bytes are the
keys of the indexer, and the chosen entries once for each token.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import record
from bench.gpu_products import copy_rate, microseconds
from weft.attention.base import CoreInput, SegmentInput
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.attention.sparse.sparse_torch import TorchSparse
from weft.attention.sparse.sparse_triton import TritonInvariantSparse, TritonSparse

HEADS, LORA, ROPE, INDEX_HEADS, INDEX_DIM, TOP, BLOCK = 128, 512, 64, 64, 128, 2048, 64
CASES = ((1, 1, 4096), (1, 1, 65536), (16, 1, 16384), (64, 1, 4096), (1, 512, 16384))
"""(rows, tokens of a row, context of a row)."""
BACKENDS: dict[str, type[SparseBackend]] = {
    "triton": TritonSparse,
    "triton-invariant": TritonInvariantSparse,
    "torch": TorchSparse,
}
READS = Reads(entries=None, groups=0, top=TOP, heads=HEADS, dim=LORA + ROPE, index_heads=INDEX_HEADS)


def segment_of(rows: int, count: int, context: int) -> SegmentInput:
    """Return rows of ``count`` tokens behind ``context`` tokens, with blocks in random order."""
    blocks = -(-(context + count) // BLOCK)
    table = 1 + torch.randperm(rows * blocks, device="cuda").view(rows, blocks)
    return SegmentInput(
        begin=0,
        rows=rows,
        tokens=rows * count,
        host_counts=np.full(rows, count, np.int32),
        host_starts=np.full(rows, context, np.int32),
        q_offsets=torch.arange(0, rows * count + 1, count, dtype=torch.int32, device="cuda"),
        starts=torch.full((rows,), context, device="cuda"),
        slots=torch.arange(rows, device="cuda"),
        live=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        tables=(table,),
    )


def times(name: str, rows: int, count: int, context: int) -> dict[str, float]:
    """Return microseconds of the choice with its scores, and of attention."""
    segment, backend = segment_of(rows, count, context), BACKENDS[name]()
    width = LORA + ROPE + INDEX_DIM
    caches = {0: (torch.randn(1 + segment.tables[0].numel(), BLOCK, width, device="cuda").bfloat16(),)}
    core = CoreInput(segment, caches, 0.1, backend.plan(segment, READS, caches))
    tokens = segment.tokens
    q = torch.randn(tokens, HEADS, LORA + ROPE, device="cuda").bfloat16()
    index_q = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, device="cuda").bfloat16()
    weights, out = torch.randn(tokens, INDEX_HEADS, device="cuda"), q.new_empty(tokens, HEADS, LORA)
    chosen = backend.select(index_q, weights, core, READS)
    choose = partial(backend.select, index_q, weights, core, READS)
    attend = partial(backend.attend, q, out, core, READS, chosen)
    return {"choice": microseconds([choose]), "attention": microseconds([attend])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", action="append", choices=tuple(BACKENDS), help="all by default")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu_sparse needs a CUDA GPU, and this torch sees none")
    rate, device = copy_rate(), torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        count, context = case[0] * case[1], case[2] + case[1]
        keys = case[0] * context * INDEX_DIM * 2
        entries = count * min(TOP, context) * (LORA + ROPE) * 2
        row: dict[str, Any] = {
            "rows x tokens, context": f"{case[0]} x {case[1]}, {case[2]:,}",
            "floor of keys, entries": f"{1e6 * keys / rate:.1f}, {1e6 * entries / rate:.1f}",
        }
        for name in args.backend or BACKENDS:
            try:
                found = times(name, *case)
            except (RuntimeError, torch.OutOfMemoryError) as error:  # torch needs memory for all scores
                row[name] = type(error).__name__
                continue
            row[name] = f"{found['choice']:.0f}, {found['attention']:.0f}"
        rows.append(row)
        print(row, flush=True)
    page = (
        f"A copy moves {rate / 1e12:.2f} TB/s (read and written). Microseconds of a layer of DeepSeek V3.2: "
        f"choice with its scores, attention.\n\n{record.markdown(rows)}"
    )
    print(page)
    if args.json:
        numbers = {"device": device, "copy_bytes_per_second": rate, "rows": rows}
        record.write(args.json, "bench.gpu_sparse", f"Sparse attention, {device}", page, numbers)


if __name__ == "__main__":
    main()
