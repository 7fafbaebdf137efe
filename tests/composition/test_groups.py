"""Every feature with prefill and decode in groups of their own, for every form of attention, in float64: the
tokens, text and logprobs of each sequence alone.

By default the forms of attention are one more feature, and the cases cover every pair; ``-m grid`` covers the
pairs for each form, also with two ranks on one side. ``docs/composition.md`` has what a run of all found.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.composition.groups import Seen, run
from tests.composition.references import References
from tests.composition.rig import Answer, make_checkpoint
from tests.composition.table import GroupTable
from tests.composition.test_pairs import NAMES, OWN
from tests.support.pairwise import covering, name

#: Feature -> its values. The first one of each is that of the reference, alone.
FEATURES: dict[str, list[Any]] = {
    "blocks": ["same", "larger", "smaller"],
    "prefix": [False, True],
    "draft": ["none", "ngram"],
    "n": [1, 2],
    "logprobs": [False, True],
    "penalties": [False, True],
    "stop": [False, True],
    "kv": ["auto", "fp8"],
    "preempt": [False, True],
    "chunk": [0, 5],
    "depth": [1, 2],
}
RANKS = {"ranks": [(1, 1), (2, 1), (1, 2)]}


def of_family(family: str) -> dict[str, list[Any]]:
    own = {feature: values for feature, values in OWN.get(family, {}).items() if feature in FEATURES}
    return {**FEATURES, **RANKS, **own}


def by_default() -> list[tuple[str, dict[str, Any]]]:
    made = []
    for case in covering({"family": NAMES, **FEATURES}):
        family = case.pop("family")
        own = of_family(family)
        known = {
            feature: value if value in own[feature] else own[feature][0] for feature, value in case.items()
        }
        made.append((family, {**known, "ranks": (1, 1)}))
    return made


CASES = [pytest.param(*case, id=f"{case[0]}-{name(case[1])}") for case in by_default()]
CASES += [
    pytest.param(family, case, marks=pytest.mark.grid, id=f"{family}-{name(case)}")
    for family in NAMES
    for case in covering(of_family(family), cheap={"ranks": (1, 1)})
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_tokens_of_two_groups_are_those_of_each_sequence_alone(
    family: str, case: dict[str, Any], references: References, group_table: GroupTable
) -> None:
    expected, stop = references.of(family, case)
    made, seen = run(make_checkpoint(references.root, family), case, stop)
    assert made.keys() == expected.keys()
    for key, answer in made.items():
        assert answer.tokens == expected[key].tokens, key
        assert (answer.text, answer.finish) == (expected[key].text, expected[key].finish)
        assert bool(answer.logprobs) == case["logprobs"]
        for (token, value), (other, alone) in zip(answer.logprobs, expected[key].logprobs, strict=False):
            assert token == other
            assert abs(value - alone) < 1e-5
    # One whose first token has its stop string in it ends where its prompt was computed.
    _check_moved(seen, sum(len(answer.tokens) > 1 for answer in made.values()))
    engaged = _engaged(case, made, seen)
    first = {feature: values[0] for feature, values in of_family(family).items()}
    missing = [
        feature for feature, value in case.items() if value != first[feature] and feature not in engaged
    ]
    assert not missing, f"did not engage: {missing}"
    group_table.ran(family, engaged)


def _check_moved(seen: Seen, sequences: int) -> None:
    """Every sequence's cache went over; only what was evicted was sent once more."""
    sent, got = seen.prefill.transfers, seen.decode.transfers
    assert sent is not None
    assert got is not None
    assert got.done >= sequences
    assert got.received_bytes > 0
    assert got.corrupt == 0


def _engaged(case: dict[str, Any], made: dict[Any, Answer], seen: Seen) -> set[str]:
    """The features that were seen to be at work."""
    moved = seen.decode.transfers
    found = {
        "blocks": case["blocks"] != "same",
        "prefix": case["prefix"] and seen.prefill.prefix_hits > 0 and seen.decode.prefix_hits > 0,
        "draft": sum(seen.decode.drafts) > 0,
        "n": any(choice == 1 for _, choice in made),
        "logprobs": any(answer.logprobs for answer in made.values()),
        "penalties": case["penalties"],
        "stop": any(answer.finish == "stop" for answer in made.values()),
        "kv": case["kv"] != "auto",
        "preempt": moved is not None and moved.evictions > 0,
        "chunk": seen.unfinished > 0 and case["chunk"] > 0,
        "depth": seen.deepest == 2,
        "ranks": case["ranks"] != (1, 1),
    }
    return {feature for feature, there in found.items() if there}
