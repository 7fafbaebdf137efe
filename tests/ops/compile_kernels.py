"""Compiles every Triton kernel for a GPU that need not be there; prints one line a kernel form.

    python tests/ops/compile_kernels.py 90 [few|all]

Run as a script, in a process without TRITON_INTERPRET: launches are replaced by compilation for ``sm_90``
(or another), down to machine code, by the ``ptxas`` that Triton brings. Of each form it prints name, bytes of
shared memory, registers of a thread, bytes of its stack (where spilled registers go) and warps, as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

HALF, FULL = torch.bfloat16, torch.float32
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class NoDevice:
    """As much of a Triton driver as compilation asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> list[dict[str, Any]]:
    """Makes every launch a compilation; returns the list that what was compiled goes to."""
    made: list[dict[str, Any]] = []
    known: set[str] = set()
    driver.set_active(NoDevice(capability))
    run = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in known:
            known.add(kernel.hash)
            made.append(_resources(kernel))
        return kernel

    JITFunction.run = warm
    return made


def _resources(kernel: Any) -> dict[str, Any]:
    """What one program takes, as the compiled binary says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=True
        )
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert usage is not None, said.stdout
    return {
        "name": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "registers": int(usage[1]),
        "stack": int(usage[2]),
        "warps": kernel.metadata.num_warps,
    }


def _segment(counts: list[int]) -> Any:
    """Rows of ``counts`` tokens behind 3,000 others."""
    from weft.attention.base import SegmentInput

    rows = len(counts)
    return SegmentInput(
        begin=0,
        rows=rows,
        tokens=sum(counts),
        host_counts=np.array(counts, np.int32),
        host_starts=np.full(rows, 3000, np.int32),
        q_offsets=torch.zeros(rows + 1, dtype=torch.int32),
        starts=torch.zeros(rows, dtype=torch.int64),
        slots=torch.zeros(rows, dtype=torch.int64),
        live=torch.zeros(rows, dtype=torch.int64),
        tables=(torch.zeros(rows, 4096, dtype=torch.int64),),
    )


def attention(
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int,
    dtype: torch.dtype,
    softcap: float = 0.0,
    *,
    ahead: bool = False,
) -> None:
    """Decodes, chunks and their splits in both backends, and the merge with its log-sum-exp.

    ``window``: negative for attention within chunks. ``ahead``: tokens attend to later tokens.
    """
    from weft.attention.base import CoreInput
    from weft.attention.gqa.triton_backend import TritonAttention, TritonInvariant
    from weft.config.spec import CacheSpec
    from weft.ops.triton.attention import merge

    kind = "chunk" if window < 0 else "window" if window else "full"
    spec = CacheSpec(kind=kind, layers=(0,), window=abs(window), kv_heads=kv_heads, head_dim=dim)
    cache = torch.empty(2, 2, kv_heads, block, dim, dtype=dtype)
    for backend in (TritonAttention(), TritonInvariant()):
        for counts in ([1, 1, 1, 1], [700, 20], [700] * 64):
            segment = _segment(counts)
            if ahead:
                segment = replace(segment, ends=(torch.zeros(segment.tokens, dtype=torch.int64),))
            q = torch.empty(segment.tokens, heads, dim, dtype=dtype)
            core = CoreInput(segment, {0: (cache,)}, 0.1, softcap=softcap)
            backend.attend(q, torch.empty_like(q), core, 0, spec)
    states = torch.empty(3, heads, 5, dim)
    merge(states, states[..., 0].contiguous(), torch.empty(3, heads, dim), torch.empty(3, heads))


def latent(heads: int, lora: int, rope: int, block: int, window: int, dtype: torch.dtype) -> None:
    """Latent attention of decodes, of one query and of several, in one piece and in splits."""
    from weft.attention.gqa.triton_backend import make_cut
    from weft.config.spec import CacheSpec
    from weft.ops.triton import forms
    from weft.ops.triton.latent import attend

    group = min(heads, 16)
    spec = CacheSpec(kind="full", layers=(0,), kv_heads=heads // group, head_dim=lora)
    for lines in (16, 32):
        segment = _segment([lines // group] * 3)
        q = torch.empty(segment.tokens, heads, lora + rope, dtype=dtype)
        out, cache = q[..., :lora].contiguous(), torch.empty(2, block, lora + rope, dtype=dtype)
        for split in (0, 1024):
            form = forms.latent(lines, dtype)
            cut = make_cut(segment, heads, spec, form, split)
            attend(
                q,
                out,
                cache,
                segment.q_offsets,
                segment.starts,
                segment.tables[0],
                cut.parts[0].tiles,
                form=form,
                group=group,
                window=window,
                scale=0.1,
                split=cut.split,
                splits=cut.splits,
                tokens=(0, segment.tokens),
            )


def elementwise(dtype: torch.dtype) -> None:
    """Norms, rotation (with norms, partial, without), activation."""
    from weft.ops.triton import fused

    for size in (4096, 1000):
        x, weight = torch.empty(4, size, dtype=dtype), torch.empty(size, dtype=dtype)
        fused.rms_norm(x, weight, 1e-6)
        fused.add_rms_norm(x, x.clone(), weight, 1e-6)
    for dim, half, normed in ((128, 64, True), (128, 64, False), (96, 32, False), (20, 10, True)):
        cache = torch.empty(2, 2, 8, 16, dim, dtype=dtype)
        weights = [torch.empty(dim, dtype=dtype) if normed else None] * 2
        angles = torch.empty(4, half)
        qkv = torch.empty(4, 48 * dim, dtype=dtype)
        writes = torch.zeros(4, dtype=torch.int64)
        fused.qkv_rope_cache(qkv, 32, 8, *weights, 1e-6, angles, angles, cache, writes)
    fused.gated(torch.empty(4, 2 * 3000, dtype=dtype), "silu")


def products(dtype: torch.dtype) -> None:
    """The invariant matrix product: sizes that fill tiles, and that do not."""
    from weft.ops.triton import matmul

    for inputs, outputs in ((1024, 512), (1000, 500)):
        weight, bias = torch.empty(outputs, inputs, dtype=dtype), torch.empty(outputs, dtype=dtype)
        matmul.linear(torch.empty(100, inputs, dtype=dtype), weight, bias)
    matmul.linear(torch.empty(1, 1024, dtype=dtype), torch.empty(512, 1024, dtype=dtype))


def experts(dtype: torch.dtype) -> None:
    """Routed blocks: few and many tokens an expert, biases, a shared expert with a gate."""
    from tests.support.routed import routed, tokens
    from weft.ops.triton import moe

    for kind in ("biased", "gated_shared"):
        weights = routed(kind, dtype, experts=8, hidden=256, inner=192, shared=100)
        for count in (4, 200):
            x, ids = tokens(count, dtype, 256)
            moe.moe(x, ids, weights)
        moe.moe_invariant(*tokens(4, dtype, 256), weights)


def packed(dtype: torch.dtype, *forms: str) -> None:
    """Products with packed weights in every form of tile, of matrices and of experts."""
    from tests.ops.test_coded import codes_of
    from weft.ops.triton import coded, moe

    for form in forms:
        weight = coded.pack(codes_of(form, (512, 1024)))
        bias = torch.empty(512, dtype=dtype)
        for rows in (1, 100, 300):
            coded.linear(torch.empty(rows, 1024, dtype=dtype), weight, bias)
        stack = coded.pack(codes_of(form, (4, 256, 256)))
        for tile_m in moe.TILES_M:
            ids = torch.zeros(5, 2, dtype=torch.int64)
            made = torch.empty(10, 256, dtype=dtype)
            moe._product(made, stack, None, made, moe.cut(ids, 4, tile_m), 2, tile_m, True)


def adapters(dtype: torch.dtype) -> None:
    """Low-rank products: several parts, ranks that are no multiple of a step."""
    from weft.ops import low_rank
    from weft.ops.triton import low_rank as low_rank_kernels

    spans = [(0, 0, 256), (1, 256, 512)]
    pool = low_rank.make_pool(3, 12, 2, (512, 1000), spans, dtype, torch.device("cpu"))
    rows = low_rank.AdapterRows(torch.zeros(5, dtype=torch.int32), [0])
    low_rank_kernels.low_rank(torch.empty(5, 512, dtype=dtype), torch.empty(5, 1000, dtype=dtype), pool, rows)


def draws(dtype: torch.dtype) -> None:
    """Draws of a captured step with and without recurrent states, and of other steps."""
    from weft.ops.draw import Advance
    from weft.ops.sampling import Columns
    from weft.ops.triton import draw

    columns, vocab = Columns(0, 1, 2, 3, 4, 5), 128256
    logits, table = torch.empty(3, vocab, dtype=dtype), torch.zeros(8, 6, dtype=torch.int64)
    slots, history = torch.zeros(9, dtype=torch.int64), torch.zeros(9, 97, dtype=torch.int32)
    for live in (slots, None):
        advance = Advance(slots[:1], 8, history, slots, live)
        draw.draw(logits, vocab, slots[:3], table, columns, None, None, advance)
    draw.draw(logits, vocab, slots[:3], table, columns, slots[:3], slots[:3], None)


def main() -> None:
    made = compile_only(int(sys.argv[1]))
    elementwise(HALF)
    attention(32, 8, 128, 64, 0, HALF)
    if "few" not in sys.argv:
        others()
    if "all" in sys.argv:
        all_forms()
    print("\n".join(json.dumps(one) for one in made))


def others() -> None:
    products(HALF)
    adapters(HALF)
    experts(HALF)
    packed(HALF, "int4 zeros", "nvfp4")
    draws(HALF)
    attention(12, 4, 64, 16, 100, HALF)
    latent(128, 512, 64, 64, 0, HALF)
    latent(8, 128, 32, 16, 100, HALF)


def all_forms() -> None:
    latent(8, 500, 24, 3, 0, FULL)
    elementwise(FULL)
    products(FULL)
    draws(FULL)
    experts(FULL)
    packed(HALF, "int8", "fp8", "fp8 blocks", "int8 zeros", "mxfp4", "mxfp8", "int4")
    packed(torch.float16, "int4 zeros", "nvfp4")
    packed(FULL, "int4 zeros", "fp8 blocks", "nvfp4")
    attention(32, 8, 128, 64, 0, FULL)
    attention(8, 4, 256, 16, 1024, HALF, ahead=True)
    attention(16, 2, 256, 64, 0, HALF)
    attention(8, 8, 96, 4, 0, torch.float16)
    attention(40, 8, 128, 64, -8192, HALF)
    attention(16, 8, 256, 64, 4096, HALF, 50.0)
    attention(71, 1, 64, 64, 0, HALF)
    attention(4, 2, 20, 3, 7, FULL)


if __name__ == "__main__":
    main()
