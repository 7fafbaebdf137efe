"""Compiles every Triton kernel for a GPU that need not be there; prints one line a kernel form.

    python tests/ops/compile_kernels.py 90 [few|all|words]

Run as a script, in a process without TRITON_INTERPRET: launches are replaced by compilation for ``sm_90``
(or another), down to machine code, by the ``ptxas`` that Triton brings. Of each form it prints name, bytes of
shared memory, registers of a thread, bytes of its stack (where spilled registers go) and warps, as JSON.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
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
COMPILED: list[Any] = []
"""Kernels in the order of compilation."""
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
            COMPILED.append(kernel)
        return kernel

    JITFunction.run = warm
    return made


def loop_of(kernel: Any) -> Counter[str]:
    """Return the number of instructions of the largest loop of a compiled kernel, by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [str(CUOBJDUMP), "-sass", file.name], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    lines = [
        (int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", listing)
    ]
    largest = Counter[str]()
    for at, text in lines:
        target = re.search(r"BRA.*?0x([0-9a-f]+)", text)
        if target is None or int(target[1], 16) >= at:
            continue
        inside = [one for place, one in lines if int(target[1], 16) <= place <= at]
        # A predicate stands before the name, and modifiers behind it.
        found = Counter(re.sub(r"^@!?U?P\w+\s+", "", one).split()[0].split(".")[0] for one in inside)
        largest = max(largest, found, key=Counter.total)
    return largest


def merge_is_ordered(ptx: str) -> bool:
    """Return True if the program that counts last sees the states of all programs (``_attend``).

    All threads have stored before one of them counts. The count acquires and releases for the whole GPU. The
    other threads wait for the count, and their loads bypass the L1 cache.
    """
    found = " ".join(re.findall(r"bar\.sync|st\.global|atom\.[\w.]+|ld\.global(?:\.cg)?", ptx))
    before, _, after = found.partition(" atom.global.gpu.acq_rel.add.u32 ")
    loads = [name for name in after.split() if name.startswith("ld.")]
    waits = before.endswith("bar.sync") and after.startswith("bar.sync")
    return waits and bool(loads) and set(loads) == {"ld.global.cg"}


def _resources(kernel: Any) -> dict[str, Any]:
    """Return the resources of one program, read from the compiled binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=True
        )
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert usage is not None, said.stdout
    merges = kernel.metadata.name == "_attend" and "atom." in kernel.asm["ptx"]
    return {
        **({"ordered": merge_is_ordered(kernel.asm["ptx"])} if merges else {}),
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
    fp8: bool = False,
) -> None:
    """Decodes, chunks and their splits in both backends, and the merge with its log-sum-exp.

    ``window``: negative for attention within chunks. ``ahead``: tokens attend to later tokens. ``fp8``: a
    cache in 8 bits.
    """
    from weft.attention.base import CoreInput
    from weft.attention.gqa.triton_backend import TritonAttention, TritonInvariant
    from weft.config.spec import CacheSpec
    from weft.ops.triton.attention import merge

    kind = "chunk" if window < 0 else "window" if window else "full"
    spec = CacheSpec(kind=kind, layers=(0,), window=abs(window), kv_heads=kv_heads, head_dim=dim, fp8=fp8)
    cache: tuple[torch.Tensor, ...] = (torch.empty(2, 2, kv_heads, block, dim, dtype=dtype),)
    if fp8:
        cache = cache[0].to(torch.float8_e4m3fn), torch.empty(2, 2, kv_heads, block)
    for backend in (TritonAttention(), TritonInvariant()):
        for counts in ([1, 1, 1, 1], [700, 20], [700] * 64):
            segment = _segment(counts)
            if ahead:
                segment = replace(segment, ends=(torch.zeros(segment.tokens, dtype=torch.int64),))
            q = torch.empty(segment.tokens, heads, dim, dtype=dtype)
            core = CoreInput(segment, {0: cache}, 0.1, softcap=softcap)
            backend.attend(q, torch.empty_like(q), core, 0, spec)
    states = torch.empty(3, heads, 5, dim)
    merge(states, states[..., 0].contiguous(), torch.empty(3, heads, dim), torch.empty(3, heads))


def latent_caches(
    lora: int, rope: int, block: int, dtype: torch.dtype, fp8: bool
) -> tuple[torch.Tensor, ...]:
    """Return the caches of a layer of latent attention."""
    if not fp8:
        return (torch.empty(2, block, lora + rope, dtype=dtype),)
    values = torch.empty(2, block, lora, dtype=torch.float8_e4m3fn)
    return values, torch.empty(2, block), torch.empty(2, block, rope, dtype=dtype)


def latent(
    heads: int, lora: int, rope: int, block: int, window: int, dtype: torch.dtype, *, fp8: bool = False
) -> None:
    """Latent attention of decodes, of one query and of several, in one piece and in splits."""
    from weft.attention.gqa.triton_backend import make_cut
    from weft.config.spec import CacheSpec
    from weft.ops.triton import forms
    from weft.ops.triton.latent import attend

    group = min(heads, 16)
    spec = CacheSpec(kind="full", layers=(0,), kv_heads=heads // group, head_dim=lora)
    for lines in (16, 32):
        segment = _segment([lines // group] * 3)
        q = torch.empty(segment.tokens, heads, lora, dtype=dtype)
        out, caches = q.clone(), latent_caches(lora, rope, block, dtype, fp8)
        turned = torch.empty(segment.tokens, heads, 128 + rope, dtype=dtype)
        angles = torch.empty(segment.tokens, rope // 2)
        for split in (0, 1024):
            form = forms.latent(lines, dtype, fp8)
            cut = make_cut(segment, heads, spec, form, split)
            attend(
                q,
                turned,
                (angles, angles),
                out,
                caches,
                segment.q_offsets,
                segment.starts,
                segment.tables[0],
                cut.parts[0].tiles,
                interleaved=lines == 16,
                form=form,
                group=group,
                window=window,
                scale=0.1,
                split=cut.split,
                splits=cut.splits,
                tokens=(0, segment.tokens),
            )


def sparse(
    heads: int, values: int, rest: int, index: tuple[int, int], window: int, ratio: int, top: int,
    dtype: torch.dtype, *, coded: int = 0,
) -> None:  # fmt: skip
    """Sparse attention of decodes and of a chunk: scores, choice, lists in one piece and in splits.

    ``index``: heads and size of the indexer; (0, 0): a token reads all groups. ``coded``: codes of an entry
    in 8 bits; 0: plain caches.
    """
    from weft.attention.base import CoreInput
    from weft.attention.sparse.sparse import Reads
    from weft.attention.sparse.sparse_triton import TritonInvariantSparse, TritonSparse
    from weft.ops.latent_ops import Rotation

    dim = values + rest
    reads = Reads(
        entries=0 if window else None, window=window, groups=1, ratio=ratio, top=top, heads=heads, dim=dim,
        index_heads=index[0],
    )  # fmt: skip
    widths = {kind: dim + kind * index[1] - coded for kind in (0, 1)}
    caches = {kind: latent_caches(coded, width, 64, dtype, coded > 0) for kind, width in widths.items()}
    sinks = torch.empty(heads) if window else None
    for backend in (TritonSparse(), TritonInvariantSparse()):
        for counts in ([1] * 4, [200] * 40):
            segment = _segment(counts)
            segment = replace(segment, tables=segment.tables * 2)
            core = CoreInput(segment, caches, 0.1, backend.plan(segment, reads, caches), sinks)
            chosen = None
            tokens = segment.tokens
            angles = torch.empty(tokens, rest // 2)
            rotation = Rotation(angles, angles, True)
            if top:
                index_q, weights = torch.empty(tokens, *index, dtype=dtype), torch.empty(tokens, index[0])
                if rest:
                    halves = rotation._replace(interleaved=index[0] == 32)  # GLM-5 rotates neighbours
                    chosen = backend.select_rotated(index_q, halves, weights.to(dtype), core, reads)
                else:
                    chosen = backend.select(index_q, weights, core, reads)
                assert chosen is not None
            q, out = (
                torch.empty(tokens, heads, dim, dtype=dtype),
                torch.empty(tokens, heads, values, dtype=dtype),
            )
            if rest:
                backend.attend_rotated(out, q, rotation, out.clone(), core, reads, chosen)
            else:
                backend.attend(q, out, core, reads, chosen)


def around_sparse(heads: int, line: int, lora: int, rope: int, dtype: torch.dtype) -> None:
    """Products of heads, hyper-connections, rotation of neighbours."""
    from weft.ops.triton import indexed, streams

    q, full = torch.empty(4, heads, line, dtype=dtype), torch.empty(4, heads, lora + rope, dtype=dtype)
    cos = torch.empty(4, rope // 2)
    matrices = torch.empty(heads, lora, line - rope, dtype=dtype)
    indexed.head_product_into(q[..., : line - rope], matrices, full[..., :lora])
    indexed.head_product_into(full[..., :lora], matrices.transpose(1, 2), q[..., : line - rope])
    x, made = torch.empty(4, 4, 7168, dtype=dtype), torch.empty(4, 7168, dtype=dtype)
    _, out, mix = streams.mix_streams(torch.empty(4, 24), torch.empty(3), torch.empty(24), x, 20, 1e-6)
    streams.add_streams(x, made, out, mix)
    for some in (q, q[:, :1]):
        streams.rotate_neighbours(some, cos, cos)


def lines(exact: int, groups: int, sources: int, dtype: torch.dtype, *, coded: int = 0) -> None:
    """Writes of sparse attention: entries of a window, completed groups, sources of groups.

    exact: elements of an entry behind its codes; groups: elements of a group, wide; sources: of a source.
    """
    from weft.ops.triton.eight_bits import write_lines

    rows, wider = torch.zeros(4, dtype=torch.int64), torch.empty(4, 8192, dtype=dtype)
    write_lines(latent_caches(coded, exact, 64, dtype, coded > 0), rows, wider[:, : coded + exact])
    write_lines(latent_caches(coded, groups - coded, 64, dtype, coded > 0), rows, torch.empty(4, groups))
    write_lines((torch.empty(2, 64, sources, dtype=dtype),), rows, wider[:, -sources:])


def entries(first: int, lora: int, rope: int, index: tuple[int, int], dtype: torch.dtype) -> None:
    """Entries of latent attention: with a norm of the queries, without, and with the key of an indexer.

    ``index``: heads and size of the indexer.
    """
    from weft.ops.latent_ops import IndexParts
    from weft.ops.triton.latent import latent_rope_cache, latent_rope_cache_fp8

    joined = torch.empty(4, first + lora + rope, dtype=dtype)
    weight, q_weight = torch.empty(lora, dtype=dtype), torch.empty(first, dtype=dtype)
    cache, angles = torch.empty(2, 16, lora + rope, dtype=dtype), torch.empty(4, rope // 2)
    writes = torch.zeros(4, dtype=torch.int64)
    for one in (q_weight, None):
        latent_rope_cache(joined, one, weight, 1e-6, angles, angles, one is None, cache, writes)
        codes, scales, keys = latent_caches(lora, rope, 16, dtype, True)
        latent_rope_cache_fp8(
            joined, one, weight, 1e-6, angles, angles, one is None, codes, scales, keys, writes
        )
    heads, dim = index
    norm = torch.empty(dim, dtype=dtype)
    parts = IndexParts(torch.empty(4, dim + heads, dtype=dtype), norm, norm, 1e-6, False)
    cache = torch.empty(2, 16, lora + rope + dim, dtype=dtype)
    norms = (q_weight, weight, 1e-6, angles, angles, True)
    latent_rope_cache(joined, *norms, cache, writes, parts)
    codes, scales, keys = latent_caches(lora, rope + dim, 16, dtype, True)
    latent_rope_cache_fp8(joined, *norms, codes, scales, keys, writes, parts)


def elementwise(dtype: torch.dtype) -> None:
    """Norms, also of sums of experts, rotation (with norms, partial, without), activation."""
    from weft.ops.moe import ExpertSum
    from weft.ops.triton import fused, moe

    for size in (4096, 1000):
        x, weight = torch.empty(4, size, dtype=dtype), torch.empty(size, dtype=dtype)
        fused.rms_norm(x, weight, 1e-6)
        fused.add_rms_norm(x, x.clone(), weight, 1e-6)
        results, scales = torch.empty(4, 8, size, dtype=dtype), torch.empty(4, 8)
        for shared, share in ((None, None), (x.clone(), scales[:, 0])):
            terms = ExpertSum(made=results, scales=scales, share=share, shared=shared, add=moe._finish)
            fused.add_rms_norm(x, terms, weight, 1e-6)
    for dim, half, normed in ((128, 64, True), (128, 64, False), (96, 32, False), (20, 10, True)):
        cache = torch.empty(2, 2, 8, 16, dim, dtype=dtype)
        weights = [torch.empty(dim, dtype=dtype) if normed else None] * 2
        angles = torch.empty(4, half)
        qkv = torch.empty(4, 48 * dim, dtype=dtype)
        writes = torch.zeros(4, dtype=torch.int64)
        fused.qkv_rope_cache(qkv, 32, 8, *weights, 1e-6, angles, angles, cache, writes)  # type: ignore[call-arg]
        caches = cache.to(torch.float8_e4m3fn), torch.empty(cache.shape[:-1])
        fused.qkv_rope_cache_fp8(qkv, 32, 8, *weights, 1e-6, angles, angles, *caches, writes)  # type: ignore[call-arg]
    fused.gated(torch.empty(4, 2 * 3000, dtype=dtype), "silu")
    wider = torch.empty(4, 2 * 3000, dtype=dtype)
    fused.sigmoid_gate(wider[:, :3000].contiguous(), wider[:, 3000:])


def products(dtype: torch.dtype) -> None:
    """The invariant matrix product: sizes that fill tiles, and that do not."""
    from weft.ops.triton import matmul

    for inputs, outputs in ((1024, 512), (1000, 500)):
        weight, bias = torch.empty(outputs, inputs, dtype=dtype), torch.empty(outputs, dtype=dtype)
        matmul.linear(torch.empty(100, inputs, dtype=dtype), weight, bias)
    matmul.linear(torch.empty(1, 1024, dtype=dtype), torch.empty(512, 1024, dtype=dtype))


def experts(dtype: torch.dtype) -> None:
    """Routed blocks: few and many tokens per expert, biases, a shared expert with a gate, no gates."""
    from tests.support.routed import routed, tokens
    from weft.ops.moe_plain import plain
    from weft.ops.triton import moe

    moe._table_form = lambda tokens, weights: "triton"
    for kind, shared in (("biased", 100), ("gated_shared", 100), ("corrected", 192)):
        weights = routed(kind, dtype, experts=8, hidden=256, inner=192, shared=shared)
        for count in (4, 200):
            x, ids = tokens(count, dtype, 256)
            moe.moe(x, ids, weights)
        moe.moe_invariant(*tokens(4, dtype, 256), weights)
    bare = replace(
        weights,
        gate=weights.gate._replace(activation="relu2"),
        gate_up=weights.down.transpose(1, 2).contiguous(),
    )
    chosen = torch.zeros(4, 2, dtype=torch.int64)
    for tile_m in moe.TILES_M:
        moe.by_tiles(torch.empty(4, 256, dtype=dtype), chosen, bare, tile_m, gated=plain)


def routers() -> None:
    """Routers of published sizes: Qwen3, Qwen3-Next with the gate of a shared expert, DeepSeek-V3."""
    from tests.support.routed import routed
    from weft.ops.routing import Rule
    from weft.ops.triton import routing

    grouped = Rule(8, "sigmoid", True, groups=8, top_groups=4, group_rule="top2", scale=2.5)
    sizes: list[tuple[str, int, int, Rule]] = [
        ("plain", 128, 2048, Rule(8, renormalize=True)),
        ("gated_shared", 512, 2048, Rule(10, renormalize=True)),
        ("corrected", 256, 7168, grouped),
    ]
    for kind, experts, hidden, rule in sizes:
        weights = replace(routed(kind, HALF, experts=experts, hidden=hidden, inner=8, shared=8), rule=rule)
        x = torch.empty(4, hidden, dtype=HALF)
        chosen, _, _ = routing.choose(
            x, weights, torch.nn.functional.linear, own=True, joined=kind != "plain"
        )
        for tile_m in (16, 64):
            routing.cut(chosen, experts, tile_m)


def delta(
    k_heads: int, v_heads: int, dim: int, taps: int, dtype: torch.dtype, *, by_channel: bool = False
) -> None:
    """The gated delta net for decode rows, which keep a state for each token, and for chunks.

    by_channel: with a decay for every key channel.
    """
    from weft.ops.triton import delta as kernels

    channels = (2 * k_heads + v_heads) * dim
    keys = torch.empty(5, 2, k_heads, taps - 1, dim, dtype=dtype)
    values = torch.empty(5, 2, v_heads, taps - 1, dim, dtype=dtype)
    state = (keys, keys.clone(), values, torch.empty(5, 2, v_heads, dim, dim))
    decays = (v_heads, dim) if by_channel else (v_heads,)
    weights = tuple(torch.empty(*size) for size in ((taps, channels), (v_heads,), decays, (dim,)))
    widths = (channels, v_heads * dim, v_heads, math.prod(decays))
    rows = (torch.zeros(4, dtype=torch.int32), *(torch.zeros(3, dtype=torch.int64) for _ in range(3)))
    out = torch.empty(3, v_heads * dim, dtype=dtype)
    for each in (False, True):
        kernels.run(
            tuple(torch.empty(3, width, dtype=dtype) for width in widths),  # type: ignore[arg-type]
            out,
            state,
            weights,  # type: ignore[arg-type]
            rows,
            eps=1e-6,
            length_eps=1e-6,
            sigmoid=by_channel,
            each=each,
        )


def mamba(heads: int, dim: int, groups: int, state: int, taps: int, dtype: torch.dtype, finish: str) -> None:
    """Mamba2 for decode rows, which keep a state for each token, and for chunks."""
    from weft.ops.triton import mamba as kernels

    inner, channels = heads * dim, heads * dim + 2 * groups * state
    places = math.gcd(heads, math.lcm(groups, 8))
    shared = torch.empty(5, 2, places, taps - 1, state, dtype=dtype)
    past = torch.empty(5, 2, heads, taps - 1, dim, dtype=dtype)
    parts = (past, shared, shared.clone(), torch.empty(5, 2, heads, dim, state))
    norm = torch.empty(inner) if finish in ("gated", "normed") else None
    of_heads = [torch.empty(heads) for _ in range(3)]
    rows = (torch.zeros(4, dtype=torch.int32), *(torch.zeros(3, dtype=torch.int64) for _ in range(3)))
    for each in (False, True):
        kernels.run(
            torch.empty(3, inner + channels + heads, dtype=dtype),
            torch.empty(3, inner, dtype=FULL if finish == "later" else dtype),
            parts,
            (torch.empty(taps, channels), torch.empty(channels), *of_heads, norm),  # type: ignore[arg-type]
            rows,
            groups=groups,
            norm_groups=groups,
            bounds=(0.0, math.inf),
            eps=1e-5,
            finish=finish,
            each=each,
        )


def mamba1(heads: int, dim: int, state: int, taps: int, dtype: torch.dtype) -> None:
    """Mamba 1 for decode rows, which keep a state for each token, and for chunks."""
    from weft.ops.triton import causal, mamba

    inner = heads * dim
    rows = (torch.zeros(4, dtype=torch.int32), *(torch.zeros(3, dtype=torch.int64) for _ in range(3)))
    xz, steps, b, out = (torch.empty(3, width, dtype=dtype) for width in (2 * inner, inner, state, inner))
    x, z = xz.split(inner, dim=1)
    past, states = torch.empty(5, 2, heads, taps - 1, dim, dtype=dtype), torch.empty(5, 2, heads, state, dim)
    channels = [torch.empty(inner) for _ in range(3)]
    for each in (False, True):
        causal.run(x, out, past, torch.empty(taps, inner), channels[0], rows, most=1, each=each, gated=False)
        weights = (torch.empty(heads, state, dim), channels[1], channels[2])
        mamba.scan((out, steps, b, b.clone(), z), out.clone(), states, weights, rows, each=each)


def short_conv(heads: int, dim: int, taps: int, dtype: torch.dtype) -> None:
    """Gated short convolutions for decode rows and for prompts."""
    from weft.ops.triton import causal

    channels = heads * dim
    rows = (torch.zeros(4, dtype=torch.int32), *(torch.zeros(3, dtype=torch.int64) for _ in range(3)))
    for each in (False, True):
        causal.run(
            torch.empty(3, 3 * channels, dtype=dtype),
            torch.empty(3, channels, dtype=dtype),
            torch.empty(5, 2, heads, taps - 1, dim, dtype=dtype),
            torch.empty(taps, channels),
            torch.empty(channels),
            rows,
            most=1,
            each=each,
        )


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
            for gather in (True, False):
                moe._product(made, stack, None, made, moe.cut(ids, 4, tile_m), 2, tile_m, gather)


def words(made: list[dict[str, Any]], *formats: str) -> None:
    """Products of matrices in words in every form of tile, with instructions of the loop by weight."""
    from tests.ops.test_triton_words import codes_of
    from weft.ops.triton import words as kernels
    from weft.ops.words import words_of

    kernel = kernels._words
    for name in formats:
        matrix = words_of(codes_of(name, (256, 8192)))
        assert matrix is not None, name
        for form in kernels.forms_of(matrix):
            x, out = torch.empty(form.rows, 8192, dtype=HALF), torch.empty(form.rows, 256, dtype=HALF)
            before = len(made)
            kernels.run(x, matrix, None, out, form)
            compiled = [one for one in COMPILED if one.metadata.name == kernel.fn.__name__][-1]
            loop = loop_of(compiled)
            made[before] |= {
                "format": name,
                "rows": form.rows,
                # instructions of a thread by weight
                "cost": loop.total() * 32 * form.warps / (form.outputs * 128),
                "loads": loop["LDG"] + loop["LDL"] + loop["STL"] + loop["STS"],
            }
        kernels.dequantized(matrix, 0, 4, HALF)


def scaled(dtype: torch.dtype) -> None:
    """Rows rounded to FP8."""
    from weft.ops.triton.scaled import rounded

    for inputs in (4096, 14336):
        rounded(torch.empty(4, inputs, dtype=dtype))


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


def collectives(dtype: torch.dtype) -> None:
    """Collectives of ranks that read each other's memory, for 2 and 8 ranks."""
    from weft.ops.triton import peers

    for size in (2, 8):
        x, table = torch.empty(size, 4096, dtype=dtype), torch.zeros(2 + size, dtype=torch.int64)
        peers.add(x[0], table, 1, size)
        peers.scatter(x, table, 1, size)
        peers.gather(x[0], table, 1, size)
        peers.exchange(x, table, 1, size)
        peers.add(x[0, :1], table, 1, size)  # Triton compiles an argument of 1 as a constant
        peers.gather(x[0, :1], table, 1, size)


def main() -> None:
    made = compile_only(int(sys.argv[1]))
    elementwise(HALF)
    attention(32, 8, 128, 64, 0, HALF)
    if "words" in sys.argv:
        words(
            made, "int4", "int4 groups of 64", "int4 zeros", "int8", "fp8 blocks", "mxfp8", "mxfp4", "nvfp4"
        )
    elif "few" not in sys.argv:
        others()
    if "all" in sys.argv:
        all_forms()
    print("\n".join(json.dumps(one) for one in made))


def others() -> None:
    products(HALF)
    adapters(HALF)
    experts(HALF)
    routers()
    delta(16, 32, 128, 4, HALF)
    delta(32, 32, 128, 4, HALF, by_channel=True)
    mamba(128, 64, 8, 128, 4, HALF, "gated")  # Nemotron-H
    mamba(128, 64, 1, 128, 4, HALF, "gated")  # Bamba, Granite 4 H
    mamba(48, 128, 1, 256, 4, HALF, "none")  # Falcon-H1
    mamba1(16, 512, 16, 4, HALF)  # Falcon Mamba, Jamba
    short_conv(32, 64, 3, HALF)
    packed(HALF, "int4 zeros", "nvfp4")
    draws(HALF)
    collectives(HALF)
    if int(sys.argv[1]) >= 89:
        scaled(HALF)
    attention(12, 4, 64, 16, 100, HALF)
    attention(32, 8, 128, 64, 0, HALF, fp8=True)
    latent(128, 512, 64, 64, 0, HALF)
    latent(128, 512, 64, 64, 0, HALF, fp8=True)
    entries(1536, 512, 64, (64, 128), HALF)
    lines(512, 640, 2560, HALF)  # DeepSeek V4
    lines(64, 640, 2560, HALF, coded=448)
    latent(8, 128, 32, 16, 100, HALF)
    around_sparse(128, 192, 512, 64, HALF)
    sparse(128, 512, 64, (64, 128), 0, 1, 2048, HALF)  # DeepSeek V3.2
    sparse(64, 512, 0, (64, 128), 128, 4, 512, HALF)  # DeepSeek V4: chosen groups
    sparse(64, 512, 0, (0, 0), 128, 128, 0, HALF)  # all groups
    sparse(128, 512, 64, (64, 128), 0, 1, 2048, HALF, coded=512)
    sparse(64, 512, 0, (64, 128), 128, 4, 512, HALF, coded=448)


def all_forms() -> None:
    latent(8, 500, 24, 3, 0, FULL)
    latent(8, 500, 24, 3, 0, FULL, fp8=True)
    latent(128, 512, 64, 64, 0, torch.float16, fp8=True)
    entries(100, 500, 24, (30, 100), FULL)
    lines(24, 600, 1200, FULL, coded=476)
    lines(64, 512, 1024, torch.float16, coded=448)
    delta(2, 6, 100, 3, FULL)
    delta(2, 2, 64, 2, HALF)
    mamba(6, 100, 2, 96, 4, FULL, "normed")
    mamba(4, 12, 1, 20, 2, torch.float16, "later")
    mamba(64, 64, 8, 128, 4, FULL, "gated")
    mamba(16, 64, 2, 16, 8, HALF, "gated")
    mamba1(3, 100, 12, 2, FULL)
    mamba1(2, 40, 256, 9, torch.float16)
    short_conv(2, 300, 5, FULL)
    short_conv(4, 64, 64, torch.float16)
    elementwise(FULL)
    products(FULL)
    draws(FULL)
    collectives(FULL)
    experts(FULL)
    packed(HALF, "int8", "fp8", "fp8 blocks", "int8 zeros", "mxfp4", "mxfp8", "int4")
    packed(torch.float16, "int4 zeros", "nvfp4")
    packed(FULL, "int4 zeros", "fp8 blocks", "nvfp4")
    attention(32, 8, 128, 64, 0, FULL)
    attention(8, 4, 256, 16, 1024, HALF, ahead=True)
    attention(16, 2, 256, 64, 0, HALF)
    sparse(16, 512, 64, (32, 128), 0, 1, 2048, HALF)
    sparse(16, 512, 64, (32, 128), 0, 1, 2048, HALF, coded=512)
    sparse(64, 512, 0, (0, 0), 128, 128, 0, torch.float16, coded=448)
    sparse(20, 500, 24, (30, 100), 100, 3, 70, FULL)
    around_sparse(20, 100, 500, 24, FULL)
    attention(8, 8, 96, 4, 0, torch.float16)
    attention(40, 8, 128, 64, -8192, HALF)
    attention(16, 8, 256, 64, 4096, HALF, 50.0)
    attention(71, 1, 64, 64, 0, HALF)
    attention(4, 2, 20, 3, 7, FULL)
    attention(16, 2, 256, 64, 0, HALF, fp8=True)
    attention(8, 8, 96, 4, 100, torch.float16, fp8=True)


if __name__ == "__main__":
    main()
