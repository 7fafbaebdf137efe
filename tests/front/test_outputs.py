"""The output of a choice, built from events as they arrive."""

from __future__ import annotations

from typing import Literal

import pytest

from weft.front.requests.outputs import ChoiceOutput
from weft.text.choice import TextDelta
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.parsing.parser import PlainParser


class Scripted:
    """Return one prepared piece of events per call, independent of the text; the last events come at the
    end.
    """

    def __init__(self, *steps: list[OutputEvent]) -> None:
        self._steps = list(steps)
        self.closed = 0

    def feed(self, text: str) -> list[OutputEvent]:
        return self._steps.pop(0)

    def close(self) -> list[OutputEvent]:
        self.closed += 1
        return [event for step in self._steps for event in step]


def delta(text: str = "x", finish: Literal["stop", "length"] | None = None) -> TextDelta:
    return TextDelta(index=0, text=text, finish_reason=finish)


def call(number: int, *, id: str = "", whole: bool = True) -> list[OutputEvent]:
    begin: list[OutputEvent] = [
        CallBegin(call=number, name=f"f{number}", id=id),
        CallArguments(call=number, text='{"a"'),
        CallArguments(call=number, text=": 1}"),
    ]
    return [*begin, CallEnd(call=number)] if whole else begin


def test_plain_text_is_content() -> None:
    output = ChoiceOutput(PlainParser())
    assert output.take(delta("ab")) == [Content("ab")]
    assert output.take(delta("", "stop")) == []
    assert (output.content, output.reasoning, output.calls) == ("ab", "", [])
    assert output.finish_reason(delta("", "stop")) == "stop"


def test_everything_is_kept_in_its_place() -> None:
    output = ChoiceOutput(
        Scripted([Reasoning("r1")], [Reasoning("r2"), Content("c")], call(0), [Content("d")])
    )
    for _ in range(3):
        output.take(delta())
    assert output.take(delta("", "stop")) == [Content("d")]
    assert (output.reasoning, output.content) == ("r1r2", "cd")
    (made,) = output.calls
    assert (made.name, made.arguments, made.whole) == ("f0", '{"a": 1}', True)
    assert output.finish_reason(delta("", "stop")) == "tool_calls"


def test_a_cut_call_is_no_reason_to_end() -> None:
    output = ChoiceOutput(Scripted(call(0, whole=False)))
    output.take(delta("x", "length"))
    assert not output.calls[0].whole
    assert output.finish_reason(delta("x", "stop")) == "stop"
    assert output.finish_reason(delta("x", "length")) == "length"


def test_whole_calls_of_an_output_that_was_cut_end_it_for_its_length() -> None:
    output = ChoiceOutput(Scripted([*call(0), *call(1, whole=False)]))
    assert output.finish_reason(delta()) is None
    output.take(delta("x", "length"))
    assert output.finish_reason(delta("x", "length")) == "length"


@pytest.mark.requirement("G5")
def test_ids_are_unique_and_the_models_own_where_it_wrote_some() -> None:
    output = ChoiceOutput(Scripted([*call(0, id="own"), *call(1, id="own"), *call(2)]))
    begins = [event for event in output.take(delta()) if isinstance(event, CallBegin)]
    assert begins[0].id == "own"
    assert len({event.id for event in begins}) == 3
    assert all(event.id.startswith("call_") for event in begins[1:])
    assert [made.id for made in output.calls] == [event.id for event in begins]


def test_the_parser_is_closed_once() -> None:
    parser = Scripted([], [])
    output = ChoiceOutput(parser)
    output.take(delta("x", "stop"))
    output.take(delta("x", "stop"))
    assert parser.closed == 1


class CountedId(str):
    """A str that counts the lookups of all its instances."""

    __slots__ = ()
    looks = 0

    def __hash__(self) -> int:
        CountedId.looks += 1
        return super().__hash__()


def test_what_a_call_costs_does_not_depend_on_how_many_came_before() -> None:
    count = 1_000
    calls = [event for number in range(count) for event in call(number, id=CountedId(f"id{number}"))]
    output = ChoiceOutput(Scripted(calls))
    CountedId.looks = 0
    output.take(delta())
    assert CountedId.looks <= 5 * count
    assert len({made.id for made in output.calls}) == count
