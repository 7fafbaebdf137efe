"""The Triton kernels of sparse attention against a plain reference, in the interpreter or on a GPU.

The interpreter rounds bfloat16 towards zero, so the tolerance is wider.
"""

from __future__ import annotations

import copy
import importlib.util
import random
from typing import Any

import pytest
import torch

from tests.attention.sparse_scene import Scene, Sizes, scores_of, segment_of
from tests.support.latent import on_device
from tests.support.pairwise import sampled
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention.base import CoreInput, SegmentInput
from weft.attention.gqa import triton_backend
from weft.attention.sparse import sparse_triton
from weft.attention.sparse.sparse import SparseBackend
from weft.attention.sparse.sparse_torch import TorchSparse
from weft.attention.sparse.sparse_triton import TritonInvariantSparse, TritonSparse
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec
from weft.ops import triton as kernels
from weft.ops.latent_ops import Rotation, rotate_first

Tensor = torch.Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THERE = DEVICE == "cuda"
READY = importlib.util.find_spec("triton") is not None and (THERE or kernels.interpreting())
pytestmark = [
    pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1"),
    *([pytest.mark.gpu] if THERE else []),
]
SIZES = Sizes(heads=12, dim=48, index_heads=8, index_dim=32)
FEW = Sizes(heads=3, dim=48, index_heads=5, index_dim=32)
TURNED: dict[str, Any] = {"sizes": FEW, "window": 0, "groups": (1, 9), "values": 32, "sinks": False}
"""Scene of rotated queries, for ``Turning``."""
ROWS = [(5, 3), (0, 2), (141, 1), (8, 2), (200, 1)]
DECODES = [(7, 1), (0, 1), (99, 1), (3, 1)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2 if THERE else 0.1}


def scene(
    rows: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    *,
    sizes: Sizes = SIZES,
    window: int = 5,
    groups: tuple[int, int] = (4, 0),
    invariant: bool = False,
    **more: Any,
) -> Scene:
    backend = TritonInvariantSparse() if invariant else TritonSparse()
    made = Scene(
        rows,
        dtype=dtype,
        window=window,
        ratio=groups[0],
        top=groups[1],
        sizes=sizes,
        backend=backend,
        **more,
    )
    made.weights = made.weights.float()
    made.sinks = None if made.sinks is None else made.sinks.float()
    return made


class Run:
    """One segment of a scene on the device of the tests."""

    def __init__(self, made: Scene, segment: SegmentInput | None = None, tokens: slice = slice(None)) -> None:
        self.made, self.reads = made, made.reads
        self.segment = on_device(made.segment if segment is None else segment, DEVICE)
        caches = {kind: (cache.to(DEVICE),) for kind, (cache,) in made.caches.items()}
        sinks = None if made.sinks is None else made.sinks.to(DEVICE)
        plan = made.backend.plan(self.segment, self.reads, caches)
        self.core = CoreInput(self.segment, caches, 0.4, plan, sinks)
        self.q, self.index_q, self.weights = (
            one[tokens].to(DEVICE) for one in (made.q, made.index_q, made.weights)
        )

    def select(self) -> Tensor | None:
        chosen = self.made.backend.select(self.index_q, self.weights, self.core, self.reads)
        return None if chosen is None else chosen.cpu()

    def out(self) -> Tensor:
        selected = self.select() if self.reads.top else None
        out = self.q.new_full((len(self.q), self.made.sizes.heads, self.made.values), torch.nan)
        chosen = None if selected is None else selected.to(DEVICE)
        self.made.backend.attend(self.q, out, self.core, self.reads, chosen)
        return out.cpu()


def away(made: Scene) -> float:
    return float((Run(made).out().double() - made.expected()).abs().max())


@mostly_slow("invariant", [False, True], [False])
def test_lists_of_decodes(invariant: bool) -> None:
    """Blocks lie in random order, and all other entries of the caches are NaN."""
    assert away(scene(DECODES, groups=(4, 7), invariant=invariant)) < 2e-5


