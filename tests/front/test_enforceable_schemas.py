"""Requests with tools and response formats, read as the server reads them, with really compiled grammars."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.text_folders import TOOL_TEMPLATE, TOOL_TOKENS, write_tokenizer
from weft.common.errors import InvalidRequest, WeftError
from weft.front.protocol import enforceable_schemas
from weft.front.protocol.messages.read_messages import read_messages
from weft.front.protocol.responses.read import NONE, read_response
from weft.front.requests.read_ollama import read_ollama_chat
from weft.front.requests.reading import Job, Reader
from weft.front.requests.setup import GrammarCheck, Setup, TextSetup
from weft.grammar.guard.compile_jobs import Compile
from weft.grammar.registry import make_compiler
from weft.text.submit import ModelLimits
from weft.types.grammar import Grammar

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PATCH = 'start: "*** Begin" LF line+ "*** End"\nline: "+" /(.*)/ LF -> added\n%import common.LF'


class Unique(BaseModel):
    """Tool arguments for which pydantic writes ``uniqueItems``."""

    numbers: set[int]


class Waiting:
    """Compiles of a check that are done when they are returned."""

    def __init__(self, check: GrammarCheck) -> None:
        self._check = check

    def submit(self, grammar: Grammar, client: int) -> Compile:
        compiled = self._check.submit(grammar, client)
        with contextlib.suppress(WeftError):
            compiled.wait()
        return compiled


class Asked:
    """Read requests for a model with tools, and try outputs on the grammars of the requests."""

    def __init__(self, folder: Path, parser: str) -> None:
        folder.mkdir()
        write_tokenizer(folder, added=TOOL_TOKENS, template=TOOL_TEMPLATE)
        setup = TextSetup(tokenizer=str(folder), tool_call_parser=parser)
        text = setup.load()
        self.text = text
        self.limits = ModelLimits(vocab_size=512, max_model_len=4096, end_ids=text.end_ids)
        reading = Setup(text=setup, names=("m",), limits=self.limits, max_response_bytes=1 << 20)
        self.check = GrammarCheck(reading)
        self.reader: Reader = reading.reader(text).knowing({}, grammars=Waiting(self.check))
        self._compiler = make_compiler("llguidance", str(folder), 512, text.end_ids)

    def chat(self, **fields: Any) -> Job:
        return self.reader.chat(json.dumps({"messages": [HELLO], **fields}).encode())

    def takes(self, grammar: Grammar | None, output: str) -> bool:
        """Return True if ``output`` is a complete output under ``grammar``."""
        assert grammar is not None
        matcher = self._compiler.compile(grammar).matcher()
        ids = self.text.tokenizer.encode(output, parse_special=True)
        return all(matcher.accept(token) for token in ids) and matcher.accept(self.limits.end_ids[0])

    def refused(self, **fields: Any) -> str:
        with pytest.raises(InvalidRequest) as caught:
            self.chat(**fields)
        assert caught.value.param == "tools"
        return caught.value.message


HELLO = {"role": "user", "content": "hi"}


def tool(name: str = "weather", parameters: Any = CITY, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    asked = Asked(tmp_path_factory.mktemp("h") / "hermes", "hermes")
    yield asked
    asked.check.close()


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    asked = Asked(tmp_path_factory.mktemp("c") / "coder", "qwen3_coder")
    yield asked
    asked.check.close()


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    enforceable_schemas._log_once.cache_clear()


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", "any", NAMED])
@pytest.mark.parametrize("form", [FORM, {"type": "json_object"}])
def test_a_required_call_wins_over_a_form(hermes: Asked, choice: Any, form: Any) -> None:
    job = hermes.chat(tools=[tool()], tool_choice=choice, response_format=form)
    assert hermes.takes(job.grammar, OSLO)
    assert not hermes.takes(job.grammar, "1")
    assert not hermes.takes(job.grammar, "{}")


def test_a_required_call_wins_over_a_form_in_other_apis(hermes: Asked) -> None:
    plain = {"type": "function", "name": "weather", "parameters": CITY}
    form = {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}
    for choice in ("required", {"type": "function", "name": "weather"}):
        body = {"input": "x", "tools": [plain], "tool_choice": choice, "text": {"format": form}}
        job = read_response(hermes.reader, NONE + json.dumps(body).encode())
        assert (hermes.takes(job.grammar, OSLO), hermes.takes(job.grammar, "1")) == (True, False)
    asked = {
        "max_tokens": 9,
        "messages": [HELLO],
        "tools": [{"name": "weather", "input_schema": CITY}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}},
    }
    job = read_messages(hermes.reader, json.dumps(asked).encode())
    assert (hermes.takes(job.grammar, OSLO), hermes.takes(job.grammar, "1")) == (True, False)


NOTHING: list[Any] = [
    None,
    {},
    {"type": "object"},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": None, "required": None},
    {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    {"title": "Nothing", "description": "no arguments", "properties": {}},
]


@pytest.mark.parametrize("parameters", NOTHING)
def test_a_tool_without_properties_has_empty_arguments(hermes: Asked, coder: Asked, parameters: Any) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    job = hermes.chat(tools=[tool("now", parameters)], tool_choice=named)
    assert hermes.takes(job.grammar, call("now", "{}"))
    assert not hermes.takes(job.grammar, call("now", '{"a": 1}'))
    job = coder.chat(tools=[tool("now", parameters)], tool_choice=named)
    head = "<tool_call>\n<function=now>\n"
    assert coder.takes(job.grammar, head + "</function>\n</tool_call>")
    assert not coder.takes(job.grammar, head + "<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>")


def test_an_open_tool_takes_any_object(hermes: Asked) -> None:
    opened = tool("free", {"type": "object", "additionalProperties": True})
    job = hermes.chat(tools=[opened], tool_choice="required")
    assert hermes.takes(job.grammar, call("free", '{"a": 1}'))


@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": None}])
def test_a_tool_that_is_not_strict_loses_what_no_grammar_holds(
    hermes: Asked, caplog: pytest.LogCaptureFixture, strict: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {
        "tools": [tool("sum", Unique.model_json_schema(), **strict)],
        "tool_choice": "required",
    }
    with caplog.at_level(logging.WARNING, "weft"):
        job = hermes.chat(**asked)
        hermes.chat(**asked)
    (said,) = caplog.messages
    assert "tool sum: uniqueItems (at /properties/numbers)" in said
    assert hermes.takes(job.grammar, call("sum", '{"numbers": [1, 1]}'))
    assert not hermes.takes(job.grammar, call("sum", '{"numbers": ["x"]}')), "the rest is held to"


def test_a_form_that_is_not_strict_loses_what_no_grammar_holds(
    hermes: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    def form(strict: bool) -> dict[str, Any]:
        named = {"name": "x", "schema": Unique.model_json_schema(), "strict": strict}
        return {"type": "json_schema", "json_schema": named}

    with pytest.raises(InvalidRequest, match=r"/properties/numbers\); set strict to false"):
        hermes.chat(response_format=form(True))
    assert not caplog.messages
    job = hermes.chat(response_format=form(False))
    assert hermes.takes(job.grammar, '{"numbers": [1, 1]}')
    assert not hermes.takes(job.grammar, '{"numbers": ["x"]}')
    (said,) = caplog.messages
    assert "response_format: uniqueItems (at /properties/numbers)" in said
    body = {"input": "x", "text": {"format": {"type": "json_schema", **form(False)["json_schema"]}}}
    job = read_response(hermes.reader, NONE + json.dumps(body).encode())
    assert hermes.takes(job.grammar, '{"numbers": [1, 1]}')


@pytest.mark.parametrize(("kind", "choice"), [("hermes", "auto"), ("coder", "auto"), ("coder", "required")])
def test_errors_name_the_tool_and_the_place(request: Any, kind: str, choice: str) -> None:
    asked: Asked = request.getfixturevalue(kind)
    tools = [tool(), tool("sum", Unique.model_json_schema(), strict=True)]
    said = asked.refused(tools=tools, tool_choice=choice)
    assert "tools[1] (sum)" in said
    assert "uniqueItems" in said
    assert "/properties/numbers" in said


def test_what_is_no_schema_is_named_with_its_place(hermes: Asked) -> None:
    wrong = {"type": "object", "properties": {"a/b": {"type": "array", "items": {"required": 5}}}}
    said = hermes.refused(tools=[tool("f", wrong)])
    assert "tools[0] (f)" in said
    assert "/properties/a~1b/items" in said


def test_a_format_may_bring_its_schema(hermes: Asked) -> None:
    for form in (
        {"type": "json_object", "schema": CITY},
        {"type": "json_schema", "schema": CITY},
        {"type": "json_schema", "name": "x", "schema": CITY, "strict": True},
    ):
        job = hermes.chat(response_format=form)
        assert hermes.takes(job.grammar, '{"city": "Oslo"}')
        assert not hermes.takes(job.grammar, '{"city": 1}')
    body = {"input": "x", "text": {"format": {"type": "json_object", "schema": CITY}}}
    job = read_response(hermes.reader, NONE + json.dumps(body).encode())
    assert not hermes.takes(job.grammar, '{"city": 1}')


def custom(asked: Asked, syntax: str, definition: str, **fields: Any) -> Job:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    made = {"type": "custom", "name": "patch", "description": "Edits files.", "format": form}
    body = {"input": "x", "tools": [made], **fields}
    return read_response(asked.reader, NONE + json.dumps(body).encode())


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "patch"}])
def test_a_custom_tool_is_held_to_its_grammar(hermes: Asked, choice: Any) -> None:
    job = custom(hermes, "lark", PATCH, tool_choice=choice)
    right = json.dumps({"input": "*** Begin\n+a = 1\n*** End"})
    assert hermes.takes(job.grammar, call("patch", right))
    assert not hermes.takes(job.grammar, call("patch", '{"input": "hello"}'))
    prompt = hermes.text.tokenizer.decode(job.prompts[0].ids)
    assert "Edits files." in prompt
    assert "*** Begin" in prompt, "the model is told the grammar"


def test_a_custom_tool_with_a_pattern(hermes: Asked) -> None:
    job = custom(hermes, "regex", "[0-9]{2}|x", tool_choice="required")
    assert hermes.takes(job.grammar, call("patch", '{"input": "42"}'))
    assert not hermes.takes(job.grammar, call("patch", '{"input": "421"}'))


def test_a_grammar_that_no_call_can_hold_is_told_and_logged(
    hermes: Asked, coder: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    job = custom(hermes, "lark", 'start: "(" start? ")"')
    assert job.grammar is None
    assert "tool patch" in caplog.text
    caplog.clear()
    enforceable_schemas._log_once.cache_clear()
    assert custom(coder, "lark", PATCH).grammar is None, "its calls are no JSON"
    assert custom(coder, "lark", PATCH, tool_choice="required").grammar is not None
    assert custom(hermes, "regex", "(?=x)x").grammar is None
    assert "tool patch" in caplog.text


def test_a_log_that_clients_cannot_fill(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(enforceable_schemas.MAX_LOGGED + 50):
        enforceable_schemas.log_unenforced(f"tool {number}", "x" * 5000)
    assert len(caplog.messages) == enforceable_schemas.MAX_LOGGED
    assert max(map(len, caplog.messages)) < 500


def test_errors_advise_strict_only_where_the_api_has_the_field(hermes: Asked) -> None:
    schema = Unique.model_json_schema()
    form = {"type": "json_schema", "schema": schema}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(InvalidRequest, match="set strict to false to drop the keyword"):
        hermes.chat(response_format=named)
    for fields in ({"response_format": {"type": "json_object", "schema": schema}}, {"guided_json": schema}):
        with pytest.raises(InvalidRequest, match="remove the keyword from the schema"):
            hermes.chat(**fields)
    body = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "x"}],
        "output_config": {"format": form},
    }
    with pytest.raises(InvalidRequest, match="remove the keyword from the schema"):
        read_messages(hermes.reader, json.dumps(body).encode())
    ollama = {"model": "m", "messages": [{"role": "user", "content": "x"}], "format": schema}
    job = read_ollama_chat(hermes.reader, json.dumps(ollama).encode())
    assert hermes.takes(job.grammar, '{"numbers": [1, 1]}'), "as in Ollama, the keyword is dropped"
