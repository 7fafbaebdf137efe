"""Every output of every family: read rightly, every character once, the same in any pieces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.slow import mostly_slow
from tests.text.parsing.checks import check_output, read
from tests.text.parsing.families import FAMILIES, SAME, SPEC, by_value
from tests.text.parsing.outputs import Maker

TAGS = {"qwen3_coder", "glm45", "hy_v3", "deepseek_v32", "deepseek_v4", "minimax_m2", "seed_oss", "step3"}
RAW = frozenset(FAMILIES) - TAGS - {"pythonic", "llama4", "lfm2", "olmo3", "gemma4", "functiongemma"}
DEFAULT = [name for name in FAMILIES if name not in SAME]
SEEDS = st.integers(0, 2**63)
GRID = 5_000


def check_right(name: str, seed: int) -> None:
    """Assert that a rendered output gives exactly its parts, in any pieces."""
    family = FAMILIES[name]
    maker = Maker(family, random.Random(seed))
    parts = maker.parts()
    text = family.render(parts)
    events = read(family.declared, SPEC, [text])
    assert by_value(events) == by_value(family.expected(parts)), text
    assert read(family.declared, SPEC, maker.pieces(text)) == events, text
    check_output(family.declared, SPEC, text, raw_arguments=name in RAW)


def check_wrong(name: str, seed: int) -> None:
    """A mutated output loses nothing, and is read the same in any pieces."""
    family = FAMILIES[name]
    maker = Maker(family, random.Random(seed))
    text = maker.mutated(maker.output())
    spec = SPEC
    if maker.source.random() < 0.2:
        spec = type(SPEC)(
            tools=SPEC.tools,
            tool_calls=maker.source.random() < 0.7,
            reasoning=maker.source.random() < 0.7,
            in_reasoning=maker.source.random() < 0.5,
            parallel=False,
        )
    check_output(family.declared, spec, text, raw_arguments=name in RAW)
    events = read(family.declared, spec, [text])
    assert read(family.declared, spec, maker.pieces(text)) == events, text
    assert read(family.declared, spec, list(text)) == events, text


@pytest.mark.requirement("G3", "G4")
@mostly_slow("name", FAMILIES, DEFAULT)
@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_an_output_gives_its_parts(name: str, seed: int) -> None:
    check_right(name, seed)


@pytest.mark.requirement("G2")
@mostly_slow("name", FAMILIES, DEFAULT)
@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_a_mutated_output_loses_nothing(name: str, seed: int) -> None:
    check_wrong(name, seed)


@pytest.mark.parametrize(
    ("name", "seed"), [("mistral_list", 14840), ("gpt_oss", 20148), ("deepseek_v32", 30728)]
)
def test_mutated_outputs_that_once_seemed_to_lose_something(name: str, seed: int) -> None:
    check_wrong(name, seed)


@pytest.mark.requirement("G2")
@pytest.mark.grid
@pytest.mark.parametrize("name", FAMILIES)
def test_five_thousand_outputs_lose_nothing(name: str) -> None:
    for seed in range(GRID):
        try:
            check_right(name, seed)
            check_wrong(name, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
