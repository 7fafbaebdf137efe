"""Every feature with separate prefill and decode groups, for every form of attention, in float64.

Tokens, text and logprobs equal those of each sequence alone. The form of attention is one more feature. The
default run has each value of each feature, ``-m slow`` every pair, ``-m grid`` the pairs for each form, also
with two ranks on one side. Models that read images have fewer cases. ``docs/composition.md`` has the results
of a full run.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.composition.groups import Seen, run
from tests.composition.references import References
from tests.composition.rig import (
    FAMILIES,
    OTHERS,
    SEEING,
    Answer,
    cases_of,
    distinct_images,
    make_checkpoint,
)
from tests.composition.table import GroupTable
from tests.composition.test_pairs import NAMES, OWN, ROOM
from tests.support.pairwise import covering, few_of, name

#: Feature -> values. The reference has the first value.
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


ENCODERS: dict[str, list[Any]] = {"encoders": [0, 1, 2]}
"""Number of encode groups for the group that computes prompts, in families with images."""


def of_family(family: str) -> dict[str, list[Any]]:
    own = {feature: values for feature, values in OWN.get(family, {}).items() if feature in FEATURES}
    return {**FEATURES, **RANKS, **({**ROOM, **ENCODERS} if family in SEEING else {}), **own}


def shown(family: str) -> list[str]:
    """Return the features of a family in the table: features set by cases, and implied features."""
    brought = ["images", "hits", "overlap"] if family in SEEING else []
    return brought + [feature for feature, values in of_family(family).items() if len(values) > 1]


def due(family: str, case: dict[str, Any]) -> list[str]:
    """Return the features that must be active in ``case``.

    With several ranks that compute prompts with images, steps are divided.
    """
    own = of_family(family)
    wanted = [feature for feature, value in case.items() if feature in own and value != own[feature][0]]
    return wanted + ["images"] * (family in SEEING) + ["overlap"] * overlaps(family, case)


def overlaps(family: str, case: dict[str, Any]) -> bool:
    return family in SEEING and case["ranks"][0] > 1


OF_FAMILIES = [
    (family, case) for family in NAMES for case in covering(of_family(family), cheap={"ranks": (1, 1)})
]


def by_default() -> list[tuple[str, dict[str, Any]]]:
    made = []
    forms = [family for family in (*FAMILIES, *OTHERS) if family != "generic"]
    for case in covering({"family": forms, **FEATURES}):
        family = case.pop("family")
        own = of_family(family)
        known = {
            feature: value if value in own[feature] else own[feature][0] for feature, value in case.items()
        }
        made.append((family, {**known, "ranks": (1, 1)}))
    return made + few_of([one for one in OF_FAMILIES if one[0] in SEEING and one[1]["ranks"] == (1, 1)])


CASES = cases_of(by_default(), every_form=False)  # test_pairs has every form
CASES += [
    pytest.param(family, case, marks=pytest.mark.grid, id=f"{family}-{name(case)}")
    for family, case in OF_FAMILIES
]


@pytest.mark.requirement("D24", "E31")
@pytest.mark.parametrize(("family", "case"), CASES)
def test_tokens_of_two_groups_are_those_of_each_sequence_alone(
    family: str, case: dict[str, Any], references: References, group_table: GroupTable
) -> None:
    expected, stop = references.of(family, case)
    folder = make_checkpoint(references.root, family)
    made, seen = run(folder, {**case, "overlap": overlaps(family, case)}, stop)
    assert made.keys() == expected.keys()
    for key, answer in made.items():
        assert answer.tokens == expected[key].tokens, key
        assert (answer.text, answer.finish) == (expected[key].text, expected[key].finish)
        assert bool(answer.logprobs) == case["logprobs"]
        for (token, value), (other, alone) in zip(answer.logprobs, expected[key].logprobs, strict=False):
            assert token == other
            assert abs(value - alone) < 1e-5
    # A sequence whose first token contains the stop string ends at the prefill group.
    _check_moved(seen, sum(len(answer.tokens) > 1 for answer in made.values()))
    engaged = _engaged(case, made, seen, distinct_images(folder))
    missing = [feature for feature in due(family, case) if feature not in engaged]
    assert not missing, f"did not engage: {missing}"
    group_table.ran(family, engaged)


def _check_moved(seen: Seen, sequences: int) -> None:
    """Check that every cache was transferred, and only evicted sequences were sent once more."""
    sent, got = seen.prefill.transfers, seen.decode.transfers
    assert sent is not None
    assert got is not None
    assert got.done >= sequences
    assert got.received_bytes > 0
    assert got.corrupt == 0


def _engaged(case: dict[str, Any], made: dict[Any, Answer], seen: Seen, distinct: int) -> set[str]:
    """Return the features that were active. The prompts have ``distinct`` images."""
    moved = seen.decode.transfers
    here, there = seen.prefill.images_encoded, sum(seen.encoded)
    again = here + there > distinct
    found = {
        "blocks": case["blocks"] != "same",
        "prefix": case["prefix"] and seen.prefill.prefix_hits > 0 and seen.decode.prefix_hits > 0,
        "draft": sum(seen.decode.drafts) > 0,
        "n": any(choice == 1 for _, choice in made),
        "logprobs": any(answer.logprobs for answer in made.values()),
        "penalties": case["penalties"],
        "stop": any(answer.finish == "stop" for answer in made.values()),
        "kv": case["kv"] != "auto",
        "preempt": moved is not None and moved.returns > 0,
        "chunk": seen.unfinished > 0 and case["chunk"] > 0,
        "depth": seen.deepest == 2,
        "ranks": case["ranks"] != (1, 1),
        "images": here + there > 0 and not seen.decode.images_encoded,
        "hits": seen.prefill.image_hits > 0,
        "encoders": there > 0 and not here,
        "overlap": seen.halved > 0,
        "room": case.get("room", "ample") != "ample" and (again or seen.lifted > 0),
    }
    return {feature for feature, there in found.items() if there}
