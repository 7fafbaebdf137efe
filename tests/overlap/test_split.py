"""Splitting plans: pure, so every property is checked on random ones."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.overlap.split import LEAST, MicroBatches, split, splits
from weft.types.plan import AllocSlot, Segment, StepPlan, column
from weft.types.sampling import TokenParams

COLUMNS = Segment().__struct_fields__


def segment(rows: list[dict[str, int]]) -> Segment:
    return Segment(**{name: column([row[name] for row in rows]) for name in COLUMNS})


def prompt(slot: int, count: int, start: int = 0, logits: int = 1, sample: int = 1) -> dict[str, int]:
    logits, sample = min(logits, count), min(sample, logits, count)
    return {
        "slot": slot, "gen": slot + 7, "start": start, "count": count,
        "logits": logits, "sample": sample, "next_k": 2 * sample,
    }  # fmt: skip


def decode(slot: int, drafts: int = 0, start: int = 9) -> dict[str, int]:
    count = 1 + drafts
    return {
        "slot": slot, "gen": slot, "start": start, "count": count,
        "logits": count, "sample": count, "next_k": drafts,
    }  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    prefills = draw(
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 99), st.integers(0, 300)), max_size=6)
    )
    drafts = draw(st.lists(st.integers(0, 4), max_size=12))
    rows = [
        prompt(slot, count, start, logits, draw(st.integers(0, 1)))
        for slot, (count, start, logits) in enumerate(prefills)
    ]
    first = len(rows)
    return StepPlan(
        step=3,
        prefill=segment(rows),
        decode=segment([decode(first + i, k) for i, k in enumerate(drafts)]),
        ops=(AllocSlot(slot=0, gen=7, choice=0, seed=1, params=TokenParams(), num_prompt=1, num_cached=0,
                       token_ids=column([1])),),
    )  # fmt: skip


def tokens(segment: Segment) -> list[tuple[int, int, int]]:
    """(slot, gen, position) of every token, in order."""
    found = []
    for slot, gen, start, count in zip(segment.slot, segment.gen, segment.start, segment.count, strict=True):
        found += [(int(slot), int(gen), int(start) + i) for i in range(count)]
    return found


def trailing(segment: Segment, name: str) -> list[tuple[int, int]]:
    """Return (slot, position) of the tokens marked by the column ``name``, in order."""
    found = []
    for slot, start, count, many in zip(
        segment.slot, segment.start, segment.count, getattr(segment, name), strict=True
    ):
        found += [(int(slot), int(start) + int(count) - int(many) + i) for i in range(many)]
    return found


def check(plan: StepPlan, micro_batches: MicroBatches) -> None:
    first, second, cut = micro_batches
    for part in ("prefill", "decode"):
        whole, one, two = (getattr(p, part) for p in (plan, first, second))
        assert tokens(one) + tokens(two) == tokens(whole), "every token once, in order"
        for name in ("logits", "sample"):
            assert trailing(one, name) + trailing(two, name) == trailing(whole, name)
        for micro_batch in (one, two):
            assert (micro_batch.count >= 1).all()
            assert (micro_batch.sample <= micro_batch.logits).all()
            assert (micro_batch.logits <= micro_batch.count).all()
            assert all(getattr(micro_batch, name).dtype == np.int32 for name in COLUMNS)
            assert not any(getattr(micro_batch, name).flags.writeable for name in COLUMNS)
        assert one.next_k.sum() + two.next_k.sum() == whole.next_k.sum()
    assert first.rows, "no micro-batch is empty"
    assert second.rows, "no micro-batch is empty"
    assert first.decode.rows + second.decode.rows == plan.decode.rows, "decode rows are never cut"
    assert first.prefill.rows + second.prefill.rows == plan.prefill.rows + bool(cut)
    if cut:
        assert first.prefill.slot[-1] == second.prefill.slot[0]
        assert first.prefill.count[-1] == cut >= LEAST
        assert second.prefill.count[0] >= LEAST
        assert first.prefill.sample[-1] == first.prefill.next_k[-1] == 0
    assert first.ops == second.ops == (), "ops are carried out once, before both"
    assert (first.step, first.micro_batches, second.step, second.micro_batches) == (3, 1, 3, 1)


@pytest.mark.requirement("C2", "C4")
@settings(max_examples=300, deadline=None)
@given(plans())
def test_micro_batches_cover_the_plan_once_in_order(plan: StepPlan) -> None:
    before = msgspec.structs.asdict(plan)
    micro_batches = split(plan)
    assert msgspec.structs.asdict(plan) == before, "plans are never changed"
    assert splits(plan) == (micro_batches is not None)
    if not plan.rows:
        assert micro_batches is not None
        assert micro_batches.first.rows == micro_batches.second.rows == micro_batches.cut == 0
    elif micro_batches is None:
        assert plan.rows == 1
        assert plan.decode.rows or plan.tokens < 2 * LEAST
    else:
        check(plan, micro_batches)
        again = split(plan)
        assert again is not None
        assert again.cut == micro_batches.cut
        assert tokens(again.first.prefill) == tokens(micro_batches.first.prefill)


@pytest.mark.requirement("C4")
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.integers(0, 9))
def test_micro_batches_balance(prompts: list[int], decodes: int) -> None:
    """The imbalance is at most half of the longest row that cannot be cut."""
    plan = StepPlan(
        step=3,
        prefill=segment([prompt(i, count) for i, count in enumerate(prompts)]),
        decode=segment([decode(50 + i) for i in range(decodes)]),
    )
    micro_batches = split(plan)
    if micro_batches is None:
        return
    whole = max([count for count in prompts if count < 2 * LEAST], default=1)
    assert abs(micro_batches.first.tokens - micro_batches.second.tokens) <= max(whole, 2 * LEAST)


def test_decode_rows_go_by_number() -> None:
    rows = [decode(i, drafts=3 if i < 2 else 0) for i in range(6)]
    micro_batches = split(StepPlan(step=3, decode=segment(rows)))
    assert micro_batches is not None
    assert (micro_batches.first.decode.rows, micro_batches.second.decode.rows) == (3, 3)


def test_a_long_prompt_beside_short_ones_is_cut() -> None:
    plan = StepPlan(step=3, prefill=segment([prompt(0, 10), prompt(1, 200, logits=150), prompt(2, 10)]))
    micro_batches = split(plan)
    assert micro_batches is not None
    check(plan, micro_batches)
    assert micro_batches.first.tokens == micro_batches.second.tokens == 110
    assert micro_batches.cut == 100
    # Logits of the last 150 of 200 positions: 50 in the first micro-batch.
    assert micro_batches.first.prefill.logits.tolist() == [1, 50]
    assert micro_batches.second.prefill.logits.tolist() == [100, 1]


def test_boundaries_that_balance_are_kept() -> None:
    micro_batches = split(StepPlan(step=3, prefill=segment([prompt(0, 100), prompt(1, 100)])))
    assert micro_batches is not None
    assert micro_batches.cut == 0


@pytest.mark.requirement("C2")
def test_one_row_that_is_short_does_not_split() -> None:
    for plan in (
        StepPlan(step=3, prefill=segment([prompt(0, 2 * LEAST - 1)])),
        StepPlan(step=3, decode=segment([decode(0, drafts=4)])),
    ):
        assert split(plan) is None
        assert not splits(plan)


@pytest.mark.requirement("C2")
def test_votes_count_requests_not_tokens() -> None:
    """One request of many tokens splits, and so do two of one token each (C2)."""
    assert splits(StepPlan(step=3, prefill=segment([prompt(0, 4000)])))
    assert splits(StepPlan(step=3, prefill=segment([prompt(0, 1), prompt(1, 1)])))
    assert splits(StepPlan(step=3, prefill=segment([prompt(0, 1)]), decode=segment([decode(1)])))
    assert splits(StepPlan(step=3)), "an idle replica's plan has two empty micro-batches"
