"""Stand-ins for the Triton kernels, which check the arguments of a launch instead of computing.

A kernel reads raw memory, so that a wrong shape is not detected. A contract states the arrays of a kernel
(number of elements and dtype) and the written arrays. Each launch is checked against the contract: devices,
contiguity, alignment to 16 bytes for wide loads, sizes, and the limits of grids. With values, the kernel runs
in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.rehearsal.device import Rehearsal, current

Tensor = torch.Tensor

MOST_X, MOST_YZ = (1 << 31) - 1, (1 << 16) - 1
"""Maximum number of programs along each dimension of a grid."""
ALIGNED = 16
"""Bytes of a wide load."""
MOST_ELEMENTS = 1 << 20
"""Maximum number of elements of a tile in Triton."""


class BadLaunch(AssertionError):
    """The arguments of a launch violate the contract of the kernel."""


class Given:
    """The arguments of one launch, by name."""

    def __init__(self, kernel: str, values: dict[str, Any], grid: tuple[int, ...]) -> None:
        self.kernel, self.values, self.grid = kernel, values, grid

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def need(self, holds: bool, what: str) -> None:
        """Raise ``BadLaunch`` with ``what`` unless ``holds``."""
        if not holds:
            raise BadLaunch(f"{self.kernel}: {what}")

    def array(self, name: str, count: int, *dtypes: torch.dtype, exact: bool = True) -> None:
        """Check that ``name`` is contiguous, aligned, of an allowed dtype, and has ``count`` elements.

        With ``exact=False`` more elements are allowed.
        """
        tensor = self.values[name]
        self.need(
            tensor.is_contiguous(), f"{name} is not contiguous: {tuple(tensor.shape)}, {tensor.stride()}"
        )
        self.reach(name, count, *dtypes, exact=exact)

    def reach(
        self, name: str, count: int, *dtypes: torch.dtype, exact: bool = False, aligned: bool = True
    ) -> None:
        """Check that the storage of ``name`` has ``count`` elements from the start of the tensor on."""
        tensor = self.values[name]
        self.need(not dtypes or tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not one of {dtypes}")
        if exact:
            self.need(tensor.numel() == count, f"{name} has {tensor.numel()} elements, not {count}")
        there = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
        self.need(there >= count, f"{name} has {there} elements, and {count} are read")
        if aligned and count:
            offset = tensor.storage_offset() * tensor.itemsize
            self.need(offset % ALIGNED == 0, f"{name} begins {offset} bytes into its memory: not aligned")

    def powers(self, *names: str) -> None:
        for name in names:
            size = self.values[name]
            self.need(size > 0 and size & (size - 1) == 0, f"{name} = {size} is no power of two")


WIDE = (torch.float32,)
HALF = (torch.bfloat16, torch.float16, torch.float32)


def _attend(given: Given) -> None:
    q, cache, offsets = given.q_ptr, given.cache_ptr, given.offsets_ptr
    tokens, rows = q.shape[0], offsets.numel() - 1
    blocks = cache.shape[0]
    lines = given.HEADS * given.DIM
    given.powers("DIM_P2", "TILE_M", "TILE_N")
    given.need(given.DIM <= given.DIM_P2, "DIM_P2 holds no head")
    given.need(given.HEADS % given.KV_HEADS == 0, "heads do not share KV heads evenly")
    given.need(given.TILE_M * given.DIM_P2 <= MOST_ELEMENTS, "a tile is too large")
    given.array("q_ptr", tokens * lines, *HALF)
    entries = blocks * 2 * given.KV_HEADS * given.BLOCK
    given.array("cache_ptr", entries * given.DIM, torch.uint8 if given.FP8 else q.dtype)
    if given.FP8:
        given.array("cache_scales_ptr", entries, *WIDE)
    _rows(given, rows)
    given.need(given.grid[1] == given.KV_HEADS, "one program a KV head")
    _outputs(given, q, tokens, lines)
    if given.MERGES:
        given.powers("GROUP_P2")
        given.need(given.SPLIT, "one piece is merged with nothing")
        given.need(given.out_ptr.shape[0] == given.grid[0], "a tile of several queries")
        given.need(given.GROUP_P2 * given.KV_HEADS >= given.HEADS, "heads that nobody merges")
        given.array("merged_ptr", tokens * lines, q.dtype)
        given.array("counters_ptr", given.grid[0] * given.KV_HEADS, torch.int32, exact=False)
    if given.SINKS:
        given.array("sinks_ptr", given.HEADS, q.dtype, torch.float32)


def _attend_latent(given: Given) -> None:
    q, cache, offsets = given.q_ptr, given.cache_ptr, given.offsets_ptr
    tokens, rows = q.shape[0], offsets.numel() - 1
    given.powers("LORA_P2", "ROPE_P2", "TILE_M", "TILE_N")
    given.need(given.TILE_M * given.LORA_P2 <= MOST_ELEMENTS, "a tile is too large")
    given.array("q_ptr", tokens * given.HEADS * given.LORA, *HALF)
    turned = (tokens - 1) * given.turned_stride + given.HEADS * given.LINE
    given.need(given.ROPE <= given.LINE and given.ROPE % 2 == 0, "no rotated part of a query")
    given.reach("turned_ptr", turned, q.dtype, aligned=False)
    for name in ("cos_ptr", "sin_ptr"):
        given.reach(name, tokens * given.ROPE // 2, *WIDE, aligned=False)
    _latent_caches(given, cache.shape[0] * given.BLOCK, q.dtype)
    _rows(given, rows)
    given.need(given.grid[1] * given.GROUP == given.HEADS, "every part of the heads has a program")
    _outputs(given, q, tokens, given.HEADS * given.LORA)


def _latent_caches(given: Given, lines: int, dtype: torch.dtype) -> None:
    """Check the caches of latent attention, of ``lines`` entries. ``dtype``: of the model."""
    given.array("cache_ptr", lines * given.WIDTH, torch.uint8 if given.FP8 else dtype)
    used = given.LORA if given.FP8 else given.LORA + given.ROPE
    given.need(used <= given.WIDTH, "a line is shorter than its entry")
    behind = given.values.get("KEYS_WIDTH", given.ROPE)  # dense attention has no elements behind its keys
    given.need(behind >= given.ROPE, "a line is shorter than its key")
    given.array("keys_ptr", lines * (behind if given.FP8 else given.WIDTH), dtype)
    if given.FP8:
        given.array("scales_ptr", lines, *WIDE)


def _write_lines(given: Given) -> None:
    lines, width = given.grid[0], given.CODED + given.EXACT
    given.powers("CODED_P2", "STEP")
    given.need(given.CODED <= given.CODED_P2, "elements are left out")
    given.need(given.lines_ptr.stride() == (given.stride, 1), "rows of lines lie otherwise")
    given.reach("lines_ptr", (lines - 1) * given.stride + width, *HALF, aligned=False)
    given.reach("rows_ptr", lines, torch.int64, aligned=False)
    places = given.exact_ptr.numel() // given.EXACT
    given.array("exact_ptr", places * given.EXACT, *HALF)
    if given.CODED:
        given.array("codes_ptr", places * given.CODED, torch.uint8)
        given.array("scales_ptr", places, *WIDE)


def _rows_of_lists(given: Given) -> int:
    """Check the row arguments of the kernels of sparse attention. Return the number of rows."""
    rows = given.offsets_ptr.numel() - 1
    given.reach("offsets_ptr", rows + 1, torch.int32, aligned=False)
    given.reach("starts_ptr", rows, torch.int64, aligned=False)
    given.reach("tiles_ptr", given.grid[0], torch.int64, aligned=False)
    return rows


def _table(given: Given, name: str, stride: int, rows: int) -> None:
    table = given.values[name]
    given.need(table.dim() == 2 and table.stride() == (stride, 1), f"{name}: rows lie otherwise")
    given.reach(name, (rows - 1) * stride + table.shape[1], torch.int64, aligned=False)


def _index_scores(given: Given) -> None:
    q, cache, scores = given.q_ptr, given.cache_ptr, given.scores_ptr
    rows, tokens = _rows_of_lists(given), q.shape[0]
    given.powers("HEADS_P2", "HALF_P2", "REST_P2", "TILE_N")
    given.need(given.HEADS <= given.HEADS_P2 and given.HALF <= given.HALF_P2, "elements are left out")
    given.need(0 <= given.DIM - 2 * given.HALF <= given.REST_P2, "elements of a key are left out")
    given.need(given.DIM <= given.WIDTH, "a key is longer than its line")
    given.reach("q_ptr", (tokens - 1) * given.q_stride + given.HEADS * given.DIM, *HALF, aligned=False)
    weights = (tokens - 1) * given.weights_stride + given.HEADS
    given.reach("weights_ptr", weights, torch.float32, q.dtype, aligned=False)
    for name in ("cos_ptr", "sin_ptr") if given.HALF else ():
        given.reach(name, tokens * given.HALF, *WIDE, aligned=False)
    given.array("cache_ptr", cache.shape[0] * given.PER_BLOCK * given.WIDTH, q.dtype)
    _table(given, "table_ptr", given.table_stride, rows)
    given.need(scores.stride() == (given.scores_stride, 1), "rows of scores lie otherwise")
    given.array("scores_ptr", scores.numel(), torch.float32)
    given.need(given.table_ptr.shape[1] * given.PER_BLOCK >= scores.shape[1] - 3, "groups without a block")
    given.need(given.token_base + scores.shape[0] <= tokens, "scores of tokens that are not there")
    given.need(given.grid[0] * given.QUERIES >= scores.shape[0], "tokens without a tile")


def _head_product(given: Given) -> None:
    given.powers("TILE_M", "TILE_N", "TILE_K")
    x, out, matrices = given.x_ptr, given.out_ptr, given.matrices_ptr
    given.need(given.grid[0] * given.TILE_M >= given.rows, "rows without a program")
    given.need(given.grid[1] == x.shape[1] == out.shape[1] == matrices.shape[0], "heads without a program")
    given.need(given.grid[2] * given.TILE_N >= given.N, "columns without a program")
    given.need(x.shape == (given.rows, given.grid[1], given.K), "queries of another size")
    given.need(matrices.shape[1:] == (given.N, given.K), "matrices of another size")
    given.need(x.stride() == (given.x_token, given.x_head, 1), "rows of x lie otherwise")
    given.need(matrices.stride() == (given.m_head, given.m_out, given.m_in), "matrices lie otherwise")
    given.need(out.stride() == (given.out_token, given.out_head, 1), "rows of out lie otherwise")
    given.need(x.dtype == out.dtype == matrices.dtype, "several dtypes")


def _streams(given: Given) -> int:
    """Check the arguments that both kernels of hyper-connections share. Return the number of tokens."""
    tokens, lines = given.grid[0], given.N * given.HIDDEN
    given.powers("N_P2", "COLUMNS")
    given.need(given.N <= given.N_P2, "streams are left out")
    given.need(given.grid[1] * given.COLUMNS >= given.HIDDEN, "columns without a program")
    given.array("x_ptr", tokens * lines, *HALF)
    given.array("out_ptr", tokens * given.N, *WIDE)
    given.array("mix_ptr", tokens * given.N**2, *WIDE)
    return tokens


def _mix_streams(given: Given) -> None:
    tokens, weights = _streams(given), (2 + given.N) * given.N
    given.array("mixed_ptr", tokens * weights, *WIDE)
    given.array("base_ptr", weights, *WIDE)
    given.array("scale_ptr", 3, *WIDE)
    given.array("one_ptr", tokens * given.HIDDEN, given.x_ptr.dtype)


def _add_streams(given: Given) -> None:
    tokens = _streams(given)
    given.array("made_ptr", tokens * given.HIDDEN, *HALF)
    given.array("to_ptr", given.x_ptr.numel(), given.x_ptr.dtype)


def _rotate_neighbours(given: Given) -> None:
    given.powers("HEADS_P2", "HALF_P2")
    x, tokens, rotated = given.x_ptr, given.grid[0], 2 * given.HALF
    given.need(given.grid[1] * given.HEADS_P2 >= given.HEADS, "heads without a program")
    given.need(given.HALF <= given.HALF_P2, "pairs are left out")
    given.need(x.shape == (tokens, given.HEADS, given.FIRST + rotated), "heads of another size")
    given.need(x.stride() == (given.token_stride, given.head_stride, 1), "heads lie otherwise")
    for name in ("cos_ptr", "sin_ptr"):
        given.array(name, tokens * given.HALF, *WIDE)


def _round_rows(given: Given) -> None:
    rows, x = given.grid[0], given.x_ptr
    given.powers("K_P2")
    given.need(given.K <= given.K_P2, "elements are left out")
    given.need(x.stride() == (given.x_stride, 1), "rows of x lie otherwise")
    given.reach("x_ptr", (rows - 1) * given.x_stride + given.K, *HALF, aligned=False)
    given.array("values_ptr", rows * given.K, torch.float8_e4m3fn)
    given.array("scales_ptr", rows, *WIDE)


def _choose(given: Given) -> None:
    scores, tokens = given.scores_ptr, given.chosen_ptr.shape[0]
    _rows_of_lists(given)
    given.powers("STEP")
    given.need(given.STEP < 1 << 15, "two counts of a step share 32 bits")
    given.array("chosen_ptr", tokens * given.TOP, torch.int64)
    given.need(scores.stride() == (given.scores_stride, 1), "rows of scores lie otherwise")
    given.array("scores_ptr", scores.numel(), torch.float32)
    given.need(given.grid == (scores.shape[0],), "every token with scores has a program")
    given.need(given.token_base + scores.shape[0] <= tokens, "a choice of tokens that are not there")


def _attend_lines(given: Given) -> None:
    q, rows = given.q_ptr, _rows_of_lists(given)
    tokens, dim = q.shape[0], given.VALUES + given.REST
    given.powers("VALUES_P2", "REST_P2", "TILE_M", "TILE_N")
    given.need(given.VALUES <= given.VALUES_P2 and given.REST <= given.REST_P2, "elements are left out")
    given.need(given.grid[1] * given.GROUP == given.HEADS, "every part of the heads has a program")
    given.need(given.GROUP <= given.TILE_M, "heads of a part are left out")
    given.need(bool(given.WINDOW or given.RATIO), "no entries and no groups")
    given.array("q_ptr", tokens * given.HEADS * (given.VALUES if given.TURNS else dim), *HALF)
    if given.TURNS:
        given.need(given.REST <= given.LINE and given.REST % 2 == 0, "no rotated part of a query")
        last = (tokens - 1) * given.turning_stride
        given.reach("turning_ptr", last + given.HEADS * given.LINE, q.dtype, aligned=False)
        for name in ("cos_ptr", "sin_ptr"):
            given.reach(name, tokens * given.REST // 2, *WIDE, aligned=False)
    for used, name in ((given.WINDOW, "entries"), (given.RATIO, "groups")):
        if used:
            width, coded = (given.values[f"{name.upper()}_{part}"] for part in ("WIDTH", "CODED"))
            given.need(coded <= given.VALUES, f"codes behind the values of the {name}")
            given.need(dim <= width + coded, f"a key is longer than a line of the {name}")
            lines = given.values[f"{name}_ptr"].shape[0] * given.values[f"{name.upper()}_BLOCK"]
            given.array(f"{name}_ptr", lines * width, q.dtype)
            if coded:
                given.array(f"{name}_codes_ptr", lines * coded, torch.uint8)
                given.array(f"{name}_scales_ptr", lines, *WIDE)
            _table(given, f"{name}_table_ptr", given.values[f"{name}_stride"], rows)
    if given.CHOSEN:
        given.need(given.RATIO > 0, "a choice without groups")
        given.array("chosen_ptr", tokens * given.TOP, torch.int64)
    if given.SINKS:
        given.array("sinks_ptr", given.HEADS)
    _outputs(given, q, tokens, given.HEADS * given.VALUES)


def _latent_rope_cache(given: Given) -> None:
    tokens, width = given.grid[0], given.LORA + given.ROPE
    given.powers("FIRST_P2", "LORA_P2", "ROPE_P2")
    for name in ("FIRST", "LORA", "ROPE"):
        given.need(given.values[name] <= given.values[f"{name}_P2"], f"{name} is larger than the program")
    given.need(given.grid[1] == 1 + given.Q_NORM + given.INDEX, "every part of a row has a program")
    joined = given.joined_ptr
    given.need(joined.stride(1) == 1 and joined.stride(0) == given.joined_stride, "rows lie otherwise")
    given.reach("joined_ptr", (tokens - 1) * given.joined_stride + given.FIRST + width, *HALF, aligned=False)
    given.array("weight_ptr", given.LORA)
    for name in ("cos_ptr", "sin_ptr"):
        given.array(name, tokens * given.ROPE // 2, *WIDE)
    given.need(given.cache_ptr.numel() % given.WIDTH == 0, "lines of the cache are of another size")
    _latent_caches(given, given.cache_ptr.numel() // given.WIDTH, joined.dtype)
    given.reach("writes_ptr", tokens, torch.int64, aligned=False)
    if given.Q_NORM:
        given.array("q_weight_ptr", given.FIRST)
        given.array("q_ptr", tokens * given.FIRST, joined.dtype)
    if given.INDEX:
        given.powers("DIM_P2")
        given.need(given.ROPE <= given.DIM <= given.DIM_P2, "elements of a key are left out")
        before = given.ROPE if given.FP8 else width
        given.need(before + given.DIM <= given.KEYS_WIDTH, "a line has no place for the key of the indexer")
        last = (tokens - 1) * given.index_stride
        given.reach("index_ptr", last + given.DIM, joined.dtype, aligned=False)
        for name in ("index_norm_ptr", "index_bias_ptr"):
            given.array(name, given.DIM)


def _rows(given: Given, rows: int) -> None:
    """Check the row arguments of both attention kernels."""
    given.reach("offsets_ptr", rows + 1, torch.int32, aligned=False)
    given.reach("starts_ptr", rows, torch.int64, aligned=False)
    table = given.table_ptr
    given.need(table.dim() == 2 and table.stride(1) == 1, "rows of a table are contiguous")
    given.need(table.stride(0) == given.table_stride, "the stride of the table is another")
    given.reach("table_ptr", (rows - 1) * given.table_stride + table.shape[1], torch.int64, aligned=False)
    given.reach("tiles_ptr", given.grid[0], torch.int64, aligned=False)


def _outputs(given: Given, q: Tensor, tokens: int, line: int) -> None:
    if not given.SPLIT:
        given.array("out_ptr", tokens * line, q.dtype)
        given.need(given.grid[2] == 1, "one piece has one split")
        return
    given.need(given.split % given.TILE_N == 0, "a split is whole steps")
    given.need(given.grid[2] == given.splits, "every split has a program")
    of = given.out_ptr.shape[0]
    given.array("out_ptr", of * line * given.splits, *WIDE)
    given.array("lse_ptr", of * given.HEADS * given.splits, *WIDE)
    given.need(given.token_base + of <= tokens, "states of tokens that are not there")


def _meet(given: Given) -> None:
    x, out, count, parts = given.x_ptr, given.out_ptr, given.count, given.PARTS
    made = count if given.ADD else count * given.SIZE
    for name, tensor, elements in (("x_ptr", x, parts * count), ("out_ptr", out, made)):
        given.need(tensor.is_contiguous() and tensor.numel() == elements, f"{name} has another size")
        given.reach(name, elements, x.dtype, aligned=False)
    given.array("table_ptr", 2 + given.SIZE, torch.int64)
    given.powers("BLOCK")
    given.need(parts in (1, given.SIZE) and given.rank < given.SIZE <= given.MOST_RANKS, "wrong ranks")
    given.need(given.share % given.BLOCK == 0 and given.share * x.itemsize % ALIGNED == 0, "odd rooms")
    given.need(given.share * parts * x.itemsize <= given.ROOM, "a room is too small")
    programs = given.grid[0]
    given.need(programs <= given.PROGRAMS and programs * given.share >= count, "a share has no program")
    given.need(str(given.WIDE) == "fp64" or x.dtype != torch.float64, "a sum loses bits")


def _merge(given: Given) -> None:
    tokens = given.part_ptr.shape[0]
    states = tokens * given.HEADS * given.splits
    given.powers("DIM_P2", "MERGED")
    given.array("part_ptr", states * given.DIM, *WIDE)
    given.array("lse_ptr", states, *WIDE)
    given.reach("out_ptr", (given.token_base + tokens) * given.HEADS * given.DIM, *HALF)
    given.need(given.out_ptr.is_contiguous(), "out is not contiguous")
    if given.LSE:
        given.array("out_lse_ptr", tokens * given.HEADS, *WIDE)
    if given.SINKS:
        given.array("sinks_ptr", given.HEADS)


def _add_rms_norm(given: Given) -> None:
    rows, size = given.grid[0], given.N
    given.powers("N_P2")
    given.need(size <= given.N_P2, "a row is longer than the program")
    x = given.x_ptr
    given.need(x.stride(1) == 1 and x.stride(0) == given.x_stride, "rows lie otherwise")
    # A part of a wider row may begin at any address.
    given.reach("x_ptr", (rows - 1) * given.x_stride + size, *HALF, aligned=False)
    given.array("weight_ptr", size)
    given.array("normed_ptr", rows * size, x.dtype)
    if given.ADD:
        given.array("delta_ptr", rows * size * max(given.TOP_K, 1), x.dtype)
        given.array("stream_ptr", rows * size, x.dtype)
    if given.TOP_K:
        given.need(given.ADD, "terms that nobody adds")
        given.array("scales_ptr", rows * given.TOP_K, *WIDE)
        if given.SHARED:
            given.array("shared_ptr", rows * size, x.dtype)
        if given.SHARE:
            given.array("share_ptr", rows, *WIDE)


def _qkv_rope_cache(given: Given) -> None:
    tokens, heads = given.grid[0], given.HEADS + 2 * given.KV_HEADS
    given.powers("HALF_P2", "REST_P2", "AT_ONCE")
    given.need(given.grid[1] * given.AT_ONCE >= heads, "heads without a program")
    qkv = given.qkv_ptr
    given.need(qkv.stride(1) == 1 and qkv.stride(0) == given.qkv_stride, "rows lie otherwise")
    given.reach("qkv_ptr", (tokens - 1) * given.qkv_stride + heads * given.DIM, *HALF, aligned=False)
    dtype = given.qkv_ptr.dtype
    for name in ("cos_ptr", "sin_ptr"):
        given.array(name, tokens * given.HALF, *WIDE)
    entries = given.cache_ptr.shape[0] * 2 * given.KV_HEADS * given.BLOCK
    given.array("cache_ptr", entries * given.DIM, torch.uint8 if given.FP8 else dtype)
    if given.FP8:
        given.array("scales_ptr", entries, *WIDE)
    given.reach("writes_ptr", tokens, torch.int64, aligned=False)
    given.array("q_ptr", tokens * given.HEADS * given.DIM, dtype)
    for flag, name in ((given.Q_NORM, "q_weight_ptr"), (given.K_NORM, "k_weight_ptr")):
        if flag:
            given.array(name, given.DIM)


def _gated_silu(given: Given) -> None:
    rows = given.grid[0]
    given.powers("AT_ONCE")
    given.need(given.grid[1] * given.AT_ONCE >= given.N, "columns without a program")
    given.array("gate_up_ptr", rows * 2 * given.N, *HALF)
    given.array("out_ptr", rows * given.N, given.gate_up_ptr.dtype)


def _sigmoid_gate(given: Given) -> None:
    rows = given.grid[0]
    given.powers("AT_ONCE")
    given.need(given.grid[1] * given.AT_ONCE >= given.N, "columns without a program")
    for name in ("x", "gate"):
        stride = given.values[f"{name}_stride"]
        given.need(given.values[f"{name}_ptr"].stride() == (stride, 1), "rows lie otherwise")
        given.reach(f"{name}_ptr", (rows - 1) * stride + given.N, *HALF, aligned=False)
    given.array("out_ptr", rows * given.N, given.x_ptr.dtype)


def _linear(given: Given) -> None:
    given.powers("TILE_M", "TILE_N", "TILE_K")
    x, rows = given.x_ptr, given.rows
    tiles = -(-rows // given.TILE_M) * -(-given.N // given.TILE_N)
    given.need(given.grid[0] == tiles, "every tile has a program")
    given.need(x.stride(1) == 1 and x.stride(0) == given.x_stride, "rows of x lie otherwise")
    given.reach("x_ptr", (rows - 1) * given.x_stride + given.K, *HALF)
    given.array("weight_ptr", given.N * given.K, x.dtype)
    given.array("out_ptr", rows * given.N, x.dtype)
    if given.BIAS:
        given.array("bias_ptr", given.N)


def _grouped(given: Given) -> None:
    rows = given.N * (2 if given.GATED else 1)
    _tiles(given, rows)
    given.need(given.GATHER or not given.GATED, "the activation comes after the first product")
    given.array("weight_ptr", (given.E - given.SHARED) * rows * given.K, given.x_ptr.dtype)
    if given.SHARED:
        given.need(not given.BIAS, "the shared expert has no bias")
        given.array("shared_ptr", rows * given.K, given.x_ptr.dtype)


def _router(given: Given) -> None:
    given.powers("TOKENS", "INPUTS")
    x, columns = given.x_ptr, given.E + given.GATE
    given.need(given.grid[0] == columns, "columns without a program")
    given.need(given.grid[1] * given.TOKENS >= given.rows, "tokens without a program")
    given.need(x.stride(1) == 1 and x.stride(0) == given.x_stride, "rows of x lie otherwise")
    given.reach("x_ptr", (given.rows - 1) * given.x_stride + given.K, *HALF)
    given.array("weight_ptr", given.E * given.K, *WIDE)
    given.array("logits_ptr", given.rows * columns, *WIDE)
    if given.BIAS:
        given.array("bias_ptr", given.E, *WIDE)
    if given.GATE:
        given.array("gate_ptr", given.K, *WIDE)


def _route(given: Given) -> None:
    rows = given.grid[0]
    given.powers("GROUPS_P2", "EACH_P2", "TOP_K_P2")
    given.need(given.GROUPS * given.EACH == given.E, "groups of different sizes")
    given.need(given.GROUPS <= given.GROUPS_P2 and given.EACH <= given.EACH_P2, "experts are left out")
    given.need(given.TOP_K <= given.TOP_K_P2, "choices are left out")
    given.need(given.COLUMNS == given.TOP_K + given.JOINED, "columns without a choice")
    given.reach("logits_ptr", (rows - 1) * given.logits_stride + given.E, *WIDE)
    given.array("ids_ptr", rows * given.COLUMNS, torch.int64)
    given.array("scales_ptr", rows * given.COLUMNS, *WIDE)
    if given.CORRECTION:
        given.array("correction_ptr", given.E, *WIDE)
    if given.GATE:
        given.reach("gate_ptr", (rows - 1) * given.gate_stride + 1, *WIDE, aligned=False)
        if not given.JOINED:
            given.array("share_ptr", rows, *WIDE)


def _cut(given: Given) -> None:
    given.powers("SLOTS", "TILES")
    slots, experts = given.slots, given.E
    given.need(given.grid[0] == experts + 1, "every expert has a program, and one more")
    given.need(given.tiles == slots // given.TILE_M + min(slots, experts), "another number of tiles")
    given.array("ids_ptr", slots, torch.int64)
    for name, count in (("order_ptr", slots), ("expert_ptr", given.tiles), ("row_ptr", given.tiles)):
        given.array(name, count, torch.int64)
    given.array("end_ptr", experts, torch.int64)


def _tiles(given: Given, rows_of_a_matrix: int) -> None:
    """Check the arguments of both expert kernels, except the matrices."""
    given.powers("TILE_M", "TILE_N", "TILE_K")
    x, slots = given.x_ptr, given.order_ptr.numel()
    given.need(given.grid[0] * given.TILE_M >= slots, "slots without a tile")
    given.need(given.grid[1] * given.TILE_N >= given.N, "columns without a program")
    rows = -(-slots // given.TOP_K) if given.GATHER else slots
    given.need(x.stride(-1) == 1, "rows of x are not contiguous")
    given.reach("x_ptr", (rows - 1) * given.x_stride + given.K, *HALF)
    given.array("out_ptr", slots * given.N, x.dtype)
    given.reach("order_ptr", slots, torch.int64, aligned=False)
    for name, count in (("expert_ptr", given.grid[0]), ("row_ptr", given.grid[0]), ("end_ptr", given.E)):
        given.reach(name, count, torch.int64, aligned=False)
    if given.BIAS:
        given.array("bias_ptr", given.E * rows_of_a_matrix)


def _codes(given: Given, rows: int) -> None:
    """Check the arguments of both kernels of packed weights, for ``rows`` rows."""
    four = given.NUMBERS in ("int4", "e2m1")
    given.need(given.line == (given.K + 1) // 2 if four else given.line == given.K, "rows of other bytes")
    given.array("values_ptr", rows * given.line, torch.uint8)
    sizes = {"float32": torch.float32}
    given.array("scales_ptr", rows * given.groups, sizes.get(given.SCALES, torch.uint8))
    if given.WAY == "row":
        given.need(given.groups == 1, "a row has several scales")
    else:
        given.need(given.groups > (given.K - 1) // given.GROUP, "inputs without a scale")
        long, short = max(given.GROUP, given.TILE_K), min(given.GROUP, given.TILE_K)
        given.need(long % short == 0, "steps do not fit groups")
        given.need((given.GROUP < given.TILE_K) == (given.WAY == "merged"), "scales of several groups")
    given.need(not given.EVEN or given.K % given.TILE_K == 0, "the last step is not whole")
    if given.ZEROS:
        given.array("zeros_ptr", rows * given.groups, torch.uint8)
    if given.FACTORS:
        given.array("factors_ptr", rows, *WIDE)


def _coded(given: Given) -> None:
    given.powers("TILE_M", "TILE_N", "TILE_K")
    x, rows = given.x_ptr, given.rows
    tiles = -(-rows // given.TILE_M) * -(-given.N // given.TILE_N)
    given.need(given.grid[0] == tiles, "every tile has a program")
    given.need(x.stride(1) == 1 and x.stride(0) == given.x_stride, "rows of x lie otherwise")
    given.reach("x_ptr", (rows - 1) * given.x_stride + given.K, *HALF, aligned=False)
    if given.PARTS:
        given.array("out_ptr", given.grid[1] * rows * given.N, *WIDE)
        given.need(given.part % given.TILE_K == 0, "a part is whole steps")
        given.need(given.grid[1] * given.part >= given.K, "inputs without a program")
    else:
        given.need(given.grid[1] == 1, "inputs are one part")
        _rows_of_out(given, x.dtype)
    _codes(given, given.N)
    if given.BIAS:
        given.reach("bias_ptr", given.N, aligned=False)


def _rows_of_out(given: Given, *dtypes: torch.dtype) -> None:
    out = given.out_ptr
    given.need(out.stride(1) == 1 and out.stride(0) == given.out_stride, "rows of out lie otherwise")
    given.reach("out_ptr", (given.rows - 1) * given.out_stride + given.N, *dtypes, aligned=False)


def _add_parts(given: Given) -> None:
    given.powers("TILE")
    given.need(given.grid[0] == given.rows, "every row has a program")
    given.need(given.grid[1] * given.TILE >= given.N, "columns without a program")
    given.array("part_ptr", given.parts * given.rows * given.N, *WIDE)
    _rows_of_out(given, *HALF)
    if given.WAY == "row":
        given.reach("scales_ptr", given.N)
    if given.FACTORS:
        given.array("factors_ptr", given.N, *WIDE)
    if given.BIAS:
        given.reach("bias_ptr", given.N, aligned=False)


def _dequantize(given: Given) -> None:
    given.powers("TILE_N", "TILE_K")
    given.need(given.grid[0] * given.TILE_N >= given.rows, "rows without a program")
    given.need(given.grid[1] * given.TILE_K >= given.K, "inputs without a program")
    given.array("out_ptr", given.rows * given.K, *HALF)
    _codes(given, given.values_ptr.shape[0])


def _matrix_in_words(given: Given, tiles: int) -> None:
    """Check the tensors of a matrix of at least ``tiles`` tiles."""
    four = given.NUMBERS in ("int4", "e2m1")
    pieces = given.values_ptr.shape[0] * given.steps
    given.need(given.values_ptr.shape[0] >= tiles, "tiles without codes")
    given.array("values_ptr", pieces * given.TILE * (16 if four else 32), torch.int32)
    given.array("factors_ptr", given.values_ptr.shape[0] * given.TILE, *WIDE)
    if given.WAY == "sum":
        given.array("scales_ptr", pieces * given.GROUPS * given.TILE, *WIDE)
    elif given.WAY == "merged":
        given.array("scales_ptr", pieces * given.GROUPS // 4 * given.TILE, torch.int32)
    if given.ZEROS:
        given.array("zeros_ptr", pieces * given.TILE, torch.int32)
    given.need(given.steps * 128 >= given.K, "inputs without codes")


def _words(given: Given) -> None:
    given.powers("TILE_M", "TILE_N")
    x, rows = given.x_ptr, given.rows
    given.need(given.TILE_N % given.TILE == 0, "a program takes whole tiles")
    programs = -(-rows // given.TILE_M) * -(-given.N // given.TILE_N)
    given.need(given.grid[0] == programs, "every tile has a program")
    given.need(x.stride(1) == 1 and x.stride(0) == given.x_stride, "rows of x lie otherwise")
    given.reach("x_ptr", (rows - 1) * given.x_stride + given.K, torch.bfloat16, aligned=False)
    given.need(given.grid[1] * given.part >= given.steps, "inputs without a program")
    given.need((given.grid[1] - 1) * given.part < given.steps, "a program without inputs")
    given.need((given.K % 128 == 0) == given.EVEN, "the last step is not whole")
    if given.PARTS:
        given.array("out_ptr", given.grid[1] * rows * given.N, *WIDE)
    else:
        given.need(given.grid[1] == 1, "inputs are one part")
        _rows_of_out(given, x.dtype)
    _matrix_in_words(given, -(-given.N // given.TILE))
    if given.BIAS:
        given.reach("bias_ptr", given.N, aligned=False)


def _add_words(given: Given) -> None:
    given.need(given.grid == (given.rows, -(-given.N // given.COLUMNS)), "every column has a program")
    given.array("part_ptr", given.PARTS * given.rows * given.N, *WIDE)
    given.reach("factors_ptr", given.N, *WIDE)
    _rows_of_out(given, torch.bfloat16)


def _dequantize_words(given: Given) -> None:
    tiles = -(-given.rows // given.TILE)
    given.need(given.grid == (tiles, given.steps), "every step has a program")
    given.array("out_ptr", given.rows * given.K, torch.bfloat16)
    _matrix_in_words(given, given.first + tiles)


def _grouped_codes(given: Given) -> None:
    _tiles(given, given.N)
    _codes(given, given.E * given.N)


def _combine(given: Given) -> None:
    tokens = given.grid[0]
    given.powers("COLUMNS")
    given.need(given.grid[1] * given.COLUMNS >= given.N, "columns without a program")
    given.array("made_ptr", tokens * given.TOP_K * given.N, *HALF)
    given.array("weight_ptr", tokens * given.TOP_K, *WIDE)
    given.array("out_ptr", tokens * given.N, given.made_ptr.dtype)
    if given.SHARED:
        given.array("shared_ptr", tokens * given.N, *HALF)
    if given.SHARE:
        given.array("share_ptr", tokens, *WIDE)


def _delta_states(given: Given) -> None:
    given.powers("K_P2", "TILE")
    _delta_rows(given)
    heads = given.K_HEADS * given.GROUP
    given.need(given.grid[1] == heads, "every head has a program")
    given.need(given.grid[2] * given.TILE >= given.V_DIM, "columns without a program")
    decays = heads * (given.K_DIM if given.BY_CHANNEL else 1)
    _delta_columns(given, "b", heads)
    _delta_columns(given, "a", decays)
    given.array("taps_ptr", given.TAPS * (2 * given.K_HEADS * given.K_DIM + heads * given.V_DIM), *WIDE)
    _copies(given, "state_ptr", "state", heads * given.K_DIM * given.V_DIM, torch.float32)
    given.array("rate_ptr", heads, *WIDE)
    given.array("bias_ptr", decays, *WIDE)


def _delta_outputs(given: Given) -> None:
    given.powers("K_P2", "V_P2", "TAPS_P2")
    _delta_rows(given)
    heads = given.K_HEADS * given.GROUP
    given.need(given.grid[1] == heads + 2 * given.K_HEADS, "every head has a program")
    given.need(given.V_DIM <= given.V_P2, "a head is larger than the program")
    given.need(given.TAPS - 1 <= given.TAPS_P2, "inputs are left out")
    _delta_columns(given, "z", heads * given.V_DIM)
    _delta_columns(given, "out", heads * given.V_DIM)
    given.array("norm_ptr", given.V_DIM, *WIDE)


def _delta_rows(given: Given) -> None:
    """Check the arguments that both kernels of the gated delta net share."""
    given.need(given.K_DIM <= given.K_P2, "a key is larger than the program")
    heads, rows, dtype = given.K_HEADS * given.GROUP, given.grid[0], given.qkv_ptr.dtype
    tokens = given.qkv_ptr.shape[0]
    width = 2 * given.K_HEADS * given.K_DIM + heads * given.V_DIM
    given.reach("qkv_ptr", (tokens - 1) * given.qkv_stride + width, *HALF, aligned=False)
    given.array("o_ptr", tokens * heads * given.V_DIM, *WIDE)
    for name in ("q_ptr", "k_ptr"):
        _copies(given, name, "key", given.K_HEADS * (given.TAPS - 1) * given.K_DIM, dtype)
    _copies(given, "v_ptr", "value", heads * (given.TAPS - 1) * given.V_DIM, dtype)
    _row_columns(given, rows)


def _mamba_states(given: Given) -> None:
    given.powers("STATE_P2", "TILE")
    channels = _mamba_rows(given, given.grid[0])
    given.need(given.STATE <= given.STATE_P2, "a row of a state is larger than the program")
    given.need(given.grid[1] == given.HEADS, "every head has a program")
    given.need(given.grid[2] * given.TILE >= given.DIM, "rows of a state without a program")
    tokens, inner = given.zxbcdt_ptr.shape[0], given.HEADS * given.DIM
    dtypes = (given.zxbcdt_ptr.dtype, torch.float32)
    given.reach("y_ptr", (tokens - 1) * given.y_stride + inner, *dtypes, aligned=False)
    _copies(given, "state_ptr", "state", inner * given.STATE, torch.float32)
    given.array("taps_ptr", given.TAPS * channels, *WIDE)
    if given.BIAS:
        given.array("bias_ptr", channels, *WIDE)
    for name in ("rate_ptr", "step_bias_ptr", "skip_ptr"):
        given.array(name, given.HEADS, *WIDE)


def _mamba_outputs(given: Given) -> None:
    given.powers("TAPS_P2", "BLOCK", "KEPT")
    _mamba_rows(given, given.grid[0] - given.tokens)
    inner, tokens = given.HEADS * given.DIM, given.zxbcdt_ptr.shape[0]
    given.need(given.tokens == (tokens if given.NORMS else 0), "tokens without a norm")
    given.need(given.TAPS - 1 <= given.TAPS_P2, "inputs are left out")
    parts = -(-inner // given.KEPT) + 2 * -(-given.PLACES * given.STATE // given.KEPT)
    given.need(given.grid[1] >= max(given.NORMS, parts), "channels without a program")
    if given.NORMS:
        given.need(inner % given.NORMS == 0, "norm groups of different sizes")
        given.array("y_ptr", tokens * inner, *WIDE)
        given.array("norm_ptr", inner, *WIDE)
        last = (tokens - 1) * given.out_stride
        given.reach("out_ptr", last + inner, given.zxbcdt_ptr.dtype, aligned=False)


def _mamba_rows(given: Given, rows: int) -> int:
    """Check the arguments that both kernels of Mamba2 share. Return the channels of the convolution."""
    given.need(given.HEADS % given.GROUPS == 0, "groups of different sizes")
    given.need(given.PLACES % given.GROUPS == 0, "places of groups of different sizes")
    tokens, dtype = given.zxbcdt_ptr.shape[0], given.zxbcdt_ptr.dtype
    inner, back = given.HEADS * given.DIM, given.TAPS - 1
    channels = inner + 2 * given.GROUPS * given.STATE
    width = inner + channels + given.HEADS
    given.reach("zxbcdt_ptr", (tokens - 1) * given.stride + width, *HALF, aligned=False)
    _copies(given, "x_ptr", "x", back * inner, dtype)
    for name in ("b_ptr", "c_ptr"):
        _copies(given, name, "shared", given.PLACES * back * given.STATE, dtype)
    _row_columns(given, rows)
    return int(channels)


def _mamba1_states(given: Given) -> None:
    given.powers("STATE_P2", "TILE")
    tokens, dtype, channels = given.x_ptr.shape[0], given.x_ptr.dtype, given.HEADS * given.DIM
    given.need(given.STATE <= given.STATE_P2, "a state is larger than the program")
    given.need(given.grid[1] == given.HEADS, "every head has a program")
    given.need(given.grid[2] * given.TILE >= given.DIM, "channels without a program")
    given.reach("x_ptr", (tokens - 1) * given.x_stride + channels, *HALF, aligned=False)
    for name in ("steps", "b", "c", "z", "out"):
        last = (tokens - 1) * given.values[f"{name}_stride"]
        columns = given.STATE if name in ("b", "c") else channels
        given.reach(f"{name}_ptr", last + columns, dtype, aligned=False)
    _copies(given, "state_ptr", "state", channels * given.STATE, torch.float32)
    given.array("rate_ptr", channels * given.STATE, *WIDE)
    for name in ("step_bias_ptr", "skip_ptr"):
        given.array(name, channels, *WIDE)
    _row_columns(given, given.grid[0])


def _short_conv(given: Given) -> None:
    given.powers("TAPS_P2", "SPAN", "BLOCK")
    tokens, dtype, channels = given.inputs_ptr.shape[0], given.inputs_ptr.dtype, given.HEADS * given.DIM
    width = (3 if given.GATED else 1) * channels
    given.need(given.TAPS - 1 <= given.TAPS_P2, "inputs are left out")
    given.need(given.TAPS - 1 <= given.SPAN, "two programs read the inputs of a slot")
    given.need(given.grid[2] == given.HEADS * -(-given.DIM // given.BLOCK), "channels without a program")
    given.reach("inputs_ptr", (tokens - 1) * given.stride + width, *HALF, aligned=False)
    given.reach("out_ptr", (tokens - 1) * given.out_stride + channels, dtype, aligned=False)
    _copies(given, "state_ptr", "state", (given.TAPS - 1) * channels, dtype)
    given.array("taps_ptr", given.TAPS * channels, *WIDE)
    if given.BIAS:
        given.array("bias_ptr", channels, *WIDE)
    _row_columns(given, given.grid[0])


def _row_columns(given: Given, rows: int) -> None:
    """Check the columns of a segment that kernels of recurrent layers read."""
    given.reach("offsets_ptr", rows + 1, torch.int32, aligned=False)
    for name in ("starts_ptr", "slots_ptr", "live_ptr"):
        given.reach(name, rows, torch.int64, aligned=False)


def _delta_columns(given: Given, name: str, columns: int) -> None:
    """Check a matrix with the rows and the dtype of qkv."""
    last = (given.qkv_ptr.shape[0] - 1) * given.values[f"{name}_stride"]
    given.reach(f"{name}_ptr", last + columns, given.qkv_ptr.dtype, aligned=False)


def _copies(given: Given, name: str, stride: str, elements: int, dtype: torch.dtype) -> None:
    """Check a part of a recurrent state: [slots, copies, elements], slots and copies apart."""
    slots, copies = given.values[name].shape[:2]
    slot, copy = given.values[f"{stride}_slot"], given.values[f"{stride}_copy"]
    given.need(copy >= elements and slot >= copies * elements, f"copies of {name} overlap")
    given.reach(name, (slots - 1) * slot + (copies - 1) * copy + elements, dtype)


def _rows_to_draw(given: Given, *programs: int) -> None:
    """Check the arguments that all kernels of a draw have. ``programs``: programs of a row."""
    rows = given.grid[0]
    given.need(given.grid[1:] == programs, f"a grid of {given.grid}")
    given.reach("slots_ptr", rows, torch.int64, aligned=False)
    floats = given.floats_ptr
    given.need(floats.shape[1] == given.WIDTH and floats.is_contiguous(), "a table of other rows")
    given.array("floats_ptr", floats.numel(), torch.float64)
    if given.CAPTURED:
        given.reach("flag_ptr", 1, torch.int64, aligned=False)
    given.array("tops_ptr", rows * given.BLOCKS, *WIDE)


def _logits_to_draw(given: Given) -> None:
    """Check the logits of the kernels that read logits."""
    rows, logits = given.grid[0], given.logits_ptr
    given.powers("BLOCK")
    given.need(given.BLOCKS * given.BLOCK >= given.V, "tokens without a program")
    given.need(logits.stride(1) == 1 and logits.stride(0) == given.stride, "rows of logits lie otherwise")
    given.need(logits.shape[1] >= given.V, "a row is shorter than the vocabulary")
    read = rows if given.CAPTURED else logits.shape[0]
    given.reach("logits_ptr", (read - 1) * given.stride + given.V, *HALF)
    if not given.CAPTURED:
        given.reach("rows_ptr", rows, torch.int64, aligned=False)


def _positions_to_draw(given: Given) -> None:
    """Check the positions of the drawn tokens and the scores of the likeliest tokens."""
    rows = given.grid[0]
    places = given.spare + 1 if given.CAPTURED else rows
    given.reach("positions_ptr", places, torch.int64, aligned=False)
    given.array("reaches_ptr", rows, torch.float64)


def _tops(given: Given) -> None:
    _rows_to_draw(given, given.BLOCKS)
    _logits_to_draw(given)
    blocks = given.grid[0] * given.BLOCKS
    given.array("top_ids_ptr", blocks, torch.int32)
    given.array("masses_ptr", blocks, torch.float64)


def _limit(given: Given) -> None:
    _rows_to_draw(given)
    _logits_to_draw(given)
    rows = given.grid[0]
    given.powers("BLOCKS_P2")
    given.need(given.BLOCKS <= given.BLOCKS_P2, "BLOCKS_P2 holds no row")
    given.array("ints_ptr", given.floats_ptr.numel(), torch.int64)
    given.array("masses_ptr", rows * given.BLOCKS, torch.float64)
    given.array("top_ids_ptr", rows * given.BLOCKS, torch.int32)
    _positions_to_draw(given)
    given.array("cuts_ptr", rows, *WIDE)
    given.array("cut_ids_ptr", rows, torch.int32)


def _score(given: Given) -> None:
    _rows_to_draw(given, given.BLOCKS)
    _logits_to_draw(given)
    rows = given.grid[0]
    given.powers("BLOCKS_P2")
    given.array("ints_ptr", given.floats_ptr.numel(), torch.int64)
    _positions_to_draw(given)
    given.array("winners_ptr", rows * given.BLOCKS, torch.int32)
    given.array("scores_ptr", rows * given.BLOCKS, torch.float64)
    given.array("cuts_ptr", rows, *WIDE)
    given.array("cut_ids_ptr", rows, torch.int32)


def _finish(given: Given) -> None:
    _rows_to_draw(given)
    rows = given.grid[0]
    given.powers("BLOCKS_P2")
    for name, dtype in (("top_ids_ptr", torch.int32), ("winners_ptr", torch.int32)):
        given.array(name, rows * given.BLOCKS, dtype)
    given.array("scores_ptr", rows * given.BLOCKS, torch.float64)
    given.array("out_ptr", rows, torch.int64)
    if given.CAPTURED:
        slots = given.spare + 1
        given.array("history_ptr", slots * given.length, torch.int32)
        given.array("computed_ptr", slots, torch.int64)
        given.need(given.floats_ptr.shape[0] == given.spare, "the table has a row per slot")
    if given.MOVES:
        given.array("live_ptr", given.spare + 1, torch.int64)


@dataclass(frozen=True)
class Contract:
    """The contract of one kernel."""

    module: str
    check: Callable[[Given], None]
    writes: tuple[str, ...]
    optional: tuple[tuple[str, str], ...] = ()
    """(argument, flag): the argument is only used if the flag is set, and may be anything otherwise."""

    @property
    def name(self) -> str:
        return self.check.__name__


CONTRACTS = (
    Contract(
        "attention",
        _attend,
        ("out_ptr", "lse_ptr", "merged_ptr", "counters_ptr"),
        (
            ("lse_ptr", "SPLIT"),
            ("sinks_ptr", "SINKS"),
            ("cache_scales_ptr", "FP8"),
            ("merged_ptr", "MERGES"),
            ("counters_ptr", "MERGES"),
        ),
    ),
    Contract(
        "attention", _merge, ("out_ptr", "out_lse_ptr"), (("out_lse_ptr", "LSE"), ("sinks_ptr", "SINKS"))
    ),
    Contract(
        "latent",
        _latent_rope_cache,
        ("cache_ptr", "scales_ptr", "keys_ptr", "q_ptr"),
        (
            ("q_weight_ptr", "Q_NORM"),
            ("q_ptr", "Q_NORM"),
            ("scales_ptr", "FP8"),
            *((f"index_{name}ptr", "INDEX") for name in ("", "norm_", "bias_")),
        ),
    ),
    Contract(
        "latent",
        _attend_latent,
        ("out_ptr", "lse_ptr"),
        (("lse_ptr", "SPLIT"), ("scales_ptr", "FP8")),
    ),
    Contract(
        "eight_bits",
        _write_lines,
        ("codes_ptr", "scales_ptr", "exact_ptr"),
        (("codes_ptr", "CODED"), ("scales_ptr", "CODED")),
    ),
    Contract("choice", _index_scores, ("scores_ptr",), (("cos_ptr", "HALF"), ("sin_ptr", "HALF"))),
    Contract("choice", _choose, ("chosen_ptr",)),
    Contract("indexed", _head_product, ("out_ptr",)),
    Contract("streams", _mix_streams, ("one_ptr", "out_ptr", "mix_ptr")),
    Contract("streams", _add_streams, ("to_ptr",)),
    Contract("scaled", _round_rows, ("values_ptr", "scales_ptr")),
    Contract("streams", _rotate_neighbours, ("x_ptr",)),
    Contract(
        "sparse",
        _attend_lines,
        ("out_ptr", "lse_ptr"),
        (
            ("lse_ptr", "SPLIT"),
            *((f"{name}_ptr", "TURNS") for name in ("turning", "cos", "sin")),
            ("entries_ptr", "WINDOW"),
            ("entries_table_ptr", "WINDOW"),
            ("groups_ptr", "RATIO"),
            ("groups_table_ptr", "RATIO"),
            *((f"entries_{name}_ptr", "ENTRIES_CODED") for name in ("codes", "scales")),
            *((f"groups_{name}_ptr", "GROUPS_CODED") for name in ("codes", "scales")),
            ("chosen_ptr", "CHOSEN"),
            ("sinks_ptr", "SINKS"),
        ),
    ),
    Contract(
        "fused",
        _add_rms_norm,
        ("stream_ptr", "normed_ptr"),
        (
            ("delta_ptr", "ADD"),
            ("stream_ptr", "ADD"),
            ("scales_ptr", "TOP_K"),
            ("shared_ptr", "SHARED"),
            ("share_ptr", "SHARE"),
        ),
    ),
    Contract(
        "fused",
        _qkv_rope_cache,
        ("q_ptr", "cache_ptr", "scales_ptr"),
        (("q_weight_ptr", "Q_NORM"), ("k_weight_ptr", "K_NORM"), ("scales_ptr", "FP8")),
    ),
    Contract("fused", _gated_silu, ("out_ptr",)),
    Contract("fused", _sigmoid_gate, ("out_ptr",)),
    Contract("matmul", _linear, ("out_ptr",), (("bias_ptr", "BIAS"),)),
    Contract(
        "coded",
        _coded,
        ("out_ptr",),
        (("bias_ptr", "BIAS"), ("zeros_ptr", "ZEROS"), ("factors_ptr", "FACTORS")),
    ),
    Contract("coded", _add_parts, ("out_ptr",), (("bias_ptr", "BIAS"), ("factors_ptr", "FACTORS"))),
    Contract("coded", _dequantize, ("out_ptr",), (("zeros_ptr", "ZEROS"), ("factors_ptr", "FACTORS"))),
    Contract("words", _words, ("out_ptr",), (("bias_ptr", "BIAS"), ("zeros_ptr", "ZEROS"))),
    Contract("words", _add_words, ("out_ptr",), (("bias_ptr", "BIAS"),)),
    Contract("peers", _meet, ("out_ptr",)),
    Contract("words", _dequantize_words, ("out_ptr",), (("zeros_ptr", "ZEROS"),)),
    Contract("moe", _grouped, ("out_ptr",), (("bias_ptr", "BIAS"), ("shared_ptr", "SHARED"))),
    Contract("routing", _router, ("logits_ptr",), (("bias_ptr", "BIAS"), ("gate_ptr", "GATE"))),
    Contract(
        "routing",
        _route,
        ("ids_ptr", "scales_ptr", "share_ptr"),
        (("correction_ptr", "CORRECTION"), ("gate_ptr", "GATE"), ("share_ptr", "GATE")),
    ),
    Contract("delta", _delta_states, ("o_ptr", "state_ptr")),
    Contract("delta", _delta_outputs, ("out_ptr", "q_ptr", "k_ptr", "v_ptr")),
    Contract("mamba", _mamba_states, ("y_ptr", "state_ptr"), (("bias_ptr", "BIAS"),)),
    Contract(
        "mamba",
        _mamba_outputs,
        ("out_ptr", "x_ptr", "b_ptr", "c_ptr"),
        (("y_ptr", "NORMS"), ("norm_ptr", "NORMS"), ("out_ptr", "NORMS")),
    ),
    Contract("mamba", _mamba1_states, ("out_ptr", "state_ptr")),
    Contract("causal", _short_conv, ("out_ptr", "state_ptr"), (("bias_ptr", "BIAS"),)),
    Contract("routing", _cut, ("order_ptr", "expert_ptr", "row_ptr", "end_ptr")),
    Contract(
        "moe",
        _grouped_codes,
        ("out_ptr",),
        (("bias_ptr", "BIAS"), ("zeros_ptr", "ZEROS"), ("factors_ptr", "FACTORS")),
    ),
    Contract("moe", _combine, ("out_ptr",), (("shared_ptr", "SHARED"), ("share_ptr", "SHARE"))),
    Contract("draw", _tops, ("tops_ptr", "top_ids_ptr", "masses_ptr"), (("flag_ptr", "CAPTURED"),)),
    Contract("draw", _limit, ("reaches_ptr", "cuts_ptr", "cut_ids_ptr"), (("flag_ptr", "CAPTURED"),)),
    Contract("draw", _score, ("scores_ptr", "winners_ptr"), (("flag_ptr", "CAPTURED"),)),
    Contract(
        "draw",
        _finish,
        ("out_ptr", "history_ptr", "computed_ptr", "live_ptr"),
        (
            ("flag_ptr", "CAPTURED"),
            ("history_ptr", "CAPTURED"),
            ("computed_ptr", "CAPTURED"),
            ("live_ptr", "MOVES"),
        ),
    ),
)


class StandIn:
    """The stand-in of one kernel."""

    def __init__(self, kernel: Any, contract: Contract) -> None:
        self._kernel, self._contract = kernel, contract
        self._signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        name, made = self._contract.name, current()
        options = {option: named.pop(option) for option in ("num_warps", "num_stages") if option in named}
        bound = self._signature.bind(*args, **named).arguments
        given = Given(name, dict(bound), grid)
        given.need(all(size > 0 for size in grid), f"a grid of {grid}")
        given.need(grid[0] <= MOST_X, f"{grid[0]} programs along x")
        given.need(all(size <= MOST_YZ for size in grid[1:]), f"a grid of {grid}: y and z end at {MOST_YZ}")
        for argument, value in bound.items():
            if isinstance(value, Tensor):
                given.need(isinstance(value, FakeTensor), f"{argument} is on the host")
        self._contract.check(given)
        unused = {argument for argument, flag in self._contract.optional if not bound[flag]}
        tensors = {a: v for a, v in bound.items() if isinstance(v, Tensor) and a not in unused}
        writes = [value for argument, value in tensors.items() if argument in self._contract.writes]
        reads = [value for argument, value in tensors.items() if argument not in self._contract.writes]
        made.operators.add(name)
        made.use(name, reads, writes)
        self._remember(made, bound, options)
        if made.values:
            self._compute(made, grid, bound, writes, options)

    def _remember(self, made: Rehearsal, bound: dict[str, Any], options: dict[str, int]) -> None:
        """Record the compiled form that the launch needs, by the rules of Triton."""
        options_of = getattr(
            self._kernel, "kwargs", vars(self._kernel)
        )  # the interpreter's, or the compiler's
        fixed = options_of.get("do_not_specialize") or ()
        key: list[Any] = [tuple(options.items())]
        for argument, value in bound.items():
            if isinstance(value, Tensor):
                key.append((value.dtype, value.storage_offset() * value.itemsize % ALIGNED == 0))
            elif argument.isupper():
                key.append(value)
            elif isinstance(value, int) and argument not in fixed:
                key.append((value == 1, value % ALIGNED == 0))
        made.variants.setdefault(self._contract.name, set()).add(tuple(key))

    def _compute(
        self,
        made: Rehearsal,
        grid: tuple[int, ...],
        bound: dict[str, Any],
        writes: list[Tensor],
        options: Any,
    ) -> None:
        values = {a: made.values_of(v) if isinstance(v, Tensor) else v for a, v in bound.items()}
        if made.capture is not None:
            for tensor in writes:
                made.save(tensor)
            made.capture.calls.append(functools.partial(_run, self._kernel, grid, values, options))
        _run(self._kernel, grid, values, options)


def _run(kernel: Any, grid: tuple[int, ...], values: dict[str, Any], options: dict[str, int]) -> None:
    kernel[grid](**values, **options)


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace every kernel of ``weft.ops.triton``. Skip the test if Triton is not installed."""
    pytest.importorskip("triton")
    # Packing in words compares products on the device; ``test_packed.py`` has one engine with words.
    patch.setattr("weft.ops.triton.takes_words", lambda: False)
    for contract in CONTRACTS:
        module = importlib.import_module(f"weft.ops.triton.{contract.module}")
        patch.setattr(module, contract.name, StandIn(getattr(module, contract.name), contract))
