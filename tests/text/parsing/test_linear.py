"""The work of reading grows linearly with the output: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.slow import mostly_slow
from tests.text.parsing.families import FAMILIES, SPEC
from weft.text.parsing.json_text import JsonObjectScanner
from weft.text.parsing.parsing_engine import OutputEngine
from weft.text.parsing.values import types_of

FACTOR = 300
"""Maximum characters inspected or copied per output character. White space is inspected again while it may
belong to a mark."""
GROWTH = 1.1
SIZE = 1_500

BAD: dict[str, Callable[[int], str]] = {
    "brackets": lambda size: "[" * size,
    "braces": lambda size: "{" * size,
    "lines of braces": lambda size: "{\n" * (size // 2),
    "tags": lambda size: "<tool_call>" * (size // 11),
    "half tags": lambda size: "<tool_call" * (size // 10),
    "tags and objects": lambda size: '<tool_call>{"name": ' * (size // 20),
    "arguments first": lambda size: '<tool_call>{"arguments": {"a": ' * (size // 31),
    "arguments first, long": lambda size: '<tool_call>{"arguments": {"a": "' + "<tool_call>x" * (size // 12),
    "white space": lambda size: " " * size,
    "white space and tags": lambda size: (" " * 60 + "<tool_call>" + " " * 60) * (size // 131),
    "line ends": lambda size: "\n" * size,
    "thoughts": lambda size: "<think>\n" * (size // 8),
    "triggers": lambda size: "[TOOL_CALLS][" * (size // 13),
    "sections": lambda size: "<|tool_calls_section_begin|>" * (size // 28),
    "headers": lambda size: "<|channel|>commentary to=functions.get " * (size // 39),
    "starts": lambda size: "<|start|>assistant" * (size // 18),
    "names": lambda size: "[get(" * (size // 5),
    "functions": lambda size: "<function=get><parameter=city>" * (size // 30),
    "closing tags": lambda size: "<tool_call><function=get><parameter=city>" + "</parameter>" * (size // 12),
    "open parameters": lambda size: (
        "<tool_call><function=get><parameter=note>" + "\n<parameter=city>" * (size // 17)
    ),
    "weak closings": lambda size: (
        "<tool_call><function=get><parameter=note>" + "\n<parameter=city>\n</parameter>x" * (size // 30)
    ),
    "ends of calls": lambda size: "<tool_call><function=get><parameter=note>" + "</function>x" * (size // 12),
    "calls in a value": lambda size: (
        "<tool_call><function=get><parameter=note></function>x" + "\n<tool_call>" * (size // 12)
    ),
    "escapes": lambda size: '<tool_call>{"name": "get", "arguments": {"a": "' + "\\u1" * (size // 3),
    "quoted arguments": lambda size: '<tool_call>{"name": "get", "arguments": "{' + '\\"' * (size // 2),
    "commas and white space": lambda size: '<tool_call>{"name": "get", "arguments": {"a": 1,' + "\n" * size,
    "values": lambda size: "<tool_call><function=get><parameter=tags>" + "[" * size,
    "a long string": lambda size: '<tool_call>{"name": "get", "arguments": {"a": "' + "x" * size,
    "deep arguments": lambda size: '<tool_call>{"name": "get", "arguments": {"a": ' + "[" * size,
    "python strings": lambda size: "[get(city='" + "\\" * size,
    "python lists": lambda size: "[get(tags=" + "[" * size,
}


@pytest.mark.requirement("G3")
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"python_tag", "mistral_list", "bare"}))
@mostly_slow("bad", BAD, [*BAD][::16])
def test_work_is_linear(name: str, bad: str) -> None:
    for piece in (1, 7, 2 * SIZE):
        once, twice = (work(name, BAD[bad](size), piece) for size in (SIZE, 2 * SIZE))
        assert twice < FACTOR
        assert twice < GROWTH * once + 5, f"{once} and {twice} characters a character"


def work(name: str, text: str, piece: int) -> float:
    """Return the characters inspected or copied per character of ``text``."""
    engine = OutputEngine(FAMILIES[name].declared, SPEC)
    events = 0
    for start in range(0, len(text), piece):
        events += len(engine.feed(text[start : start + piece]))
    engine.close()
    assert events <= 2 * len(text)
    return engine.tape.work / len(text)


def test_json_is_looked_at_once() -> None:
    scanner = JsonObjectScanner()
    text = '{"a": [' + "1, " * 10_000
    for start in range(0, len(text), 5):
        piece = text[start : start + 5]
        assert scanner.take(piece, 0) == len(piece)
    assert scanner.work < 3 * len(text)


def test_types_of_definitions_that_refer_to_each_other_many_times() -> None:
    class Counted(dict[str, Any]):
        looked = 0

        def get(self, key: str, default: Any = None) -> Any:
            Counted.looked += 1
            return super().get(key, default)

    again = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 6
    root = Counted({"$defs": {"a": {"anyOf": again}, "b": {"oneOf": [*again, {"type": "integer"}]}}})
    assert types_of({"$ref": "#/$defs/a"}, root) == ("integer",)
    assert Counted.looked == 2
