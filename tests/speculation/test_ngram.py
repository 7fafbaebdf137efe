"""Prompt look-up against the definition, written out for one row."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.speculation.ngram import follow


def by_hand(ids: list[int], count: int, least: int, most: int) -> list[int]:
    """Return the tokens after the last earlier occurrence of the longest possible suffix of ``ids``."""
    place = len(ids) - 2
    for length in range(min(most, len(ids) - 1), least - 1, -1):
        ends = [p for p in range(length - 1, len(ids) - 1) if ids[p + 1 - length : p + 1] == ids[-length:]]
        if ends:
            place = ends[-1]
            break
    made = list(ids)
    for ahead in range(count):
        made.append(made[place + 1 + ahead])
    return made[len(ids) :]


rows = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), min_size=1, max_size=6)


@given(rows, st.integers(1, 8), st.integers(1, 3), st.integers(0, 3), st.integers(0, 5))
def test_it_is_the_definition(many: list[list[int]], count: int, least: int, more: int, beyond: int) -> None:
    width = max(map(len, many)) + beyond
    ids = torch.randint(0, 4, (len(many), width), dtype=torch.int32)  # arbitrary behind a row's end
    for line, row in enumerate(many):
        ids[line, : len(row)] = torch.tensor(row)
    ends = torch.tensor([len(row) - 1 for row in many])
    found = follow(ids, ends, count, least, least + more)
    assert found.tolist() == [by_hand(row, count, least, least + more) for row in many]


def test_the_longest_match_counts_and_of_those_the_latest() -> None:
    #       1 2 3 -> 7          2 3 -> 8   1 2 3 -> 9    now 1 2 3
    row = [1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3, 9, 6, 2, 3, 4, 1, 2, 3]
    ids = torch.tensor([row], dtype=torch.int32)
    assert follow(ids, torch.tensor([18]), 2, 1, 3).tolist() == [[9, 6]]


def test_drafts_that_reach_the_end_go_on_with_themselves() -> None:
    ids = torch.tensor([[5, 8, 9, 8, 9, 0, 0]], dtype=torch.int32)
    assert follow(ids, torch.tensor([4]), 5, 1, 2).tolist() == [[8, 9, 8, 9, 8]]


def test_without_a_match_the_last_token_is_repeated() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 4]], dtype=torch.int32)
    assert follow(ids, torch.tensor([3]), 3, 1, 2).tolist() == [[4, 4, 4]]
