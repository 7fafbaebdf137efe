"""Attention of the CPU extension: close to float64, equal bits in any batch, no foreign data."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.pairwise import sampled
from tests.support.slow import mostly_slow
from tests.support.specs import first_seen, model_spec
from weft.attention.base import CoreInput, SegmentInput
from weft.attention.gqa.cpu_backend import CpuAttention
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec

Tensor = torch.Tensor

NAN = float("nan")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 3e-6}
#: Engines of csrc/attend_tile.h for bf16: the default of the machine, float products, ATen, AMX
# (conftest.py).
ENGINES = (0, 1, 3, 4)
#: (start, count): first tokens, decodes at edges of tiles (64) and splits (512), chunks across both.
ROWS = [(0, 1), (0, 70), (1200, 3), (5, 140), (639, 1), (64, 64), (63, 1), (511, 2), (1023, 1)]
#: (heads, kv heads, head size, block)
SHAPES = ((12, 4, 64, 64), (12, 4, 64, 16), (5, 5, 80, 1), (8, 1, 128, 48), (6, 2, 256, 32), (7, 1, 16, 4))


pytestmark = pytest.mark.usefixtures("extension", "kept_threads")


@dataclass
class Scene:
    """Sequences in a cache with NaN in all other entries, and queries for the last tokens."""

    rows: list[tuple[int, int]]
    shape: tuple[int, int, int, int] = (12, 4, 64, 64)
    window: int = 0
    dtype: torch.dtype = torch.bfloat16
    softcap: float = 0.0

    def __post_init__(self) -> None:
        rng, block = random.Random(0), self.shape[3]
        torch.manual_seed(0)
        self.heads, self.kv_heads, self.dim, self.block = self.shape
        widths = [-(-(start + count) // block) for start, count in self.rows]
        ids = rng.sample(range(1, sum(widths) + 1), sum(widths))
        self.cache = torch.full((sum(widths) + 1, 2, self.kv_heads, block, self.dim), NAN, dtype=self.dtype)
        self.table = torch.zeros(len(self.rows), max(widths), dtype=torch.int64)
        self.kv = []
        for row, (start, count) in enumerate(self.rows):
            self.table[row, : widths[row]] = torch.tensor([ids.pop() for _ in range(widths[row])])
            low = first_seen(start, self.window)
            kv = torch.randn(start + count, 2, self.kv_heads, self.dim).to(self.dtype)
            for p in range(low, start + count):
                self.cache[self.table[row, p // block], :, :, p % block] = kv[p]
            self.kv.append(kv)
        tokens = sum(count for _, count in self.rows)
        self.q = torch.randn(tokens, self.heads, self.dim).to(self.dtype)
        self.scale = self.dim**-0.5

    def run(self, rows: list[tuple[int, int, int]] | None = None, engine: int = 0) -> Tensor:
        """Run (row, first, count) rows; ``first`` counts from the row's first query. Return the output."""
        rows = [(r, 0, count) for r, (_, count) in enumerate(self.rows)] if rows is None else rows
        begins = np.cumsum([0, *(count for _, count in self.rows)])
        q = torch.cat([self.q[begins[r] + first : begins[r] + first + count] for r, first, count in rows])
        out = torch.full_like(q, NAN)
        offsets = torch.tensor([0, *np.cumsum([count for *_, count in rows])], dtype=torch.int32)
        starts = torch.tensor([self.rows[r][0] + first for r, first, _ in rows])
        table = self.table[[r for r, *_ in rows]]
        torch.ops.weft_cpu.attend.default(
            *(q, out, self.cache, offsets, starts, table, self.window, self.scale, engine),
            softcap=self.softcap,
        )
        return out

    def expected(self) -> Tensor:
        """Return the expected output in float64, row by row."""
        made, group, begin = [], self.heads // self.kv_heads, 0
        for (start, count), kv in zip(self.rows, self.kv, strict=True):
            k, v = kv.double().repeat_interleave(group, dim=2).permute(1, 2, 0, 3)  # [heads, keys, dim]
            q = self.q[begin : begin + count].double().transpose(0, 1)
            queries, keys = torch.arange(start, start + count)[:, None], torch.arange(start + count)[None]
            seen = keys <= queries
            first = [first_seen(p, self.window) for p in range(start, start + count)]
            seen &= keys >= torch.tensor(first)[:, None]
            scores = q @ k.transpose(1, 2) * self.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            made.append((scores.softmax(-1) @ v).transpose(0, 1))
            begin += count
        return torch.cat(made)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@mostly_slow("window", [0, 1, 50, 64, 600, -100, -256], [0, 50, -100])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "engine"), [(torch.float32, 0), *((torch.bfloat16, e) for e in ENGINES)])
