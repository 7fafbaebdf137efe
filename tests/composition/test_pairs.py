"""Every two features together, for every form of attention, in float64: tokens equal those of runs alone.

A case sets every feature to a value, and asserts that its features were active. The form of attention is one
more feature. The default run has each value of each feature, ``-m slow`` every pair of values, ``-m grid``
the pairs for each form. Models that read images have fewer cases. ``docs/composition.md`` has the results of
a full run.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.composition.references import References
from tests.composition.rig import (
    FAMILIES,
    OTHERS,
    SEEING,
    Answer,
    cases_of,
    distinct_images,
    make_checkpoint,
    run,
)
from tests.composition.table import Table
from tests.support.pairwise import covering, few_of, name

#: Feature -> values. The reference has the first value.
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
    "lora": [False, True],
}
#: Different values for some families.
OWN: dict[str, dict[str, list[Any]]] = {
    "latent": {"draft": ["none", "ngram", "mtp"]},
    # This form of attention takes no adapters.
    "sparse": {"lora": [False]},
    "images, delta": {"draft": ["none", "ngram", "mtp"]},
}
#: Memory for embeddings, in families with images.
ROOM: dict[str, list[Any]] = {"room": ["ample", "little", "host"]}
NAMES = [*FAMILIES, *OTHERS, *SEEING]


def of_family(family: str) -> dict[str, list[Any]]:
    return {**FEATURES, **(ROOM if family in SEEING else {}), **OWN.get(family, {})}


def shown(family: str) -> list[str]:
    """Return the features of a family in the table: features set by cases, and features of the prompts."""
    brought = ["images", "hits"] if family in SEEING else []
    return brought + [feature for feature, values in of_family(family).items() if len(values) > 1]


OF_FAMILIES = [(family, case) for family in NAMES for case in covering(of_family(family))]


def by_default() -> list[tuple[str, dict[str, Any]]]:
    """Return the families without images, and a minimal number of cases with images."""
    made = []
    # The generic form differs in the code of the model alone, so its cases are slow.
    forms = [family for family in (*FAMILIES, *OTHERS) if family != "generic"]
    for case in covering({"family": forms, **FEATURES}):
        family = case.pop("family")
        own = of_family(family)
        made.append((family, {f: value if value in own[f] else own[f][0] for f, value in case.items()}))
    made.append(next(one for one in OF_FAMILIES if one[1]["draft"] == "mtp"))
    return made + few_of([one for one in OF_FAMILIES if one[0] in SEEING])


CASES = cases_of(by_default())
CASES += [
    pytest.param(*one, marks=pytest.mark.slow, id=f"generic-{name(one[1])}")
    for one in few_of([one for one in OF_FAMILIES if one[0] == "generic"])
]
CASES += [
    pytest.param(*one, marks=pytest.mark.grid, id=f"{one[0]}-{name(one[1])}-of its form")
    for one in OF_FAMILIES
]


@pytest.mark.requirement("B10", "D24")
@pytest.mark.parametrize(("family", "case"), CASES)
def test_tokens_are_those_of_each_sequence_alone(
    family: str, case: dict[str, Any], references: References, table: Table
) -> None:
    expected, stop = references.of(family, case)
    folder = make_checkpoint(references.root, family)
    made, seen = run(folder, case, stop)
    check_answers(case, made, expected)
    engaged = check_engaged(family, case, made, seen, distinct_images(folder))
    for pair in itertools.combinations(sorted(engaged), 2):
        table.ran(family, pair)


def check_answers(case: dict[str, Any], made: dict[Any, Answer], expected: dict[Any, Answer]) -> None:
    """Assert that the answers ``made`` have the tokens, text and logprobs of the sequences alone."""
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


def check_engaged(
    family: str, case: dict[str, Any], made: dict[Any, Answer], seen: Any, distinct: int
) -> set[str]:
    """Return the features that were active. Assert that all features of ``case`` were."""
    engaged = _engaged(case, made, seen, distinct)
    own = of_family(family)
    missing = [
        feature for feature, value in case.items() if value != own[feature][0] and feature not in engaged
    ]
    missing += [feature for feature in shown(family) if feature == "images" and feature not in engaged]
    assert not missing, f"did not engage: {missing}"
    return engaged


def _lacks_room(case: dict[str, Any], seen: Any, distinct: int) -> bool:
    """Return True if images were encoded again for lack of space, or came back from host memory."""
    room = case.get("room", "ample")
    return room != "ample" and bool(seen.lifted if room == "host" else seen.stats.images_encoded > distinct)


def _engaged(case: dict[str, Any], made: dict[Any, Answer], seen: Any, distinct: int) -> set[str]:
    """Return the features that were active. The prompts have ``distinct`` images."""
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
        "lora": seen.placed >= 2,
        "images": stats.images_encoded > 0,
        "hits": stats.image_hits > 0,
        "room": _lacks_room(case, seen, distinct),
    }
    return {feature for feature, there in found.items() if there}
