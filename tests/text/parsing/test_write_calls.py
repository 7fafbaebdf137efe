"""Calls written in the spelling of a family are read back, for every family."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.text_folders import write_tokenizer
from tests.text.parsing.checks import read
from tests.text.parsing.families import FAMILIES, SPEC, Call, Calls, by_value
from tests.text.parsing.outputs import Maker
from tests.text.published.conversations import calling, result, user
from weft.text.model import TextModel
from weft.text.parsing.declaration import OutputFormat
from weft.text.parsing.events import CallArguments, CallBegin, Content
from weft.text.parsing.write_calls import written_calls

FIRST = ("bare", "functools", "gpt_oss", "llama4_json", "mistral_list", "python_tag")
"""Families with a further spelling, or with messages instead of calls."""


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - set(FIRST)))
def test_written_calls_are_read_back(name: str) -> None:
    family = FAMILIES[name]
    for seed in range(8):
        calls = Maker(family, random.Random(seed)).calls().calls
        pieces = list(written_calls(family.declared, [(one.name, one.arguments) for one in calls]))
        text = "".join(piece.text for piece in pieces)
        events = read(family.declared, SPEC, [text])
        found = [
            (event.name, json.loads("".join(one.text for one in events if _is_of(one, event.call))))
            for event in events
            if isinstance(event, CallBegin)
        ]
        assert found == [(one.name, one.arguments) for one in calls], text
        assert not any(isinstance(event, Content) for event in events), text
        markup = "".join(piece.text for piece in pieces if piece.markup)
        assert not any(one.name in markup for one in calls)


def _is_of(event: object, call: int) -> bool:
    return isinstance(event, CallArguments) and event.call == call


def test_the_spelling_is_the_familys_own() -> None:
    calls = Calls((Call("get", {"days": 1, "city": "a"}), Call("get", {})))
    for name in ("hermes", "qwen3_coder", "deepseek_v32", "kimi_k2", "mistral", "gemma4", "nemotron_json"):
        family = FAMILIES[name]
        pieces = written_calls(family.declared, [(one.name, one.arguments) for one in calls.calls])
        assert "".join(piece.text for piece in pieces) == family.write_calls(calls.calls, 0)


def test_a_template_without_calls_gets_calls_as_text(tmp_path: Path) -> None:
    """Marks of the format become tokens, the same texts in arguments do not."""
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    template = "{%- for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ tools }}"
    write_tokenizer(tmp_path, special=marks, template=template)
    model = TextModel.load(tmp_path)
    turn = calling(("get", {"city": marks[1], "days": 2}), ("get", {}), content="Sure.")
    made = model.chat.encode([user("x"), turn, result(0, "y")], add_generation_prompt=False)
    call = f'{marks[0]}[get(city="{marks[1]}", days=2), get()]{marks[1]}'
    assert made.text.startswith(f"user:x;assistant:Sure.\n{call};tool:y;")
    assert [made.ids.count(model.tokenizer.special[mark]) for mark in marks] == [1, 1]
    behind = made.text.partition("Sure.")[2].partition(";tool")[0]
    assert by_value(read(_declared(model), SPEC, [behind]))[0] == CallBegin(call=0, name="get")


def _declared(model: TextModel) -> OutputFormat:
    assert model.output.declared is not None
    return model.output.declared
