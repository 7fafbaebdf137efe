"""Shares of ranks, and the sizes that the shares divide."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.specs import model_spec
from weft.common.errors import ConfigError
from weft.config.sharding import check, local_spec, rank_counts, share, share_of_kv
from weft.config.sizing import memory
from weft.config.spec import CacheSpec, DeltaSpec, ModelSpec, MoESpec, StatePart
from weft.types.layout import ALONE, Layout


@given(size=st.integers(0, 300), ranks=st.integers(1, 40))
def test_shares_are_in_order_and_lose_nothing(size: int, ranks: int) -> None:
    shares = [share(size, rank, ranks) for rank in range(ranks)]
    assert [n for begin, end in shares for n in range(begin, end)] == list(range(size))
    assert max(end - begin for begin, end in shares) == -(-size // ranks)


@given(heads=st.sampled_from([1, 2, 3, 4, 8]), more=st.integers(1, 6), groups=st.integers(1, 4))
def test_queries_find_their_kv_head(heads: int, more: int, groups: int) -> None:
    """If the numbers divide, every rank has exactly the KV heads of its query heads."""
    for ranks in (heads * more, *(n for n in range(1, heads + 1) if heads % n == 0)):
        queries = heads * more * groups
        if queries % ranks:
            continue
        for rank in range(ranks):
            mine = range(*share(queries, rank, ranks))
            wanted = {q // (queries // heads) for q in mine}
            assert wanted == set(range(*share_of_kv(heads, rank, ranks)))


def _refused(spec: ModelSpec, layout: Layout) -> str:
    with pytest.raises(ConfigError) as raised:
        check(spec, layout)
    assert raised.value.param == "--tensor-parallel-size"
    return raised.value.message


def _moe(**more: Any) -> MoESpec:
    facts: dict[str, Any] = {"experts": 5, "top_k": 2, "intermediate": 6, "renormalize": True, "layers": (0,)}
    return MoESpec(**{**facts, **more})


def test_everything_that_does_not_divide_is_named() -> None:
    delta = DeltaSpec(layers=(0,), k_heads=2, v_heads=6, k_dim=4, v_dim=4, conv=4)
    message = _refused(model_spec(heads=4, intermediate=10, delta=delta), Layout(tensor=3))
    assert "4 attention heads and 2 delta net key heads and 10 intermediate size and 2 KV heads" in message
    assert message.endswith("; 1 or 2 would work")


def test_numbers_of_ranks_that_divide_a_model() -> None:
    """A number counts if tensor or expert parallelism permits it."""
    assert rank_counts(model_spec(heads=12, intermediate=2304, caches=_kv(4))) == (2, 4)
    assert rank_counts(model_spec(heads=16, intermediate=2816, caches=_kv(8))) == (2, 4, 8)
    assert rank_counts(model_spec(heads=14, intermediate=4864, caches=_kv(2))) == (2,)
    assert rank_counts(model_spec(heads=3, intermediate=16, caches=_kv(1))) == ()
    dealt = model_spec(heads=8, caches=_kv(8), moe=_moe(layers=(0, 1)), layers=2)
    assert rank_counts(dealt) == (2, 4, 8)


def _kv(heads: int) -> tuple[CacheSpec, ...]:
    return (CacheSpec(kind="full", layers=(0,), kv_heads=heads, head_dim=8),)


def test_experts_divide_or_are_dealt_out() -> None:
    spec = model_spec(heads=12, moe=_moe(shared=9), caches=(CacheSpec(kind="latent", layers=(0,), width=8),))
    message = _refused(spec, Layout(tensor=4))
    assert "6 expert intermediate size and 9 shared expert size" in message
    check(spec, Layout(tensor=3))
    check(spec, Layout(tensor=4, expert=True))


@pytest.mark.requirement("A11")
def test_a_rank_has_its_share_of_every_cache() -> None:
    state = CacheSpec(
        kind="state",
        layers=(1,),
        parts=(
            StatePart(name="conv", shape=(4, 3, 8), wide=False),
            StatePart(name="recurrent", shape=(8, 16, 8), wide=True),
        ),
        form="delta",
    )
    entries = CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=64)
    latent = CacheSpec(kind="latent", layers=(0,), width=40)
    delta = DeltaSpec(layers=(1,), k_heads=4, v_heads=8, k_dim=16, v_dim=8, conv=4)
    spec = model_spec(heads=8, intermediate=16, caches=(entries, latent, state), delta=delta)
    local = local_spec(spec, Layout(tensor=4))
    assert [cache.kv_heads for cache in local.caches] == [1, 0, 0]
    assert local.caches[1] == latent
    assert [part.shape for part in local.caches[2].parts] == [(1, 3, 8), (2, 16, 8)]
    assert (local.heads, local.kv_heads, local.intermediate, local.vocab_size) == (2, 1, 4, 10)
    assert local.delta is not None
    assert (local.delta.k_heads, local.delta.v_heads) == (1, 2)
    assert local_spec(spec, ALONE) == spec
    assert local_spec(spec, Layout(data=3)) == spec


def test_weights_of_a_rank_are_estimated() -> None:
    moe = _moe(experts=8, intermediate=10, shared=20)
    spec = model_spec(heads=4, hidden=32, vocab_size=101, moe=moe)
    attention, experts, shared = 3 * 32 * 64 * 4, 3 * 32 * 8 * 10, 3 * 32 * 20
    attention = 32 * 64 * (2 * 4 + 2 * 2)
    routers, row = 8 * 32 * 4, 2 * 32 * 4
    assert memory.weight_bytes(spec, "float32") == 4 * (attention + experts + shared) + routers + 101 * row
    half = memory.weight_bytes(spec, "float32", layout=Layout(tensor=2))
    assert half == 2 * (attention + experts + shared) + routers + 51 * row
    layout = Layout(tensor=2, expert=True)
    more = memory.weight_bytes(spec, "float32", layout=layout, redundant=2)
    assert more - memory.weight_bytes(spec, "float32", layout=layout) == 4 * experts // 8
    dealt = memory.weight_bytes(spec, "float32", layout=Layout(tensor=2, data=2, expert=True))
    assert dealt == 4 * (attention // 2 + experts // 4 + shared) + routers + 51 * row
