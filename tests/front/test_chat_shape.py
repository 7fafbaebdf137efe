"""Events of an output as chat answers, whole and streamed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from weft.front.http import answers
from weft.front.http.streaming import HOLE
from weft.front.openai.chat_route import ChatShape
from weft.front.protocol.conversation import AnswerOptions
from weft.text.choice import Choice, FinishReason, TextDelta
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.parsing.parser import OutputParser

USAGE = answers.make_usage(3, 5, 0)
LETTERS = SimpleNamespace(encode=list)
"""A tokenizer with one token per letter."""


class Spelled:
    """Parse a small language: ``t`` is reasoning, ``c`` content, ``(`` begins a call with arguments of ``a``
    and ``b``, and ``)`` ends the call.
    """

    def __init__(self) -> None:
        self._calls = 0

    def feed(self, text: str) -> list[OutputEvent]:
        return [self._event(letter) for letter in text]

    def _event(self, letter: str) -> OutputEvent:
        if letter in "tc":
            return Reasoning(letter) if letter == "t" else Content(letter)
        if letter == "(":
            self._calls += 1
            return CallBegin(call=self._calls - 1, name=f"f{self._calls - 1}")
        if letter == ")":
            return CallEnd(call=self._calls - 1)
        return CallArguments(call=self._calls - 1, text=letter)

    def close(self) -> list[OutputEvent]:
        return []


def shape(choices: list[Choice] | None = None, **fields: Any) -> ChatShape:
    def parser() -> OutputParser:
        return Spelled()

    asked = AnswerOptions(model="m", stream=choices is None, **fields)
    job = SimpleNamespace(asked=asked, prompts=[])
    made = SimpleNamespace(job=job, tokenizer=LETTERS, choices=choices or [], parser=parser, named=str)
    made.show_weights = lambda *_: None
    return ChatShape(made)  # type: ignore[arg-type]


def stream(made: ChatShape, *deltas: TextDelta) -> list[dict[str, Any]]:
    """The choices of every chunk."""
    found = [chunk for delta in deltas for chunk in made.chunks(delta)]
    return [choice for chunk in msgspec.to_builtins(found) for choice in chunk["choices"]]


def delta(text: str, finish: FinishReason | None = None, index: int = 0, **more: Any) -> TextDelta:
    return TextDelta(index=index, text=text, finish_reason=finish, **more)


def whole(text: str, finish: FinishReason = "stop", **fields: Any) -> dict[str, Any]:
    choice: Any = SimpleNamespace(
        index=0, text=text, finish_reason=finish, stop_reason=None, logprobs=None, token_ids=[1]
    )
    made = json.loads(b"".join(shape([choice], **fields).whole(USAGE)))
    answered: dict[str, Any] = made["choices"][0]
    return answered


def test_a_whole_answer_with_everything() -> None:
    got = whole("ttc(ab)(b)")
    message = got["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("c", "tt", "tt")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f0", "arguments": "ab"},
        {"name": "f1", "arguments": "b"},
    ]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert got["finish_reason"] == "tool_calls"


def test_content_is_null_beside_calls_alone() -> None:
    assert whole("(a)")["message"]["content"] is None
    assert whole("")["message"]["content"] == ""
    assert "tool_calls" not in whole("c")["message"]
    assert "reasoning" not in whole("c")["message"]


def test_a_cut_call_is_shown_as_far_as_it_came() -> None:
    got = whole("(a", "length")
    assert got["finish_reason"] == "length"
    assert got["message"]["tool_calls"][0]["function"]["arguments"] == "a"


@pytest.mark.requirement("F62")
def test_the_form_of_streamed_calls() -> None:
    got = stream(shape(), delta("c"), delta("(a"), delta("b"), delta(")(b)", "stop"))
    assert [choice["finish_reason"] for choice in got[:-1]] == [None] * (len(got) - 1)
    assert got[-1]["finish_reason"] == "tool_calls"
    deltas = [choice["delta"] for choice in got]
    assert deltas[0] == {"content": "c"}
    calls = [made["tool_calls"][0] for made in deltas[1:]]
    for number, begin in enumerate((calls[0], calls[3])):
        assert begin.pop("id").startswith("call_")
        assert begin == {
            "index": number,
            "type": "function",
            "function": {"name": f"f{number}", "arguments": ""},
        }
    rest = [(call["index"], call["function"]) for call in (*calls[1:3], calls[4])]
    assert rest == [(0, {"arguments": "a"}), (0, {"arguments": "b"}), (1, {"arguments": "b"})]


@pytest.mark.requirement("F65")
@pytest.mark.parametrize("included", [True, False])
def test_streamed_reasoning(included: bool) -> None:
    got = stream(shape(include_reasoning=included), delta("tt"), delta("tc"), delta("", "stop"))
    deltas = [choice["delta"] for choice in got]
    reasoning = [{"reasoning_content": text, "reasoning": text} for text in ("tt", "t")] if included else []
    assert deltas == [*reasoning, {"content": "c"}, {}]
    assert got[-1]["finish_reason"] == "stop"
    message = whole("ttc", include_reasoning=included)["message"]
    assert message.get("reasoning") == ("tt" if included else None)
    assert message["content"] == "c"


def test_ids_of_tokens_come_once_whatever_the_events() -> None:
    made = shape(return_token_ids=True, include_reasoning=False)
    got = stream(
        made, delta("t", token_ids=(1,)), delta("tc(", token_ids=(2, 3)), delta("", "stop", token_ids=(4,))
    )
    assert [token for choice in got for token in choice["token_ids"]] == [1, 2, 3, 4]


def test_choices_have_parsers_of_their_own() -> None:
    got = stream(shape(), delta("(a", index=0), delta("(b)", "stop", index=1), delta(")", "stop", index=0))
    names = [
        (choice["index"], call["function"]["name"])
        for choice in got
        for call in choice["delta"].get("tool_calls", [])
        if "name" in call["function"]
    ]
    assert names == [(0, "f0"), (1, "f0")]
    assert [c["finish_reason"] for c in got if c["finish_reason"]] == ["tool_calls", "tool_calls"]


@pytest.mark.parametrize("fields", [{}, {"usage_in_stream": True}, {"return_token_ids": True}])
def test_events_made_before_equal_the_encoded_chunks(fields: dict[str, Any]) -> None:
    """The short way for content must give the bytes of the general way, whatever the text."""
    texts = ["c", "c", '"\\\n\x00\u2028', "\N{PILE OF POO}", "t", "", "c(", "ab", ")", HOLE]
    deltas = [delta(text, token_ids=(7,)) for text in texts] + [delta("c", "stop", token_ids=(8,))]
    deltas += [delta("c", index=1, token_ids=(9,))]
    short, general = shape(**fields), shape(**fields)
    for made in (short, general):
        made._created = 1
        made._generation.parser = Texts  # type: ignore[method-assign,assignment]
        made._generation.job.prompts.append(SimpleNamespace(ids=[1]))
    for one in deltas:
        expected = [general.form.event(chunk) for chunk in general.chunks(one)]
        assert short.events(one) == expected


class Texts(Spelled):
    """As ``Spelled``, with ids of calls and with every other letter as content."""

    def feed(self, text: str) -> list[OutputEvent]:
        if not set(text) <= set("tcab()"):
            return [Content(text)]
        found = super().feed(text)
        return [msgspec.structs.replace(e, id="own") if isinstance(e, CallBegin) else e for e in found]
