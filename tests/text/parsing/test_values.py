"""Argument values written as text, and their JSON values."""

from __future__ import annotations

import json

import pytest

from weft.text.parsing.json_text import MAX_DEPTH
from weft.text.parsing.values import to_json


def test_brackets_in_strings_are_no_depth() -> None:
    text = json.dumps({"code": "[{" * MAX_DEPTH, 'a \\"[': ["]" * 3, "\\["]})
    assert to_json(text, ("object",)) == text


@pytest.mark.parametrize(("open_", "close"), [("[", "]"), ('{"a":', "}")])
def test_what_is_too_deep_is_a_string(open_: str, close: str) -> None:
    fits = open_ * MAX_DEPTH + "1" + close * MAX_DEPTH
    assert to_json(fits, ()) == fits
    assert json.loads(to_json(open_ + fits + close, ())) == open_ + fits + close
