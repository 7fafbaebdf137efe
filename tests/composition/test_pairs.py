"""Every two features together, for every form of attention: the tokens of each sequence alone, in float64.

A case sets every feature to one of its values; the cases of a family cover every pair of values of every two
features, and each case asserts that its features engaged. ``docs/composition.md`` is what a run of all of it
found (``pytest tests/composition/test_pairs.py --write-composition``).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.composition.references import References
from tests.composition.rig import FAMILIES, OTHERS, Answer, make_checkpoint, run
from tests.composition.table import Table
from tests.support.pairwise import covering, name

#: Feature -> its values. The first one of each is that of the reference, alone.
FEATURES: dict[str, list[Any]] = {
    "policy": ["exclusive", "mixed"],
    "chunk": [0, 5],
    "prefix": [False, True],
    "depth": [1, 2],
    "draft": ["none", "ngram"],
    "preempt": [False, True],
    "logprobs": [False, True],
    "n": [1, 2],
    "penalties": [False, True],
    "stop": [False, True],
    "kv": ["auto", "fp8"],
}
#: What a family has instead.
OWN: dict[str, dict[str, list[Any]]] = {
    "latent": {"draft": ["none", "ngram", "mtp"]},
    "sparse": {"kv": ["auto"]},  # its lines are compressed as the model was trained to
}
NAMES = [*FAMILIES, *OTHERS]
CASES = [(family, case) for family in NAMES for case in covering({**FEATURES, **OWN.get(family, {})})]


@pytest.mark.parametrize(
    ("family", "case"), CASES, ids=lambda value: value if isinstance(value, str) else name(value)
)
def test_tokens_are_those_of_each_sequence_alone(
    family: str, case: dict[str, Any], references: References, table: Table
) -> None:
    expected, stop = references.of(family, case)
    made, seen = run(make_checkpoint(references.root, family), case, stop)
    assert made.keys() == expected.keys()
    for key, answer in made.items():
        assert answer.tokens == expected[key].tokens, key
        assert (answer.text, answer.finish) == (expected[key].text, expected[key].finish)
        if case["logprobs"]:
            assert answer.logprobs
            for (token, value), (other, alone) in zip(answer.logprobs, expected[key].logprobs, strict=True):
                assert token == other
                assert abs(value - alone) < 1e-5
        else:
            assert not answer.logprobs
    engaged = _engaged(case, made, seen)
    missing = [
        feature for feature, value in case.items() if value != FEATURES[feature][0] and feature not in engaged
    ]
    assert not missing, f"did not engage: {missing}"
    for pair in itertools.combinations(sorted(engaged), 2):
        table.ran(family, pair)


def _engaged(case: dict[str, Any], made: dict[Any, Answer], seen: Any) -> set[str]:
    """The features that were seen to be at work."""
    stats = seen.stats
    found = {
        "policy": stats.mixed_steps > 0,
        "chunk": seen.unfinished > 0 and case["chunk"] > 0,
        "prefix": stats.prefix_hits > 0 and case["prefix"],
        "depth": seen.deepest == 2,
        "draft": sum(stats.drafts) > 0,
        "preempt": stats.preemptions > 0,
        "logprobs": any(answer.logprobs for answer in made.values()),
        "n": any(choice == 1 for _, choice in made),
        "penalties": case["penalties"],
        "stop": any(answer.finish == "stop" for answer in made.values()),
        "kv": case["kv"] != "auto",
    }
    return {feature for feature, there in found.items() if there}
