"""Sparse attention, choice of groups, and entries of groups, each against a plain reference."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention.sparse_scene import SMALL, Scene, segment_of
from tests.support.specs import model_spec
from weft.attention.base import StepInput
from weft.attention.registry import choose
from weft.attention.sparse import sparse_torch
from weft.attention.sparse.compress import Compressor, completed_groups, groups_by_token
from weft.attention.sparse.sparse_torch import TorchSparse
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, RopeSpec
from weft.layers.build import Build
from weft.layers.rope import Rope

Tensor = torch.Tensor
CPU = torch.device("cpu")
EXACT = {"rtol": 1e-12, "atol": 1e-12}
HEADS, DIM, INDEX_HEADS, INDEX_DIM = SMALL


ROWS = [
    [(0, 1)],
    [(0, 23)],
    [(7, 1), (0, 1), (29, 1), (3, 1)],
    [(5, 9), (0, 4), (41, 1), (8, 4), (2, 2), (30, 6)],
]


@pytest.mark.requirement("B14")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("ratio", "top"), [(0, 0), (4, 0), (4, 2), (3, 1), (1, 6), (16, 1)])
@pytest.mark.parametrize("window", [1, 5, 100])
def test_equals_attention_written_out(rows: list[tuple[int, int]], window: int, ratio: int, top: int) -> None:
    scene = Scene(rows, window=window, ratio=ratio, top=top)
    assert torch.allclose(scene.run(), scene.expected(), **EXACT)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("top", [0, 3])
def test_groups_without_a_window(rows: list[tuple[int, int]], top: int) -> None:
    """Groups are single positions, and a token chooses among the groups. Values are shorter than keys."""
    scene = Scene(rows, window=0, ratio=1, top=top, values=4, sinks=False)
    assert torch.allclose(scene.run(), scene.expected(), **EXACT)


def test_who_sees_nothing_gets_zeros() -> None:
    scene = Scene([(0, 5)], window=0, ratio=4, sinks=False)
    assert torch.equal(scene.run()[:3], torch.zeros(3, HEADS, DIM, dtype=torch.float64))
    assert torch.isfinite(scene.run()).all()


@pytest.mark.parametrize("top", [0, 2])
def test_small_limits_give_the_same(top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ROWS[-1]
    together = Scene(rows, top=top).run()
    for name, value in (("TILE", 3), ("SCORES", 40), ("GATHER", 1)):
        monkeypatch.setattr(sparse_torch, name, value)
        assert torch.allclose(Scene(rows, top=top).run(), together, **EXACT)


@pytest.mark.parametrize("top", [0, 2])
def test_upper_bounds_of_the_context_do_not_show(top: int) -> None:
    scene = Scene([(6, 1), (9, 1), (3, 5), (21, 2)], top=top, bound=13)
    assert torch.allclose(scene.run(), scene.expected(), **EXACT)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_narrow_types(dtype: torch.dtype, tolerance: float) -> None:
    scene = Scene([(30, 5), (0, 12), (55, 1)], dtype=dtype)
    made = scene.run()
    assert made.dtype == dtype
    assert (made.double() - scene.expected()).abs().max() < tolerance


def test_no_rows() -> None:
    assert Scene([], top=2).run().shape == (0, HEADS, DIM)


# --- the choice of groups ---


def test_chosen_groups_and_padding() -> None:
    scene = Scene([(0, 30), (33, 2)], top=3)
    selected = scene.select()
    assert selected is not None
    for token, (row, p) in enumerate(scene.tokens()):
        ids = selected[token].tolist()
        assert sorted(i for i in ids if i >= 0) == scene.chosen(token, row, p)
        assert ids.count(-1) == max(0, 3 - (p + 1) // 4)


def test_nobody_chooses_where_all_fit() -> None:
    assert Scene([(0, 12), (10, 3)], top=3).select() is None


@pytest.mark.parametrize("limit", [1 << 22, 8])
def test_ties_go_to_the_lowest_group(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal keys have equal scores: the first groups win, for any cut of rows and zeros of any sign."""
    monkeypatch.setattr(sparse_torch, "SCORES", limit)
    scene = Scene([(0, 41), (64, 1)], top=3)
    keys = scene.caches[1][0][..., DIM:]
    keys[:] = torch.where(keys.isnan(), keys, keys.new_full((), 0.5))
    selected = scene.select()
    assert selected is not None
    assert sorted(selected[40].tolist()) == [0, 1, 2]
    assert sorted(selected[41].tolist()) == [0, 1, 2]
    scene.index_q[:] = -scene.index_q.abs()  # no product is positive: all scores are 0 or -0
    scene.weights[:, ::2] *= -1
    selected = scene.select()
    assert selected is not None
    assert sorted(selected[41].tolist()) == [0, 1, 2]
    assert sorted(selected[6].tolist()) == [-1, -1, 0]


