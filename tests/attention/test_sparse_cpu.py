"""Sparse attention of the CPU extension: against a plain reference, with equal bits for each token."""

from __future__ import annotations

import pytest
import torch

from tests.attention.sparse_scene import Scene, Sizes, scores_of
from tests.support.pairwise import sampled
from tests.support.specs import model_spec
from weft.attention.base import CoreInput
from weft.attention.sparse.sparse_cpu import CpuSparse
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec

Tensor = torch.Tensor
SIZES = Sizes(heads=12, dim=48, index_heads=8, index_dim=32)
ROWS = [(5, 3), (0, 2), (141, 1), (8, 2), (340, 1)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.usefixtures("extension")


def scene(
    rows: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    *,
    sizes: Sizes = SIZES,
    window: int = 5,
    groups: tuple[int, int] = (4, 0),
    block: int = 4,
    values: int = 0,
    sinks: bool = True,
) -> Scene:
    made = Scene(
        rows,
        dtype=dtype,
        window=window,
        ratio=groups[0],
        top=groups[1],
        block=block,
        values=values,
        sinks=sinks,
        sizes=sizes,
        backend=CpuSparse(),
    )
    made.weights = made.weights.float()
    made.sinks = None if made.sinks is None else made.sinks.float()
    return made


@sampled(
    {
        "dtype": [torch.float32, torch.bfloat16],
        "window": [0, 1, 37, 2000],
        "groups": [(4, 0), (1, 90), (4, 7), (16, 1)],
        "values": [48, 32],
        "sinks": [True, False],
    }
)
def test_equals_attention_written_out(
    dtype: torch.dtype, window: int, groups: tuple[int, int], values: int, sinks: bool
) -> None:
    found = scene(ROWS, dtype, window=window, groups=groups, values=values, sinks=sinks)
    assert (found.run().double() - found.expected()).abs().max() < TOLERANCE[dtype]


def test_a_window_alone() -> None:
    found = scene(ROWS, window=20, groups=(0, 0))
    assert (found.run().double() - found.expected()).abs().max() < TOLERANCE[torch.float32]


def test_who_sees_nothing_gets_zeros() -> None:
    found = scene([(0, 5)], window=0, sinks=False).run()
    assert torch.equal(found[:3], torch.zeros_like(found[:3]))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_are_its_own(dtype: torch.dtype) -> None:
    """The token runs alone, among others and inside a prompt, with one thread and with two."""
    whole = scene([(600, 300), (3, 20), (850, 1)], dtype, window=100, groups=(4, 50))
    chosen = whole.select()
    made = whole.run()
    assert chosen is not None
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(whole.run(), made)
            for row, position in [(0, 600), (0, 777), (0, 899), (1, 3), (1, 22), (2, 850)]:
                token = whole.tokens().index((row, position))
                picked, out = _alone(whole, token, row, position)
                assert torch.equal(picked[0], chosen[token])
                assert torch.equal(out[0], made[token]), (row, position, threads)
    finally:
        torch.set_num_threads(before)


def _alone(whole: Scene, token: int, row: int, position: int) -> tuple[Tensor, Tensor]:
    part = slice(token, token + 1)
    core = CoreInput(whole.alone(row, position), whole.caches, 0.4, None, whole.sinks)
    reads, backend = whole.reads, whole.backend
    picked = backend.select(whole.index_q[part], whole.weights[part], core, reads)
    out = torch.empty(1, whole.sizes.heads, whole.values, dtype=whole.q.dtype)
    backend.attend(whole.q[part], out, core, reads, picked)
    assert picked is not None
    return picked, out


def test_all_groups_and_a_choice_of_all_have_the_same_bits() -> None:
    rows = [(0, 90), (200, 1)]
    few = scene(rows, torch.bfloat16, window=10, groups=(4, 60))
    every = scene(rows, torch.bfloat16, window=10)
    assert torch.equal(few.run(), every.run())


def test_chosen_groups_ascend_and_are_padded() -> None:
    found = scene([(0, 130), (233, 2)], groups=(4, 20))
    selected = found.select()
    assert selected is not None
    for token, (row, position) in enumerate(found.tokens()):
        ids = selected[token].tolist()
        count = min(20, (position + 1) // 4)
        assert ids[:count] == found.chosen(token, row, position)
        assert ids[count:] == [-1] * (20 - count)


def test_ties_go_to_the_lowest_group() -> None:
    found = scene([(0, 41), (640, 1)], groups=(4, 3))
    keys = found.caches[1][0][..., SIZES.dim :]
    keys[:] = torch.where(keys.isnan(), keys, keys.new_full((), 0.5))
    selected = found.select()
    assert selected is not None
    assert selected[40].tolist() == [0, 1, 2]
    assert selected[41].tolist() == [0, 1, 2]
    found.index_q[:] = -found.index_q.abs()  # no product is positive: all scores are 0 or -0
    found.weights[:, ::2] *= -1
    selected = found.select()
    assert selected is not None
    assert selected[41].tolist() == [0, 1, 2]
    assert selected[6].tolist() == [0, -1, -1]


def _of_scores(scores: Tensor, top: int) -> list[int]:
    """Return the choice of ``sparse_select`` for positions with these scores.

    One head has queries and weights of 1, with a key equal to the score where not negative. The other head
    has weight -1.
    """
    count = len(scores)
    keys = torch.zeros(-(-count // 16), 16, 16)
    keys.view(-1, 16)[:count, 0] = torch.where(scores.signbit(), 0.0, scores)
    keys.view(-1, 16)[:count, 1] = torch.where(scores.signbit(), -scores, 0.0)
    q = torch.zeros(1, 2, 16)
    q[0, 0, 0] = q[0, 1, 1] = 1.0
    chosen: Tensor = torch.ops.weft_cpu.sparse_select.default(
        q,
        torch.tensor([[1.0, -1.0]]),
        keys,
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([count - 1]),
        torch.arange(len(keys)).unsqueeze(0),
        1,
        top,
    )
    return chosen[0].tolist()


@pytest.mark.parametrize("kind", ["random", "few", "equal", "close", "falling", "small", "infinite"])
@pytest.mark.parametrize("count", [17, 64, 100, 1000, 5003])
def test_the_highest_are_chosen_and_of_equals_the_lowest(kind: str, count: int) -> None:
    scores = scores_of(kind, count)
    exact = scores.tolist()
    order = sorted(range(count), key=lambda place: (-exact[place], place))
    for top in sorted({1, 2, 15, 16, count // 3, count - 1, count, count + 5}):
        expected = sorted(order[:top])
        assert _of_scores(scores, top) == expected + [-1] * (top - len(expected)), top


def test_scores_that_are_no_numbers_have_a_place() -> None:
    """The row fails for its values, but the choice is valid: ascending places without repetition."""
    found = scene([(640, 1)], groups=(4, 30))
    found.weights[0, 0] = torch.nan
    for weight in (torch.nan, -torch.inf):
        found.weights[0, 1] = weight
        selected = found.select()
        assert selected is not None
        chosen = selected[0].tolist()
        assert chosen == sorted(set(chosen))
        assert 0 <= chosen[0] <= chosen[-1] < 160


def test_a_table_that_names_no_block_is_refused() -> None:
    found = scene([(50, 3)], groups=(4, 2))
    found.segment.tables[1][0, 0] = 10**6
    with pytest.raises(RuntimeError, match="names block 1000000"):
        found.run()
    found = scene([(50, 3)])
    found.segment.tables[0][0, 12] = -1
    with pytest.raises(RuntimeError, match="names block -1"):
        found.run()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [([0, 12, -1, -1], "group 12 of 12"), ([3, 2, -1, -1], "group 2 of 12 chosen after 3")],
)
def test_a_choice_of_what_is_not_there_is_refused(wrong: list[int], words: str) -> None:
    found = scene([(50, 1)], groups=(4, 4))
    out = torch.empty(1, SIZES.heads, SIZES.dim)
    chosen = torch.tensor([wrong])
    with pytest.raises(RuntimeError, match=words):
        found.backend.attend(found.q, out, found.core(), found.reads, chosen)


def test_no_rows() -> None:
    assert scene([], groups=(4, 2)).run().shape == (0, SIZES.heads, SIZES.dim)


def test_more_heads_than_a_piece_has_rows() -> None:
    sizes = Sizes(heads=384, dim=32, index_heads=64, index_dim=16)
    found = scene([(30, 1)], sizes=sizes, groups=(4, 3), sinks=False)
    assert (found.run().double() - found.expected()).abs().max() < 2e-5


@pytest.mark.slow
def test_more_scores_than_are_kept_at_a_time() -> None:
    """The buffer holds 4 M scores, of tokens of several sequences."""
    found = scene([(70_000, 70), (66_000, 3)], window=4, groups=(1, 5), block=64)
    selected = found.select()
    assert selected is not None
    for token in (0, 1, 33, 58, 59, 69, 70, 72):
        row, position = found.tokens()[token]
        keys = found.groups[row][: position + 1, SIZES.dim :]
        scores = (keys @ found.index_q[token].T).relu() @ found.weights[token]
        assert selected[token].tolist() == scores.topk(5).indices.sort().values.tolist()


@pytest.mark.parametrize("size", [40, 2048])
def test_sizes_that_it_has_not_are_named(size: int) -> None:
    cache = CacheSpec(kind="latent", layers=(0,), window=9, width=size, form="sparse")
    spec = model_spec(4, cache, kv_heads=1, head_dim=size)
    with pytest.raises(ConfigError, match=f"head_dim of {size}"):
        CpuSparse().check(cache, spec, 16, torch.bfloat16, torch.device("cpu"))
