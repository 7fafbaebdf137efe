"""Grammars of calls and answers accept only the form of the family, and every allowed output parses as
calls.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.support.slow import mostly_slow
from tests.support.text_folders import write_tokenizer
from tests.text.parsing.checks import read
from tests.text.parsing.families import FAMILIES, SAME, SPEC, TOOLS, Call, Calls, Family, ReasoningMarks
from tests.text.parsing.outputs import Maker
from weft.common.errors import InvalidRequest
from weft.grammar.base import GrammarCompiler
from weft.grammar.registry import make_compiler
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content
from weft.text.parsing.formats import CALLS
from weft.text.parsing.output import ModelOutput
from weft.text.parsing.parser import OutputSpec, Tool
from weft.text.tokenizer import Tokenizer
from weft.types.grammar import Grammar, JsonSchema, Text

pytest.importorskip("llguidance")
NAMES = sorted(FAMILIES.keys() - {"python_tag", "mistral_list", "bare", "functools", "llama4_json"})
KEYWORDS = frozenset(("pythonic", "llama4", "lfm2", "olmo3"))
_TOKEN = re.compile(r"</?[^\s\"=]+>|\[/?[A-Z_]+\]")


class Held:
    """A family's grammars over a small tokenizer in which the family's marks are tokens."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family = family
        special = sorted(mark for mark in family.declared.marks() if _TOKEN.fullmatch(mark))
        folder.mkdir()
        write_tokenizer(folder, special=special)
        self.tokenizer = Tokenizer.load(folder)
        self.end = self.tokenizer.special["<|im_end|>"]
        self.compiler: GrammarCompiler = make_compiler(
            "llguidance", str(folder), self.tokenizer.vocab_size, (self.end,)
        )
        self.output = ModelOutput(family.declared, self.tokenizer.special)

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Return True if ``text`` is a complete output under ``grammar``."""
        matcher = self.compiler.compile(grammar).matcher()
        ids = self.tokenizer.encode(text, parse_special=True)
        return all(matcher.accept(token) for token in ids) and matcher.accept(self.end)

    def some_output(self, grammar: Grammar, source: random.Random) -> str | None:
        """Return a random output under ``grammar``, or None if the output did not end in time."""
        matcher = self.compiler.compile(grammar).matcher()
        words = np.zeros((self.tokenizer.vocab_size + 31) // 32, np.int32)
        closing = [self.tokenizer.encode(text)[0] for text in '"}])0'] + [self.end]
        ids: list[int] = []
        for _ in range(1_500):
            matcher.fill(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: self.tokenizer.vocab_size]).tolist()
            ends = [token for token in closing if token in allowed]
            marks = [token for token in allowed if token >= 256 and token != self.end]
            if marks and source.random() < 0.3:
                token = source.choice(marks)
            else:
                token = source.choice(ends) if ends and source.random() < 0.5 else source.choice(allowed)
            assert matcher.accept(token)
            if token == self.end:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            ids.append(token)
        return None


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SAME else []) for name in NAMES],
)
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Held:
    return Held(FAMILIES[request.param], tmp_path_factory.mktemp("grammars") / request.param)


def ordered(calls: Sequence[Call]) -> list[Call]:
    """Return the calls with arguments in the order of the schema, as grammars require."""
    order = list(TOOLS[0].parameters["properties"])
    return [
        Call(one.name, {key: plain(one.arguments[key]) for key in order if key in one.arguments})
        for one in calls
    ]


def plain(value: Any) -> Any:
    """Return ``value`` without text that spells a token, and with lists of strings as in the schema."""
    if isinstance(value, str):
        return re.sub(r"[<\[]", "(", value)
    if isinstance(value, list):
        return [plain(str(item)) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def written(family: Family, calls: Sequence[Call]) -> str:
    if family.name in KEYWORDS:  # under a grammar values are written as JSON
        made = []
        for one in calls:
            values = [
                f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in one.arguments.items()
            ]
            made.append(f"{one.name}({', '.join(values)})")
        if family.name == "olmo3":
            return "<function_calls>\n" + "\n".join(made) + "\n</function_calls>"
        listed = f"[{', '.join(made)}]"
        return (
            listed
            if family.name in ("pythonic", "llama4")
            else f"<|tool_call_start|>{listed}<|tool_call_end|>"
        )
    if family.name == "gpt_oss":
        return family.render([Calls(tuple(calls[:1]))]).removesuffix("<|call|>")  # an end of turn
    return family.write_calls(calls, 0)


def required(held: Held, **more: Any) -> Grammar:
    grammar = held.output.call_grammar(TOOLS, "required", **more)
    assert grammar is not None
    return grammar


def some_calls(held: Held, seed: int) -> list[Call]:
    maker = Maker(held.family, random.Random(seed))
    calls = ordered(maker.calls().calls)
    if held.family.name in KEYWORDS:  # all keywords are optional here: any order, but at least one keyword
        calls = [one for one in calls if one.arguments] or [Call("get", {"days": 1})]
    return calls[:1] if held.family.name == "gpt_oss" else calls


def prefix(held: Held) -> str:
    """Return reasoning in the form of the family before a call."""
    text = held.family.render([ReasoningMarks("Let me see.")])
    return text + "<|start|>assistant" if held.family.name == "gpt_oss" else text


def behind_opening(held: Held) -> str:
    """Return the rest of the reasoning after an opening that the prompt contains."""
    opening = "<|message|>" if held.family.name == "gpt_oss" else held.family.open
    return prefix(held).partition(opening)[2]


def test_required_calls_are_what_the_family_writes(held: Held) -> None:
    grammar = required(held)
    opened = required(held, in_reasoning=True)
    for seed in range(6):
        text = written(held.family, some_calls(held, seed))
        assert held.takes(grammar, text), text
        assert held.takes(grammar, prefix(held) + text), "a model that opens its thought itself"
        assert held.takes(opened, behind_opening(held) + text)
        assert not held.takes(grammar, "Sure. " + text)
        assert not held.takes(grammar, text.replace("get", "got").replace("mcp", "mcq"))
    assert not held.takes(grammar, "")
    assert not held.takes(grammar, "Sure.")


def test_one_call_where_more_are_not_asked_for(held: Held) -> None:
    if held.family.name == "gpt_oss":
        pytest.skip("one call ends the turn")
    calls = [Call("get", {"days": 1}), Call("get_weather", {"days": 2})]
    assert held.takes(required(held), written(held.family, calls))
    assert not held.takes(required(held, parallel=False), written(held.family, calls))
    assert held.takes(required(held, parallel=False), written(held.family, calls[:1]))


@mostly_slow("choice", ["required", "auto"], ["required"])
def test_what_is_allowed_is_read_as_calls(held: Held, choice: Any) -> None:
    """Random outputs under the grammar: each is read, and arguments are valid under the tool's schema."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "mode": {"enum": ["a", "b"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = (Tool(name="get", parameters=schema, strict=True), Tool(name="zap", strict=False))
    grammar = held.output.call_grammar(tools, choice)
    assert grammar is not None
    spec = OutputSpec(tools=tools, tool_calls=True, reasoning=True)
    ended = whole = 0
    for seed in range(25):
        text = held.some_output(grammar, random.Random(seed))
        if text is None:
            continue
        ended += 1
        events = read(held.family.declared, spec, [text])
        begun = [event for event in events if isinstance(event, CallBegin)]
        whole += len(begun)
        assert len(begun) == sum(isinstance(event, CallEnd) for event in events), text
        assert begun or choice == "auto", text
        for event in events:
            if isinstance(event, CallArguments) and begun[event.call].name == "get":
                jsonschema.validate(json.loads(event.text), schema)
    assert ended >= 5
    assert whole >= 3 or choice == "auto"


