"""Every feature after a sleep, for every form of attention, in float64.

An engine answers all prompts, sleeps without weights, wakes up, and answers all prompts again. The tokens
equal those of runs alone. ``-m slow`` has one case of each form, ``-m grid`` each value of each feature.
``docs/composition.md`` has the results of a full run.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.composition.references import References
from tests.composition.rig import distinct_images, make_checkpoint, run
from tests.composition.table import GroupTable
from tests.composition.test_pairs import NAMES, check_answers, check_engaged, of_family
from tests.support.pairwise import covering, few_of, name

OF_FAMILIES = {family: few_of([(family, case) for case in covering(of_family(family))]) for family in NAMES}
CASES = [
    pytest.param(
        *OF_FAMILIES[family][0],
        marks=pytest.mark.slow,
        id=f"{family}-{name(OF_FAMILIES[family][0][1])}",
    )
    for family in NAMES
]
CASES += [
    pytest.param(*one, marks=pytest.mark.grid, id=f"{family}-{name(one[1])}-of its form")
    for family in NAMES
    for one in OF_FAMILIES[family]
]


@pytest.mark.requirement("B10")
@pytest.mark.parametrize(("family", "case"), CASES)
def test_tokens_after_a_sleep_are_those_of_each_sequence_alone(
    family: str, case: dict[str, Any], references: References, sleep_table: GroupTable
) -> None:
    expected, stop = references.of(family, case)
    folder = make_checkpoint(references.root, family)
    made, seen = run(folder, {**case, "sleep": 2}, stop)
    check_answers(case, made, expected)
    sleep_table.ran(family, check_engaged(family, case, made, seen, distinct_images(folder)))