def test_close_to_float64_and_nothing_foreign_enters(
    dtype: torch.dtype, engine: int, shape: tuple[int, int, int, int], window: int
) -> None:
    scene = Scene(ROWS, shape, window, dtype)
    made = scene.run(engine=engine)
    assert (made.double() - scene.expected()).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "engine"), [(torch.float32, 0), *((torch.bfloat16, e) for e in ENGINES)])
def test_capped_scores(dtype: torch.dtype, engine: int) -> None:
    scene = Scene([(0, 1), (60, 40), (639, 1)], (4, 2, 64, 16), 100, dtype, softcap=0.6)
    made = scene.run(engine=engine)
    assert (made.double() - scene.expected()).abs().max() < TOLERANCE[dtype]
    alone = torch.cat([scene.run([(1, first, 1)], engine) for first in range(40)])
    assert torch.equal(bits(alone), bits(made[1:41]))
    scene.scale *= 1e6  # all scores are at the cap
    assert (scene.run(engine=engine).double() - scene.expected()).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "engine"), [(torch.float32, 0), *((torch.bfloat16, e) for e in ENGINES)])
def test_heads_of_512_dims(dtype: torch.dtype, engine: int) -> None:
    """Full layers of Gemma 4 have this size."""
    scene = Scene([(0, 1), (60, 10), (639, 1)], (4, 2, 512, 16), 0, dtype)
    made = scene.run(engine=engine)
    assert (made.double() - scene.expected()).abs().max() < TOLERANCE[dtype]
    alone = torch.cat([scene.run([(1, first, 1)], engine) for first in range(10)])
    assert torch.equal(bits(alone), bits(made[1:11]))


@sampled({"engine": [None, *ENGINES], "shape": list(SHAPES), "window": [0, 50, 600, -130]})
def test_bits_do_not_depend_on_company_chunks_or_threads(
    engine: int | None, shape: tuple[int, int, int, int], window: int
) -> None:
    """Tested for float32, and for bf16 with each engine."""
    dtype, engine = (torch.float32, 0) if engine is None else (torch.bfloat16, engine)
    scene = Scene(ROWS, shape, window, dtype)
    torch.set_num_threads(1)
    whole = bits(scene.run(engine=engine))
    torch.set_num_threads(2)
    assert torch.equal(bits(scene.run(engine=engine)), whole)
    for size in (1, 7, 16, 64, 256):
        pieces = [
            (r, first, min(size, count - first))
            for r, (_, count) in enumerate(scene.rows)
            for first in range(0, count, size)
        ]
        assert torch.equal(bits(scene.run(pieces, engine)), whole), size
        alone = torch.cat([scene.run([piece], engine) for piece in pieces[:40]])
        assert torch.equal(bits(alone), whole[: len(alone)]), size


