"""Texts are cut at marks and limits, and get a space before where a vocabulary wants one."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.vocabularies import kimi_cuts
from weft.text.segments import Segmentation, Segments, cut_runs


def test_runs_are_cut_as_one_character_at_a_time_would() -> None:
    rng = random.Random(1)
    for _ in range(5000):
        text = "".join(rng.choices("ab \n\x1c\u2003\u200b", k=rng.randint(1, 30)))
        longest = rng.randint(1, 5)
        assert cut_runs(text, longest) == kimi_cuts(text, len(text), longest), (text, longest)


def test_white_space_is_the_languages() -> None:
    for number in range(0x3100):
        char = chr(number)
        assert (len(cut_runs(" " + char, 1)) == 2) == char.isspace()


def test_limits_count_between_marks() -> None:
    segments = Segments(Segmentation(longest_text=4, longest_run=3), ["<b>", "<b>>"])
    assert segments.split("") == []
    assert segments.split("aa aa") == ["aa a", "a"]
    assert segments.split("aaaaaa") == ["aaa", "a", "aa"]
    assert segments.split("aaa<b>aaa<b>><b>a a") == ["aaa", "<b>", "aaa", "<b>>", "<b>", "a a"]


@pytest.mark.parametrize(
    ("prefix", "parts"),
    [("none", ["a", "<b>", " c"]), ("first", [" a", "<b>", " c"]), ("each", [" a", "<b>", "  c"])],
)
def test_spaces_before_texts(prefix: str, parts: list[str]) -> None:
    segments = Segments(Segmentation(prefix=prefix), ["<b>"])  # type: ignore[arg-type]
    assert segments.split("a<b> c") == parts
    assert segments.split("<b>")[0] == "<b>"
    assert Segments(Segmentation(prefix=prefix), []).split("") == []  # type: ignore[arg-type]


def test_the_cost_is_linear_in_the_length_whatever_the_text() -> None:
    def spent(text: str) -> float:
        begun = time.process_time()
        cut_runs(text, 25_000)
        return time.process_time() - begun

    for text in ("a" * 24_999 + " ", "a b\n ", "a", " "):
        assert spent(text * (1_000_000 // len(text))) < 1.0  # 0.1 s; a second look at each run takes minutes
