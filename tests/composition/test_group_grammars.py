"""Outputs under a grammar with separate prefill and decode groups, for every form of attention.

In float64 the outputs equal those of each sequence alone, with any other features active.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.composition import groups, rig
from tests.composition.references import PLAIN, References
from tests.composition.rig import FAMILIES, OTHERS, make_checkpoint
from tests.support.pairwise import covering, name
from tests.support.slow import mostly_slow
from weft.types.grammar import Regex

PATTERN = "(?:[a-z]{2}[0-9]){1,4}!"
FEATURES: dict[str, list[Any]] = {
    "blocks": ["same", "larger", "smaller"],
    "prefix": [False, True],
    "draft": ["none", "ngram"],
    "n": [1, 2],
    "logprobs": [False, True],
    "preempt": [False, True],
    "depth": [1, 2],
}
FIXED: dict[str, Any] = {"penalties": False, "stop": False, "kv": "auto", "chunk": 5, "ranks": (1, 1)}
NAMES = [family for family in (*FAMILIES, *OTHERS) if family != "generic"]
OF_EACH = [{**FIXED, **case} for case in covering(FEATURES)]
CASES = [pytest.param(family, OF_EACH[number], id=family) for number, family in enumerate(NAMES)]
CASES += [
    pytest.param(family, case, marks=pytest.mark.grid, id=f"{family}-{name(case)}")
    for family in NAMES
    for case in OF_EACH
]


@pytest.mark.requirement("E31")
@mostly_slow(("family", "case"), CASES, [CASES[3]])
def test_outputs_under_a_grammar_are_those_of_each_sequence_alone(
    family: str, case: dict[str, Any], references: References
) -> None:
    folder, grammar = make_checkpoint(references.root, family), Regex(PATTERN)
    expected, _ = rig.run(folder, {**PLAIN, **FIXED, "chunk": 0, "n": case["n"]}, alone=True, grammar=grammar)
    made, seen = groups.run(folder, case, grammar=grammar)
    assert made.keys() == expected.keys()
    for key, answer in made.items():
        assert (answer.tokens, answer.text) == (expected[key].tokens, expected[key].text), key
        assert answer.finish == "stop"
        assert re.fullmatch(PATTERN, answer.text)
    assert seen.prefill.constrained_steps > 0
    assert seen.decode.constrained_steps > 0
    assert seen.decode.transfers is not None
    assert seen.decode.transfers.done >= sum(len(answer.tokens) > 1 for answer in made.values())
    assert (seen.decode.transfers.returns > 0) >= case["preempt"]
    assert (sum(seen.decode.drafts) > 0) >= (case["draft"] != "none")
