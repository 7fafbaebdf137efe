"""Properties of every output, right or wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tests.text.parsing.families import TOOLS, joined
from weft.text.parsing.channels import MAX_UNKNOWN
from weft.text.parsing.declaration import OutputFormat, Parameters, TextUse
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.parsing.parser import OutputSpec
from weft.text.parsing.parsing_engine import OutputEngine
from weft.text.parsing.tape import Tape

_JSON_MARKUP = re.compile(
    r"""(["'])(?:name|arguments|parameters|id|type)\1|["']|[{}\[\]():;,=]|null|None|[A-Za-z0-9_.\-]*["']"""
)


_TAG = re.compile(r"</?\s?[\w=.\-｜]{1,64}\s?/?>|\"\s+>")
"""Matches a closing tag, misspelled or not, or the end of an opening tag with white space inside."""


class Recorder(Tape):
    """A tape that records the role of every character."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[TextUse, int, int]] = []

    def mark(self, use: TextUse, end: int) -> None:
        if end > self.done:
            self.spans.append((use, self.done, end))
        super().mark(use, end)


def read(
    declared: OutputFormat, spec: OutputSpec, pieces: Sequence[str], tape: Tape | None = None
) -> list[OutputEvent]:
    """Return the joined events of an output that arrives in ``pieces``."""
    engine = OutputEngine(declared, spec, tape)
    events: list[OutputEvent] = []
    for piece in pieces:
        events += engine.feed(piece)
    return joined([*events, *engine.close()])


def check_output(declared: OutputFormat, spec: OutputSpec, text: str, *, raw_arguments: bool) -> Recorder:
    """Assert that every character occurs exactly once in order, and that calls are valid. Return the tape.

    With ``raw_arguments`` arguments are written as JSON, so the text of arguments is the model's own.
    """
    tape = Recorder()
    events = read(declared, spec, [text], tape)
    position = 0
    for _, start, end in tape.spans:
        assert start == position, f"characters {position} to {start} are nowhere"
        position = end
    assert position == len(text), f"the output from {position} on is nowhere: {text[position:]!r}"
    given = [
        (type(event), event.name if isinstance(event, CallBegin) else event.text)
        for event in events
        if not isinstance(event, CallEnd)
    ]
    spans: list[tuple[type, str]] = []
    kinds: dict[str, type] = {"content": Content, "reasoning": Reasoning, "argument": CallArguments}
    kinds["name"] = CallBegin
    for kind, start, end in tape.spans:
        if kind in ("markup", "id"):
            if kind == "markup":
                check_markup(declared, text[start:end])
            continue
        if spans and spans[-1][0] is kinds[kind] and kind != "name":
            spans[-1] = (kinds[kind], spans[-1][1] + text[start:end])
        else:
            spans.append((kinds[kind], text[start:end]))
    for kind_of in (Content, Reasoning, CallBegin):
        assert [one for one in given if one[0] is kind_of] == [one for one in spans if one[0] is kind_of]
    if raw_arguments:
        written = {one[1] for one in spans if one[0] is CallArguments}
        read_ones = {one[1] for one in given if one[0] is CallArguments}
        assert {text for text in written if _is_json(text)} <= read_ones, "valid JSON stays as it stands"
    check_calls(events, spec)
    return tape


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def check_markup(declared: OutputFormat, markup: str) -> None:
    """Assert that only markup is classified as markup."""
    parameters = any(isinstance(call.arguments, Parameters) for call in declared.calls)
    rest = _TAG.sub(" ", markup) if parameters else markup
    for mark in sorted([*declared.marks(), ' string="'], key=len, reverse=True):
        rest = rest.replace(mark, " ")
    if declared.channels is not None:
        rest = re.sub(r"\b(assistant|analysis|commentary|final|json|code|text)\b", " ", rest)
        rest = re.sub(r"(\w?)to=(functions\.)?", r"\1", rest)  # one unknown word stays one
    left = _JSON_MARKUP.sub("", rest.replace("function", "").replace("true", "").replace("false", ""))
    used = declared.channels
    if used is not None and any(mark in markup for mark in (used.start, used.channel, used.message)):
        assert len(left.split()) <= MAX_UNKNOWN, f"{left!r} of {markup!r} is called markup"
        return
    assert not left.strip(), f"{left!r} of {markup!r} is called markup"


def check_calls(events: Sequence[OutputEvent], spec: OutputSpec) -> None:
    """Assert that calls are numbered and known, and that complete calls have a JSON object as arguments."""
    begun = [event for event in events if isinstance(event, CallBegin)]
    assert [event.call for event in begun] == list(range(len(begun)))
    assert all(event.name in {tool.name for tool in TOOLS} for event in begun)
    assert spec.parallel or len(begun) <= 1
    for event in events:
        if isinstance(event, CallEnd):
            text = "".join(
                one.text for one in events if isinstance(one, CallArguments) and one.call == event.call
            )
            assert isinstance(json.loads(text), dict)
