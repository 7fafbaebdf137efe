"""Grammars without recursion become one pattern, which a JSON schema can hold."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from tests.grammar.rig import Rig
from weft.grammar.regular import MAX_PATTERN, regular_pattern
from weft.types.grammar import JsonSchema

EDITS = r"""
// the files of an edit, one after the other
start: opening change+ closing
opening: "*** Begin" EOL
closing: "*** End" EOL?          # the last line may have no end
change: create | ("*** Drop: " file EOL)
create.2: "*** Create: " file EOL content~1..3
file: /[^\n]+/
?content: "+" /.*/ EOL -> line
        | "/" EOL
%import common.LF -> EOL
"""
RIGHT = "*** Begin\n*** Create: a.py\n+print('hi\\there')\n/\n*** Drop: b\n*** End"
WRONG = ["", "*** Begin\n*** End", RIGHT.replace("+", "-"), RIGHT.replace("/\n", "/\n" * 3), RIGHT + "\n\n"]


def test_a_grammar_as_a_pattern() -> None:
    made = regular_pattern(EDITS)
    assert made is not None
    assert re.fullmatch(made, RIGHT)
    assert [text for text in WRONG if re.fullmatch(made, text)] == []


def test_a_text_inside_of_json_is_held_to_the_pattern() -> None:
    fields = {"input": {"type": "string", "pattern": regular_pattern(EDITS)}}
    grammar = JsonSchema(schema=json.dumps({"type": "object", "properties": fields, "required": ["input"]}))
    Rig("llguidance").check(
        grammar, [json.dumps({"input": RIGHT})], [json.dumps({"input": text}) for text in WRONG]
    )


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ('start: "a" ["b"] "c"?', "^(?:ab?c?)$"),
        ('start: A{2,3} | "."\nA: /[x-z]/', r"^(?:(?:[x-z]{2,3}|\.))$"),
        ('start: ("\\n" | WS)*\n%import common.WS', None),
    ],
)
def test_notations(source: str, pattern: str | None) -> None:
    made = regular_pattern(source)
    assert made is not None
    if pattern is not None:
        assert made == pattern
    re.compile(made)


@pytest.mark.parametrize(
    "source",
    [
        'start: "(" start? ")"',
        'start: a\na: b\nb: "x" a?',
        "start: missing",
        'other: "x"',
        'start: "x"i',
        "start: /x/i",
        'start: "x"\n%ignore " "',
        'start: "x" @other',
        'start: ("x"',
        'start: "x")',
        'start: "a"\nstart: "b"',
        "start: " + "(" * 5000 + '"x"' + ")" * 5000,
        "",
        "start: a a a a\n"
        + "".join(f"{x}: {y} {y} {y} {y}\n" for x, y in pairwise("abcdefghi"))
        + 'i: "0123"',
    ],
)
def test_what_has_no_pattern(source: str) -> None:
    assert regular_pattern(source) is None


def test_a_long_grammar_is_read_in_linear_time() -> None:
    assert regular_pattern("start: " + '"xy" ' * MAX_PATTERN) is None
    assert regular_pattern("start: " + "?" * 200_000) is None
