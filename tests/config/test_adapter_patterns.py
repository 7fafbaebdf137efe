"""Patterns of module names: the matches of the module ``re``, in bounded time."""

from __future__ import annotations

import re
import time

import pytest

from weft.config.adapter_files import patterns
from weft.config.adapter_files.patterns import PatternError, Patterns

NAMES = [
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "q_proj",
    "xq_proj",
    "aab",
]
KEYS = [
    "q_proj",
    "layers.1.self_attn.q_proj",
    r"layers\.1\..*down_proj",
    r"^model\.layers\.1\..*",
    r".*\.(q|down)_proj",
    r"layers\.[0-9]+\.self_attn\.[^k]_proj$",
    r"layers\.\d{2}\..*",
    r"(?:a|ab)+",
    r"a{1,2}b",
    r"a{3,}b?",
    r"x?q_proj",
    r"(self_attn|mlp)\.\w+",
    r"a*?b|",
]


@pytest.mark.parametrize("key", KEYS)
def test_matches_of_the_module_re(key: str) -> None:
    made = Patterns([(key, 1)])
    for name in NAMES:
        assert made.find(name, 0) == int(re.match(rf"(.*\.)?({key})$", name) is not None), name


def test_the_first_fitting_pattern_counts() -> None:
    made = Patterns([("nothing", 1), (".*", 2), ("q_proj", 3)])
    assert made.find("a.q_proj", 0) == 2


@pytest.mark.parametrize(
    "key", ["(", ")", "[a", "*a", r"(a)\1", "(?=a)", "a{", "a{x}", "a" * 600 + "*", r"a\b"]
)
def test_patterns_that_are_not_understood(key: str) -> None:
    with pytest.raises(PatternError):
        Patterns([(key, 1)])


@pytest.mark.slow
def test_hostile_patterns_end() -> None:
    """A backtracking matcher needs exponential time for the first pattern."""
    began = time.process_time()
    assert Patterns([("(a*)*b", 1)]).find("a" * 60, 0) == 0
    with pytest.raises(PatternError):
        Patterns([("((a{1,99}){1,99}){1,99}", 1)])
    costly = Patterns([(f"(.?){{500}}b{number}", number) for number in range(50)])
    with pytest.raises(PatternError, match="steps"):
        costly.find("a." * 100, 0)
    assert time.process_time() - began < 60


def test_many_plain_patterns_for_many_modules_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MOST_STEPS", 1000)
    many = Patterns([(f"layers.{number}.q_proj", number) for number in range(100)])
    assert many.find("layers.7.q_proj", -1) == 7
    for _ in range(9):
        assert many.find("layers.1.v_proj", -1) == -1
    with pytest.raises(PatternError, match="steps"):
        many.find("layers.1.v_proj", -1)
