"""The least recently used entry is removed."""

from __future__ import annotations

from weft.common.recent import Recent


def test_what_was_used_longest_ago_goes_first() -> None:
    made: Recent[str, int] = Recent(2)
    made.put("a", 1)
    made.put("b", 2)
    assert made.get("a") == 1
    assert "b" in made, "to look is not to use"
    made.put("c", 3)
    assert list(made) == ["a", "c"]
    assert made.get("b") is None
    made.put("a", 4)
    made.put("d", 5)
    assert [made.get(key) for key in "acd"] == [4, None, 5]
    made.clear()
    assert len(made) == 0