@pytest.mark.slow
@sampled(
    {
        "dtype": list(TOLERANCE),
        "window": [0, 1, 37, 2000],
        "groups": [(4, 0), (1, 90), (4, 7), (16, 1)],
        "values": [48, 32],
        "sinks": [True, False],
        "invariant": [True, False],
    }
)
def test_equals_attention_written_out(
    dtype: torch.dtype, window: int, groups: tuple[int, int], values: int, sinks: bool, invariant: bool
) -> None:
    made = scene(ROWS, dtype, window=window, groups=groups, values=values, sinks=sinks, invariant=invariant)
    assert away(made) < TOLERANCE[dtype]


@pytest.mark.slow
def test_a_window_alone() -> None:
    assert away(scene(ROWS, window=20, groups=(0, 0))) < 2e-5


def test_who_sees_nothing_gets_zeros() -> None:
    found = Run(scene([(0, 5)], window=0, sinks=False)).out()
    assert torch.equal(found[:3], torch.zeros_like(found[:3]))
    assert torch.isfinite(found).all()


def test_no_rows() -> None:
    assert Run(scene([], groups=(4, 2))).out().shape == (0, SIZES.heads, SIZES.dim)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 20, 80])
def test_parts_of_the_heads(heads: int) -> None:
    sizes = Sizes(heads=heads, dim=16, index_heads=24, index_dim=20)
    assert away(scene([(30, 1), (41, 2)], sizes=sizes, groups=(2, 5))) < 2e-5