@pytest.mark.parametrize("group", [1, 5, 6, 8])
@pytest.mark.parametrize(("dtype", "engine"), [(torch.float32, 0), *((torch.bfloat16, e) for e in ENGINES)])
def test_a_value_that_is_not_finite_reaches_those_who_see_it_and_nobody_else(
    dtype: torch.dtype, engine: int, group: int
) -> None:
    scene = Scene([(0, 192 // group + 3), (7, 40)], (group, 1, 64, 64), dtype=dtype)
    clean = scene.run(engine=engine)
    scene.cache[scene.table[0, 0], 1, :, 20] = NAN
    made, after = scene.run(engine=engine), 192 // group + 3
    assert torch.equal(bits(made[:20]), bits(clean[:20]))
    assert made[20:after].isnan().all()
    assert torch.equal(bits(made[after:]), bits(clean[after:]))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_long_row_divided_among_threads_has_the_same_bits(engine: int) -> None:
    """Few pieces and many keys: splits are separate items. The last query of a prefill equals the decode
    row."""
    scene = Scene([(4095, 1), (2900, 150)], (6, 1, 64, 64))
    torch.set_num_threads(1)
    alone = scene.run(engine=engine)
    torch.set_num_threads(2)
    assert torch.equal(bits(scene.run(engine=engine)), bits(alone))
    assert torch.equal(bits(scene.run([(0, 0, 1)], engine)), bits(alone[:1]))
    assert torch.equal(bits(scene.run([(1, 149, 1)], engine)), bits(alone[-1:]))


@pytest.mark.parametrize("shape", [(8, 2, 128, 64), (6, 2, 80, 16), (3, 1, 64, 64)])
def test_few_rows_have_the_bits_of_many(shape: tuple[int, int, int, int]) -> None:
    """A piece of few rows is not packed as floats: 1 to 8 queries against 40, in float products."""
    scene = Scene([(600, 40)], shape)
    whole = bits(scene.run(engine=1))
    for count in (1, 2, 3, 5, 8):
        assert torch.equal(bits(scene.run([(0, 40 - count, count)], engine=1)), whole[-count:])


def test_a_query_with_nan_spoils_its_own_row_alone() -> None:
    scene = Scene([(100, 9)])
    before = scene.run()
    scene.q[4, 3, 7] = NAN
    after = scene.run()
    spoiled = after.isnan().any(-1)
    assert spoiled.nonzero().tolist() == [[4, 3]]
    assert after[4, 3].isnan().all()
    assert torch.equal(bits(after)[~spoiled], bits(before)[~spoiled])


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("window", [0, 20])
def test_a_broken_key_or_value_reaches_only_queries_that_see_it(
    window: int, plane: int, value: float
) -> None:
    scene = Scene([(30, 90)], (12, 4, 64, 16), window)
    before = scene.run()
    scene.cache[scene.table[0, 70 // 16], plane, :, 70 % 16] = value
    after = scene.run()
    unseen = torch.tensor([p < 70 or bool(window and p >= 70 + window) for p in range(30, 120)])
    assert torch.equal(bits(after)[unseen], bits(before)[unseen])
    assert not after[~unseen].isfinite().all()


def test_zeros_are_positive_and_tiny_values_vanish() -> None:
    scene = Scene([(130, 3)])
    scene.cache[:, 1] = torch.where(scene.cache[:, 1].isnan(), scene.cache[:, 1], -1e-39)
    assert not bits(scene.run()).any()


def test_wild_scores_stay_finite() -> None:
    scene = Scene([(700, 40)], dtype=torch.float32)
    scene.q *= 1e4
    made = scene.run()
    assert made.isfinite().all()
    assert (made.double() - scene.expected()).abs().max() < 1e-2


def segment(scene: Scene) -> SegmentInput:
    counts = np.array([count for _, count in scene.rows], np.int32)
    starts = np.array([start for start, _ in scene.rows], np.int32)
    return SegmentInput(
        begin=0,
        rows=len(scene.rows),
        tokens=int(counts.sum()),
        host_counts=counts,
        host_starts=starts,
        q_offsets=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        starts=torch.tensor(starts.astype(np.int64)),
        slots=torch.arange(len(scene.rows)),
        live=torch.zeros(len(scene.rows), dtype=torch.int64),
        tables=(scene.table,),
    )


@pytest.mark.parametrize("rows", [ROWS, []])
def test_as_a_backend_on_slices_of_merged_rows(rows: list[tuple[int, int]]) -> None:
    scene = Scene(rows or [(0, 1)])
    whole = scene.run()
    if not rows:
        scene.rows, scene.table, whole = [], scene.table[:0], whole[:0]
    spec = CacheSpec(kind="full", layers=(0,), window=0, kv_heads=4, head_dim=64)
    tokens = len(whole)
    merged = torch.zeros(tokens + 5, 12, 64, dtype=torch.bfloat16)
    merged[3 : 3 + tokens] = scene.q[:tokens]
    out = torch.zeros_like(merged)
    core = CoreInput(segment(scene), {0: (scene.cache,)}, scene.scale)
    CpuAttention().attend(merged[3 : 3 + tokens], out[3 : 3 + tokens], core, 0, spec)
    assert torch.equal(out[3 : 3 + tokens], whole)
    assert not out[:3].any()
    assert not out[3 + tokens :].any()


@pytest.mark.parametrize(
    ("dim", "dtype", "device", "heads", "lacking"),
    [
        (64, torch.float64, "cpu", 4, "float64"),
        (64, torch.float16, "cpu", 4, "float16"),
        (64, torch.float32, "cuda", 4, "cuda"),
        (72, torch.float32, "cpu", 4, "heads of 72"),
        (528, torch.float32, "cpu", 4, "heads of 528"),
        (64, torch.float32, "cpu", 5, "5 query heads"),
    ],
)
def test_what_is_not_served_is_refused(
    dim: int, dtype: torch.dtype, device: str, heads: int, lacking: str
) -> None:
    spec = CacheSpec(kind="full", layers=(0,), window=0, kv_heads=2, head_dim=dim)
    with pytest.raises(ConfigError, match=lacking):
        CpuAttention().check(spec, model_spec(heads), 64, dtype, torch.device(device))


def test_what_is_served_passes_the_check() -> None:
    spec = CacheSpec(kind="window", layers=(0,), window=7, kv_heads=2, head_dim=80)
    for dtype in (torch.bfloat16, torch.float32):
        CpuAttention().check(spec, model_spec(), 1, dtype, torch.device("cpu"))


def test_tables_that_do_not_reach_are_refused() -> None:
    scene = Scene([(100, 1)], (4, 4, 64, 16))
    scene.table = scene.table[:, :-1].contiguous()
    with pytest.raises(RuntimeError, match="reaches block 6"):
        scene.run()
    scene = Scene([(100, 1)], (4, 4, 64, 16))
    scene.table[0, 2] = 10**6
    with pytest.raises(RuntimeError, match="names block 1000000"):
        scene.run()