def test_a_reasoning_holds_no_call(held: Held) -> None:
    """A call inside reasoning would be read as a call with unconstrained arguments."""
    call = held.family.declared.calls[0] if held.family.declared.calls else None
    if call is None or call.line_start:
        pytest.skip("no call of this family is read inside a thought")
    text = prefix(held) + written(held.family, [Call("get", {"days": 1})])
    assert held.takes(required(held), text)
    assert not held.takes(required(held), text.replace("Let me", f"Let {call.triggers[0]} me"))


def test_tools_that_are_not_strict_need_no_grammar(held: Held) -> None:
    assert held.output.call_grammar(TOOLS, "auto") is None


@pytest.mark.requirement("G6")
def test_an_answer_behind_a_reasoning(held: Held) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    grammar = held.output.answer_grammar(JsonSchema(schema=schema))
    final = "<|channel|>final<|message|>" if held.family.name == "gpt_oss" else ""
    text = f'{prefix(held)}{final}{{"a": 1}}'
    assert held.takes(grammar, text)
    assert held.takes(grammar, final + '{"a": 1}')
    assert not held.takes(grammar, prefix(held) + final + '{"a": "x"}')
    events = read(held.family.declared, SPEC, [text])
    assert events[-1] == Content('{"a": 1}')
    opened = held.output.answer_grammar(Text("yes"), in_reasoning=True)
    behind = behind_opening(held)
    assert held.takes(opened, behind + final + "yes")
    assert not held.takes(opened, final + "yes")
    plain = held.output.answer_grammar(Text("yes"), reasoning=False)
    assert held.takes(plain, final + "yes")
    assert not held.takes(plain, prefix(held) + final + "yes")


def test_what_cannot_be_held_to_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}}}
    tool = Tool(name="f", parameters=schema, strict=True)
    with pytest.raises(InvalidRequest, match="minLength"):
        ModelOutput(FAMILIES["glm45"].declared, {}).call_grammar((tool,), "auto")
    with pytest.raises(InvalidRequest, match="--tool-call-parser"):
        ModelOutput(None, {}).call_grammar((tool,), "required")
    for name, key in (("lfm2", "a b"), ("gemma4", "a:b"), ("gemma4", "")):
        odd = Tool(name="f", parameters={"type": "object", "properties": {key: {"type": "integer"}}})
        with pytest.raises(InvalidRequest, match=r"tool f: .* name of a parameter"):
            ModelOutput(FAMILIES[name].declared, {}).call_grammar((odd,), "required")
    assert ModelOutput(None, {}).call_grammar(TOOLS, "auto") is None


@pytest.mark.parametrize("name", ["llama3_json", "llama4", "pythonic"])
def test_a_strict_tool_has_no_call_that_its_grammar_does_not_see(name: str) -> None:
    """The grammar of a family without tags allows any text behind the first character of a line."""
    declared = CALLS[name]
    tool = Tool(
        name="f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True
    )
    calls = ('[f(a="x")]<|python_end|>', '{"name": "f", "parameters": {"a": "x"}}')
    for call in (f"See {tag}{call}" for tag in ("<|python_start|>", "<|python_tag|>") for call in calls):
        assert read(declared, OutputSpec(tools=(tool,), tool_calls=True), [call]) == [Content(call)]


def test_keys_and_texts_beyond_the_notation_stand_in_quotes_of_json() -> None:
    inner = {"type": "object", "properties": {"x:y": {"enum": ['a<|"|>b']}}, "required": ["x:y"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    grammar = ModelOutput(FAMILIES["gemma4"].declared, {}).call_grammar(
        (Tool(name="f", parameters=schema),), "required", reasoning=False
    )
    assert '"x:y":' in repr(grammar)
    assert 'a<|"|>b<|"|>' not in repr(grammar)
