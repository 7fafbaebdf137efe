"""Every feature after a sleep, for every form of attention, in float64.

An engine answers all prompts, sleeps without weights, wakes up, and answers all prompts again. The tokens
equal those of runs alone. ``-m slow`` has one case of each form, ``-m grid`` each value of each feature.
``docs/composition.md`` has the results of a full run.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.composition.references import References
from tests.composition.rig import cases_of_forms, distinct_images, make_checkpoint, run
from tests.composition.table import GroupTable
from tests.composition.test_pairs import NAMES, check_answers, check_engaged, of_family

CASES = cases_of_forms(of_family, NAMES)


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
