"""Frames between an engine and its ranks: a round trip changes nothing, and other data is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.common.errors import EngineDead
from weft.types import frames as f
from weft.types.plan import (
    AllocSlot,
    AppendBlocks,
    AppendEach,
    BindMedia,
    Encode,
    FreeSlot,
    GatherMedia,
    LoadState,
    MoveMedia,
    SaveState,
    Segment,
    SendMedia,
    StepPlan,
    TokenMasks,
    column,
)
from weft.types.sampling import TokenParams
from weft.types.transfer import Endpoint, TransferKey

ints = st.integers(-(1 << 31), (1 << 31) - 1)
small = st.integers(0, 1 << 20)
columns = st.lists(ints, max_size=5).map(column)
ids = st.binary(max_size=9)
keys = st.builds(TransferKey, small, small, small)
params = st.builds(
    TokenParams,
    temperature=st.floats(0, 100),
    top_k=small,
    logit_bias=st.lists(st.tuples(small, st.floats(-100, 100)), max_size=2).map(tuple),
    allowed=st.none() | st.lists(small, max_size=3).map(tuple),
    bad=st.lists(st.lists(small, max_size=2).map(tuple), max_size=2).map(tuple),
    stop_ids=st.lists(small, max_size=2).map(tuple),
    max_tokens=small,
)
ops = st.one_of(
    st.builds(
        AllocSlot,
        slot=small,
        gen=small,
        choice=small,
        seed=st.integers(0, (1 << 64) - 1),
        params=params,
        num_prompt=small,
        num_cached=small,
        token_ids=columns,
        spans=columns,
    ),
    st.builds(FreeSlot, slot=small, gen=small),
    st.builds(AppendBlocks, slot=small, kind=small, blocks=columns),
    st.builds(AppendEach, kind=small, slots=columns, blocks=columns),
    st.builds(SaveState, slot=small, kind=small, block=small, back=small),
    st.builds(LoadState, slot=small, kind=small, block=small),
    st.builds(Encode, blocks=ids, count=small, grid=st.tuples(small, small, small), pixels=ids),
    st.builds(BindMedia, slot=small, start=small, count=small, blocks=ids),
    st.builds(SendMedia, key=keys, blocks=ids, count=small),
    st.builds(GatherMedia, blocks=ids, count=small),
    st.builds(MoveMedia, blocks=ids, host=ids, up=st.booleans()),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    rows = draw(st.integers(0, 4))
    one = st.lists(ints, min_size=rows, max_size=rows).map(column)
    return Segment(**{name: draw(one) for name in Segment.__struct_fields__})


plans = st.builds(
    StepPlan,
    step=small,
    epoch=small,
    ops=st.lists(ops, max_size=4).map(tuple),
    prefill=segments(),
    decode=segments(),
)


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal, including numpy columns."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, msgspec.Struct):
        names = one.__struct_fields__
        return type(one) is type(other) and all(same(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_pixels_may_be_a_view() -> None:
    view: Any = memoryview(b"pixels of an image")
    op = Encode(blocks=bytes(4), count=1, grid=(1, 2, 3), pixels=view)
    back = f.decode_to_rank(
        f.encode(f.StepFrame(step=1, epoch=0, plan=StepPlan(step=1, ops=(op,)), digest=0))
    )
    assert isinstance(back, f.StepFrame)
    assert back.plan.ops == (Encode(blocks=bytes(4), count=1, grid=(1, 2, 3), pixels=bytes(view)),)


@pytest.mark.requirement("A1")
@settings(max_examples=60, deadline=None)
@given(plan=plans, digest=st.integers(0, (1 << 64) - 1))
def test_a_step_comes_back_as_it_was(plan: StepPlan, digest: int) -> None:
    frame = f.StepFrame(step=plan.step, epoch=3, plan=plan, digest=digest)
    back = f.decode_to_rank(f.encode(frame))
    assert same(frame, back)
    assert isinstance(back, f.StepFrame)
    assert not back.plan.decode.slot.flags.writeable


ERROR = EngineDead("no").info()
ENDPOINT = Endpoint("shm", "/x", 1)
KEY = TransferKey(1, 2, 3)
TO_RANK: list[f.ToRank] = [
    f.RankWelcome(heartbeats="ipc://x", incarnation="1f"),
    f.RankRefused(error=ERROR),
    f.Pools(blocks=(5, 7)),
    f.Form(epoch=1, store="file:///x"),
    f.StepFrame(step=1, epoch=2, plan=StepPlan(step=1), digest=3),
    f.LateMasks(step=1, epoch=2, masks=TokenMasks(entries=column([0, 2]), words=column([-1, 5]))),
    f.Abort(epoch=1),
    f.RankShutdown(),
    f.RankHeartbeat(rank=0, epoch=1, step=2, incarnation="1f", aborted=0),
]
TO_HEAD: list[f.ToEngine] = [
    f.RankHello(version=f.VERSION, release="1", rank=1, pid=2, epoch=-1, settings={"a": "1"}),
    f.Loaded(rank=1, blocks=(5, 7)),
    f.Ready(rank=1),
    f.Ready(rank=1, endpoint=ENDPOINT, embeddings=ENDPOINT),
    f.TransferReport(rank=1, key=KEY, outcome=f.TransferOutcome.failed, error=ERROR, cache="embeddings"),
    f.TransferStopped(rank=1, key=KEY, cache="embeddings"),
    f.Formed(rank=1, epoch=0),
    f.StepOutcome(rank=1, epoch=0, step=4, checksum=5),
    f.RankFailed(rank=1, epoch=0, step=4, error=ERROR, comm=True),
    f.RankHeartbeat(rank=1, epoch=1, step=2, incarnation="1f"),
]
BOTH: list[tuple[Any, Callable[[bytes], Any]]] = [
    *((frame, f.decode_to_rank) for frame in TO_RANK),
    *((frame, f.decode_to_engine) for frame in TO_HEAD),
]


@pytest.mark.requirement("A2")
@pytest.mark.parametrize(("frame", "decode"), BOTH, ids=lambda value: type(value).__name__)
def test_every_frame_comes_back_and_its_parts_do_not(frame: Any, decode: Callable[[bytes], Any]) -> None:
    data = f.encode(frame)
    assert same(decode(data), frame)
    for end in range(len(data)):
        with pytest.raises(f.FrameError, match="not a frame of version"):
            decode(data[:end])
    for more in (b"\x00", data):
        with pytest.raises(f.FrameError):
            decode(data + more)


@pytest.mark.requirement("A2", "A4")
@pytest.mark.parametrize(("frame", "decode"), BOTH, ids=lambda value: type(value).__name__)
def test_unknown_fields_and_tags_are_named(frame: Any, decode: Callable[[bytes], Any]) -> None:
    fields = msgspec.msgpack.decode(f.encode(frame))
    with pytest.raises(f.FrameError, match="surprise"):
        decode(msgspec.msgpack.encode({**fields, "surprise": 1}))
    with pytest.raises(f.FrameError, match="Sneaky"):
        decode(msgspec.msgpack.encode({**fields, "type": "Sneaky"}))
    optional = {"type", "comm", "aborted", "peer", "given_up", "version", "endpoint", "embeddings", "cache"}
    optional |= {"updates", "weights"}
    for name in fields:
        if name not in optional | ({"error"} if isinstance(frame, f.TransferReport) else set()):
            with pytest.raises(f.FrameError):
                decode(msgspec.msgpack.encode({key: fields[key] for key in fields if key != name}))


def test_unknown_fields_deep_in_a_plan_are_refused() -> None:
    op = FreeSlot(slot=0, gen=0)
    fields = msgspec.msgpack.decode(
        f.encode(f.StepFrame(step=1, epoch=2, plan=StepPlan(step=1, ops=(op,)), digest=3))
    )
    for part in (fields["plan"], fields["plan"]["ops"][0], fields["plan"]["decode"]):
        part["surprise"] = 1
        with pytest.raises(f.FrameError, match="surprise"):
            f.decode_to_rank(msgspec.msgpack.encode(fields))
        del part["surprise"]
    assert f.decode_to_rank(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("value", [b"abc", "abcd", [1], 1, None])
def test_columns_are_whole_int32_bytes(value: Any) -> None:
    fields = msgspec.msgpack.decode(f.encode(f.LateMasks(step=1, epoch=1, masks=TokenMasks())))
    with pytest.raises(f.FrameError):
        f.decode_to_rank(msgspec.msgpack.encode({**fields, "masks": {"entries": value}}))


def test_columns_of_unequal_length_are_refused() -> None:
    plan = StepPlan(step=1, decode=Segment(slot=column([1, 2]), gen=column([1])))
    with pytest.raises(f.FrameError, match="differ in length"):
        f.decode_to_rank(f.encode(f.StepFrame(step=1, epoch=0, plan=plan, digest=0)))


def test_sizes_are_capped_by_type() -> None:
    long = f.Form(epoch=1, store="x" * (1 << 17))
    with pytest.raises(f.FrameError, match=r"a Form of .* bytes is over its limit of 65536"):
        f.encode(long)
    with pytest.raises(f.FrameError, match="a Form of"):
        f.decode_to_rank(msgspec.msgpack.encode(long))
    with pytest.raises(f.FrameError, match="over the limit"):
        f.decode_to_rank(bytes(f.MAX_FRAME + 1))


@pytest.mark.requirement("A2")
def test_unequal_versions_are_named_both() -> None:
    hello = {"type": "RankHello", "version": f.VERSION + 1, "release": "9", "rank": 2, "new_field": True}
    with pytest.raises(f.VersionMismatch, match=rf"version {f.VERSION + 1} .* version {f.VERSION}"):
        f.decode_to_engine(msgspec.msgpack.encode(hello))
    known = f.RankHello(version=f.VERSION - 1, release="0.0.9", rank=2, pid=1, epoch=3, settings={})
    with pytest.raises(
        f.VersionMismatch, match=rf"rank 2 \(weft 0.0.9\) .*version {f.VERSION - 1} .* {f.VERSION}"
    ):
        f.decode_to_engine(f.encode(known))
    step = f.StepFrame(version=f.VERSION + 1, step=1, epoch=0, plan=StepPlan(step=1), digest=0)
    with pytest.raises(f.VersionMismatch, match=f"the engine speaks version {f.VERSION + 1}"):
        f.decode_to_rank(f.encode(step))
