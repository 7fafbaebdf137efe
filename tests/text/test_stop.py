"""Stop strings, wherever the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.text.detokenizer import StopFinder, StopMatch

LETTERS = st.text("ab.", max_size=24)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=3)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(start, stop) by definition: the first character at which any stop is complete; the longest there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def search(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """Return (released text, found stop string)."""
    finder = StopFinder(stops)
    given_out = ""
    for piece in pieces:
        made = finder.push(piece)
        if isinstance(made, StopMatch):
            return given_out + made.text, made.stop
        given_out += made
    return given_out + finder.finish(), None


@settings(max_examples=400)
@given(text=LETTERS, stops=STOPS, data=st.data())
def test_any_split_finds_the_first_complete_match(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = first_match(text, stops)
    if expected is None:
        assert search(pieces, stops) == (text, None)
    else:
        assert search(pieces, stops) == (text[: expected[0]], expected[1])


@pytest.mark.requirement("F63")
@pytest.mark.parametrize("cut", range(1, 12))
def test_every_boundary(cut: int) -> None:
    text = "12 + 7#### 19"
    assert search([text[:cut], text[cut:]], ["####"]) == ("12 + 7", "####")


@settings(max_examples=300)
@given(text=LETTERS, stops=STOPS)
def test_only_what_may_still_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    finder, given_out = StopFinder(stops), ""
    for at, char in enumerate(text, 1):
        made = finder.push(char)
        if isinstance(made, StopMatch):
            return
        given_out += made
        held = text[len(given_out) : at]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        longest = max(size for stop in stops for size in range(len(stop)) if text[:at].endswith(stop[:size]))
        assert len(held) == longest


def test_ignored_matches_pass_and_later_ones_count() -> None:
    finder = StopFinder(["ab"])
    assert finder.push("xab", ignore=True) == "xab"
    assert finder.push("a", ignore=True) == ""
    found = finder.push("b!")
    assert isinstance(found, StopMatch)
    assert (found.text, found.stop, found.rest) == ("", "ab", 1)


def test_looking_ahead_changes_nothing() -> None:
    finder = StopFinder(["abc"])
    assert finder.push("ab") == ""
    assert finder.would_match("c")
    assert not finder.would_match("d")
    assert isinstance(finder.push("c"), StopMatch)


def test_a_long_periodic_stop_is_cheap() -> None:
    finder = StopFinder(["a" * 1023 + "b"])
    total = "".join(str(finder.push("a")) for _ in range(20_000))
    assert len(total) == 20_000 - 1023