@pytest.mark.slow
def test_launches_of_few_tokens_and_upper_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further launches, splits without entries, and bounds above the true context do not show."""
    monkeypatch.setattr(sparse_triton, "SCORES", 100)
    monkeypatch.setattr(sparse_triton, "STATES", 1)
    monkeypatch.setattr(sparse_triton, "QUERIES", 3)
    for invariant in (False, True):
        made = scene([(6, 1), (90, 5), (3, 4)], groups=(1, 20), bound=13, invariant=invariant)
        assert away(made) < 2e-5


# --- queries that are rotated where they are read ---


class Turning:
    """The queries of a run before their rotation, as parts of wider rows. Of a query the last 16 elements
    are rotated, of a query of the indexer the first 16."""

    def __init__(self, run: Run, interleaved: bool) -> None:
        tokens, heads, dim = run.q.shape
        index_heads, index_dim = run.index_q.shape[1:]
        torch.manual_seed(1)
        line, q_size, index_size = 7 + 16, heads * (7 + 16), index_heads * index_dim
        rows = torch.randn(tokens, q_size + index_size + index_heads + 3).to(DEVICE, run.q.dtype)
        turned = torch.randn(tokens, 8)
        self.run, self.absorbed = run, run.q[..., : dim - 16].contiguous()
        self.q = rows[:, :q_size].unflatten(1, (heads, line))
        self.index_q = rows[:, q_size : q_size + index_size].unflatten(1, (index_heads, index_dim))
        self.weights = rows[:, q_size + index_size : -3]
        self.rotation = Rotation(turned.cos().to(DEVICE), turned.sin().to(DEVICE), interleaved)

    def part(self, tokens: slice, run: Run) -> Turning:
        """Return the queries of some tokens, for ``run``."""
        made = copy.copy(self)
        made.run = run
        for name in ("absorbed", "q", "index_q", "weights"):
            setattr(made, name, getattr(self, name)[tokens])
        cos, sin, interleaved = self.rotation
        made.rotation = Rotation(cos[tokens], sin[tokens], interleaved)
        return made

    def results(self, kind: type[SparseBackend] | None = None) -> tuple[Tensor | None, Tensor]:
        """Return (choice, output). ``kind``: class with the methods, by default the class of the backend."""
        run, backend = self.run, self.run.made.backend
        of = kind or type(backend)
        given = (self.index_q, self.rotation, self.weights, run.core, run.reads)
        chosen = of.select_rotated(backend, *given)
        out = torch.full_like(self.absorbed, torch.nan)
        of.attend_rotated(backend, self.absorbed, self.q, self.rotation, out, run.core, run.reads, chosen)
        return chosen, out


@mostly_slow("dtype", list(TOLERANCE), [torch.float32])
@mostly_slow("invariant", [False, True], [False])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_are_rotated_where_they_are_read(
    dtype: torch.dtype, invariant: bool, interleaved: bool
) -> None:
    """Against a rotation by torch before the same kernels."""
    made = scene([(5, 3), (30, 1)], dtype, invariant=invariant, **TURNED)
    turning = Turning(Run(made), interleaved)
    chosen, out = turning.results()
    expected, wanted = turning.results(SparseBackend)
    assert chosen is not None
    assert torch.equal(chosen, expected)
    assert (out - wanted).abs().max() < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_rotated_queries(dtype: torch.dtype) -> None:
    """A token alone has the choice and the bits that the token has among others and inside a prompt."""
    whole = scene([(20, 9), (3, 2), (70, 1)], dtype, invariant=True, **TURNED)
    turning = Turning(Run(whole), True)
    chosen, made = turning.results()
    assert chosen is not None
    for row, position in [(0, 20), (0, 28), (1, 3), (2, 70)]:
        token = whole.tokens().index((row, position))
        only = slice(token, token + 1)
        picked, alone = turning.part(only, Run(whole, whole.alone(row, position), only)).results()
        assert picked is None or torch.equal(picked[0], chosen[token])
        assert torch.equal(alone[0], made[token]), (row, position)


# --- bits ---


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_are_its_own(dtype: torch.dtype) -> None:
    """A token alone has the choice and the bits that the token has among others and inside a prompt."""
    whole = scene([(60, 30), (3, 2), (150, 1)], dtype, window=10, groups=(2, 20), invariant=True)
    run = Run(whole)
    chosen, made = run.select(), run.out()
    assert chosen is not None
    for row, position in [(0, 60), (0, 89), (1, 3), (2, 150)]:
        token = whole.tokens().index((row, position))
        alone = Run(whole, whole.alone(row, position), slice(token, token + 1))
        picked = alone.select()
        assert picked is None or torch.equal(picked[0], chosen[token])
        assert torch.equal(alone.out()[0], made[token]), (row, position)


@pytest.mark.slow
def test_all_groups_and_a_choice_of_all_have_the_same_bits() -> None:
    few = scene([(70, 1), (9, 1)], window=10, groups=(1, 60), invariant=True)
    few.reads = every = scene([(70, 1), (9, 1)], window=10, groups=(1, 0), invariant=True).reads
    run = Run(few)
    out = torch.empty(2, SIZES.heads, SIZES.dim, device=DEVICE)
    listed = torch.full((2, 80), -1)
    listed[0, :71], listed[1, :10] = torch.arange(71), torch.arange(10)
    few.backend.attend(run.q, out, run.core, every, listed.to(DEVICE))
    assert torch.equal(out.cpu(), run.out())


# --- the choice of groups ---


def test_chosen_groups_ascend_and_are_padded() -> None:
    found = scene([(0, 30), (133, 2)], groups=(4, 20))
    selected = Run(found).select()
    assert selected is not None
    for token, (row, position) in enumerate(found.tokens()):
        if position % 10 > 3:
            continue
        ids = selected[token].tolist()
        count = min(20, (position + 1) // 4)
        assert ids[:count] == found.chosen(token, row, position)
        assert ids[count:] == [-1] * (20 - count)


@pytest.mark.slow
def test_ties_go_to_the_lowest_group() -> None:
    found = scene([(0, 17), (240, 1)], groups=(4, 3))
    keys = found.caches[1][0][..., SIZES.dim :]
    keys[:] = torch.where(keys.isnan(), keys, keys.new_full((), 0.5))
    selected = Run(found).select()
    assert selected is not None
    assert selected[16].tolist() == selected[17].tolist() == [0, 1, 2]
    found.index_q[:] = -found.index_q.abs()  # no product is positive: all scores are 0 or -0
    found.weights[:, ::2] *= -1
    selected = Run(found).select()
    assert selected is not None
    assert selected[17].tolist() == [0, 1, 2]
    assert selected[6].tolist() == [0, -1, -1]


def chosen_of(scores: Tensor, counts: list[int], top: int) -> Tensor:
    """Return the choice of rows of one token with these scores. Row i has ``counts[i]`` groups."""
    from weft.ops.triton import choice

    rows = len(counts)
    segment = segment_of([(count - 1, 1) for count in counts], ())
    chosen = torch.full((rows, top), -7, dtype=torch.int64, device=DEVICE)
    tiles = torch.arange(rows, device=DEVICE) << 32
    choice.choose(
        scores.to(DEVICE), chosen, segment.q_offsets.to(DEVICE), segment.starts.to(DEVICE), tiles, ratio=1
    )
    return chosen.cpu()


@mostly_slow("kind", ["few", "random", "zeros", "close", "falling", "small", "infinite"], ["few"])
def test_the_highest_are_chosen_and_of_equals_the_lowest(kind: str) -> None:
    """Rows of mixed lengths, with NaN beyond the end of each row, over several steps of the kernel."""
    counts = [17, 64, 4095, 4096, 4097, 9001]
    scores = torch.full((len(counts), 9100), torch.nan)
    for row, count in enumerate(counts):
        scores[row, :count] = scores_of(kind, count)
    for top in (16, 2048) if kind == "few" else (1, 16, 64, 2048):
        chosen = chosen_of(scores, counts, top)
        for row, count in enumerate(counts):
            exact = scores[row, :count].tolist()
            order = sorted(range(count), key=lambda place: (-exact[place], place))
            expected = sorted(order[:top])
            assert chosen[row].tolist() == expected + [-1] * (top - len(expected)), (count, top)


def test_scores_that_are_no_numbers_have_a_place() -> None:
    """The row fails for its values, but the choice is valid: ascending places without repetition."""
    scores = torch.randn(1, 200)
    scores[0, 3], scores[0, 60], scores[0, 61] = torch.nan, -torch.nan, torch.inf
    chosen = chosen_of(scores, [200], 30)[0].tolist()
    assert chosen == sorted(set(chosen))
    assert 0 <= chosen[0] <= chosen[-1] < 200


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [False, True])
def test_scores_equal_float64(dtype: torch.dtype, rotated: bool) -> None:
    """The scores of published sizes, for decodes and for a chunk, against float64."""
    from weft.ops.triton import choice

    sizes = Sizes(heads=2, dim=16, index_heads=64, index_dim=128)
    rows = [(3000, 1), (70, 40)] if THERE else [(130, 1), (90, 1)]
    found = scene(rows, dtype, sizes=sizes, window=0, groups=(1, 4))
    run = Run(found)
    plan: Any = run.core.prepared
    turned = torch.randn(run.segment.tokens, 32).to(DEVICE)
    rotation = Rotation(turned.cos(), turned.sin(), False) if rotated else None
    index_q = (rotate_first(run.index_q, *rotation) if rotation else run.index_q).cpu().double()
    # The kernel rounds rotated queries itself, the interpreter towards zero.
    most = 5e-3 if rotated and dtype == torch.bfloat16 else 3e-5
    scores = torch.full((run.segment.tokens, plan.groups), torch.nan, device=DEVICE)
    choice.index_scores(
        run.index_q, run.weights, scores, run.core.caches[1][0], run.segment.q_offsets, run.segment.starts,
        run.segment.tables[1], plan.scored, ratio=1, top=4, queries=plan.queries, programs=2,
        rotation=rotation,
    )  # fmt: skip
    for token, (row, position) in enumerate(found.tokens()):
        keys = found.groups[row][: position + 1, sizes.dim :].double()
        exact = (keys @ index_q[token].T).relu() @ found.weights[token].double()
        made = scores[token, : position + 1].cpu().double()
        assert (made - exact).abs().max() <= most * exact.abs().max()


# --- published sizes, on a GPU ---

PUBLISHED = {
    "deepseek-v32": (Sizes(128, 576, 64, 128), 0, (1, 2048), 512),
    "glm-dsa": (Sizes(64, 576, 32, 128), 0, (1, 2048), 512),
    "deepseek-v4": (Sizes(64, 512, 64, 128), 128, (4, 512), 512),
    "deepseek-v4, all": (Sizes(64, 512, 64, 128), 128, (128, 0), 512),
}
"""Model -> sizes, window, (positions per group, chosen groups), elements of a value."""


@pytest.mark.gpu
@pytest.mark.skipif(not THERE, reason="needs a CUDA GPU")
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str, invariant: bool) -> None:
    """Decodes and a chunk, against torch on the same device, with the choice of the kernels."""
    sizes, window, groups, values = PUBLISHED[name]
    for rows in ([(9000, 1), (100, 1), (2600, 1)], [(4090, 60), (0, 30)]):
        made = scene(
            rows, torch.bfloat16, sizes=sizes, window=window, groups=groups, values=values, block=64,
            invariant=invariant, sinks=window > 0,
        )  # fmt: skip
        made.weights, run = made.weights / 8, Run(made)
        chosen = run.select() if groups[1] else None
        torch_backend = TorchSparse()
        plan = torch_backend.plan(run.segment, run.reads, run.core.caches)
        core = run.core._replace(prepared=plan)
        there = torch.empty(len(run.q), sizes.heads, values, dtype=torch.bfloat16, device=DEVICE)
        on_there = None if chosen is None else chosen.to(DEVICE)
        torch_backend.attend(run.q, there, core, run.reads, on_there)
        out = run.out()
        assert (out.float() - there.cpu().float()).abs().max() < 4e-2
        if chosen is not None:
            exact = torch_backend.select(run.index_q, run.weights, core, run.reads)
            assert exact is not None
            # Sums of another order exchange groups only at the cut.
            for mine, theirs in zip(chosen.tolist(), exact.cpu().tolist(), strict=True):
                assert len(set(mine) ^ set(theirs)) <= 4


@pytest.mark.gpu
@pytest.mark.skipif(not THERE, reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", PUBLISHED)
def test_bits_of_published_sizes(name: str) -> None:
    sizes, window, groups, values = PUBLISHED[name]
    whole = scene(
        [(4090, 60), (0, 30), (9000, 1)], torch.bfloat16, sizes=sizes, window=window, groups=groups,
        values=values, block=64, invariant=True, sinks=window > 0,
    )  # fmt: skip
    run = Run(whole)
    chosen, made = run.select() if groups[1] else None, run.out()
    for row, position in [(0, 4090), (0, 4149), (1, 3), (2, 9000)]:
        token = whole.tokens().index((row, position))
        alone = Run(whole, whole.alone(row, position), slice(token, token + 1))
        picked = alone.select() if groups[1] else None
        assert picked is None or chosen is None or torch.equal(picked[0], chosen[token])
        assert torch.equal(alone.out()[0], made[token]), (row, position)


def test_what_is_not_served_is_refused() -> None:
    cache = CacheSpec(kind="latent", layers=(0,), window=9, width=528, form="sparse")
    spec = model_spec(4, cache, kv_heads=1, head_dim=528)
    with pytest.raises(ConfigError, match="values of 528"):
        TritonSparse().check(cache, spec, 16, torch.bfloat16, torch.device(DEVICE))
    with pytest.raises(ConfigError, match="float64"):
        TritonSparse().check(cache, spec, 16, torch.float64, torch.device(DEVICE))


def test_tiles_of_equal_counts_are_those_of_the_host() -> None:
    """Rows of equal counts get their tiles on the device, without a copy from the host."""
    for counts in ([3, 3, 3], [1, 1], [40, 40], [33]):
        rows = [(random.Random(0).randrange(9), count) for count in counts]
        segment = segment_of(rows, ())
        for queries in (1, 16):
            made, ends = triton_backend.tiles_of(segment, queries)
            expected, wanted = triton_backend._host_tiles(segment, queries, False)
            assert torch.equal(made, expected)
            assert ends.tolist() == wanted.tolist()