# --- groups' entries ---


class Groups:
    """Sources of one row, written in steps, and the resulting groups.

    The C++ operations run in ``dtype``, except for float64.
    """

    def __init__(
        self, dims: tuple[int, ...], ratio: int, overlap: int, total: int, dtype: torch.dtype = torch.float64
    ) -> None:
        torch.manual_seed(1)
        self.by_token = dtype != torch.float64
        build = Build(dtype=dtype, device=CPU)
        self.compressor = Compressor(dims, ratio, overlap, 1e-6, build)
        for weight in self.compressor.parameters():
            weight.data.normal_()
        self.compressor.pack()
        self.rope = Rope(RopeSpec(dim=4, theta=100.0), build)
        self.dims, self.ratio, self.overlap, self.block = dims, ratio, overlap, 5
        self.entries = torch.randn(total, overlap * 2 * sum(dims), dtype=torch.float64).to(dtype)
        self.per_block = 2
        tables = []
        for size in (self.block, ratio * self.per_block):
            columns = -(-total // size)
            tables.append(torch.tensor([random.Random(2).sample(range(1, columns + 1), columns)]))
        self.tables = tuple(tables)
        self.sources = torch.full(
            (1 + tables[0].numel(), self.block, self.entries.shape[1]), torch.nan, dtype=dtype
        )
        self.groups = torch.full((1 + tables[1].numel(), self.per_block, sum(dims)), torch.nan, dtype=dtype)

    def step(
        self, start: int, entries: Tensor, bound: int = 0, tables: tuple[Tensor, ...] | None = None
    ) -> None:
        """Compute positions ``start`` .. with these source entries. ``tables``: the tables to read with."""
        count = len(entries)
        segment = segment_of([(start, count)], tables or self.tables, bound)
        positions = torch.arange(start, start + count)
        writes = []
        for table, size in zip(self.tables, (self.block, self.ratio * self.per_block), strict=True):
            writes.append(table[0, positions // size] * size + positions % size)
        step: Any = SimpleNamespace(
            segments=(segment, segment_of([], self.tables)), writes=tuple(writes), positions=positions
        )
        assert set(vars(step)) <= set(StepInput.__slots__)
        self.sources.view(-1, self.entries.shape[1])[writes[0]] = entries
        if self.by_token:
            self.compressor(self.sources, (self.groups,), groups_by_token(step, 0, 1, self.ratio, self.rope))
            return
        completed = completed_groups(step, 0, 1, self.ratio, self.overlap, self.block, self.rope)
        if completed is None:
            assert (start + count) // self.ratio == start // self.ratio
        else:
            self.compressor(self.sources, (self.groups,), completed)

    def found(self, count: int) -> Tensor:
        places = [(self.tables[1][0, g // self.per_block], g % self.per_block) for g in range(count)]
        return torch.stack([self.groups[block, entry] for block, entry in places])

    def expected(self, count: int) -> Tensor:
        """Return the expected entries, channel by channel."""
        made = []
        begins = np.cumsum([0, *self.dims])
        whole = sum(self.dims)
        for g in range(count):
            entry = []
            for number, dim in enumerate(self.dims):
                bias = self.compressor.biases[number].double()
                vector = torch.zeros(dim, dtype=torch.float64)
                for c in range(dim):
                    gates, kvs = [], []
                    for part in range(self.overlap):
                        begin = (g - (self.overlap - 1 - part)) * self.ratio
                        for i in range(self.ratio if begin >= 0 else 0):
                            at = part * 2 * whole + int(begins[number]) + c
                            kvs.append(self.entries[begin + i, at].double())
                            gates.append(
                                self.entries[begin + i, at + whole].double() + bias[i, part * dim + c]
                            )
                    vector[c] = torch.stack(gates).softmax(0) @ torch.stack(kvs)
                vector = vector / (vector.square().mean() + 1e-6).sqrt() * self.compressor.norms[number]
                for pair in range(2):
                    angle = torch.tensor(float(g * self.ratio) * 100.0 ** (-pair / 2), dtype=torch.float64)
                    at = dim - 4 + 2 * pair
                    x, y = vector[at].clone(), vector[at + 1].clone()
                    vector[at] = x * angle.cos() - y * angle.sin()
                    vector[at + 1] = y * angle.cos() + x * angle.sin()
                entry.append(vector)
            made.append(torch.cat(entry))
        return torch.stack(made)


SHAPES = [((6, 5), 4, 2), ((6,), 8, 1), ((4, 7), 3, 2), ((5,), 1, 1)]
WIDE = [((32, 16), 4, 2), ((40,), 16, 1), ((37, 21), 3, 2)]


@pytest.mark.parametrize(("dims", "ratio", "overlap"), [*SHAPES, *WIDE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_by_token(
    dims: tuple[int, ...], ratio: int, overlap: int, dtype: torch.dtype, extension: None
) -> None:
    """The C++ operations give the reference, with equal bits for any cut of a prompt and any threads."""
    made = []
    before = torch.get_num_threads()
    try:
        for chunk, threads in ((1, 1), (3, 2), (50, 1), (50, 2)):
            torch.set_num_threads(threads)
            row = Groups(dims, ratio, overlap, 50, dtype)
            for start in range(0, 50, chunk):
                row.step(start, row.entries[start : start + chunk])
            made.append(row.found(50 // ratio))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found, made[0]) for found in made)
    away = (made[0].double() - row.expected(50 // ratio)).abs().max()
    assert away < (2e-5 if dtype == torch.float32 else 3e-2)
    rest = row.groups.view(-1, sum(dims)).isnan().all(1).sum()
    assert rest == row.groups.shape[0] * row.per_block - 50 // ratio, "something else was written"


def test_groups_by_token_refuse_tables_and_places_that_are_not_there(extension: None) -> None:
    row = Groups((32,), 4, 2, 20, torch.float32)
    wrong = row.tables[0].clone()
    wrong[0, 1] = 99
    with pytest.raises(RuntimeError, match="row 0 names block 99 of 5"):
        row.step(0, row.entries, tables=(wrong, row.tables[1]))
    row.groups = row.groups[:1].contiguous()
    with pytest.raises(RuntimeError, match=r"token 3 goes to \d of 2"):
        row.step(0, row.entries)


@pytest.mark.requirement("B16")
@pytest.mark.parametrize(("dims", "ratio", "overlap"), SHAPES)
@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
def test_groups_of_chunks(dims: tuple[int, ...], ratio: int, overlap: int, chunk: int) -> None:
    """The host may assume a longer context than the real one."""
    row = Groups(dims, ratio, overlap, 50)
    for start in range(0, 50, chunk):
        row.step(start, row.entries[start : start + chunk], bound=min(3, 50 - min(50, start + chunk)))
    count = 50 // ratio
    assert torch.allclose(row.found(count), row.expected(count), **EXACT)
    rest = row.groups.view(-1, sum(dims)).isnan().all(1).sum()
    assert rest == row.groups.shape[0] * row.per_block - count, "something else was written"


@pytest.mark.parametrize(("dims", "ratio", "overlap"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_groups_that_drafts_closed_are_replaced(
    dims: tuple[int, ...], ratio: int, overlap: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if dtype != torch.float64:
        request.getfixturevalue("extension")
    row = Groups(dims, ratio, overlap, 40, dtype)
    at, rng = 0, random.Random(3)
    while at < 40:
        n = min(rng.randint(1, 6), 40 - at)
        right = rng.randint(1, n)
        entries = row.entries[at : at + n].clone()
        entries[right:] = torch.randn_like(entries[right:])
        row.step(at, entries)
        at += right
    count = 40 // ratio
    limits = EXACT if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    assert torch.allclose(row.found(count).double(), row.expected(count), **limits)


def test_a_backend_that_lacks_a_type_says_so() -> None:
    cache = CacheSpec(kind="latent", layers=(0,), window=4, width=8, form="sparse")
    spec = model_spec(4, cache, kv_heads=1, head_dim=8)
    assert isinstance(choose("auto", spec, torch.bfloat16, CPU, 64)["sparse"], TorchSparse)
    with pytest.raises(ConfigError, match=r"torch.*int8"):
        choose("torch", spec, torch.int8, CPU, 64)
    with pytest.raises(ConfigError, match="does not run on meta"):
        choose("torch", spec, torch.float32, torch.device("meta"), 64)
    with pytest.raises(ConfigError, match="--deterministic"):
        choose("torch", spec, torch.float32, CPU, 64, invariant=True)
