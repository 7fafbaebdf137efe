"""The forms in which a chat template reads messages, tools and calls.

Templates differ. Some fail on null content, some write "None" for null content, some take lists of parts.
Some write arguments with ``tojson``, others append the arguments to a string. Model names are no reliable
sign. Therefore each template renders a few probes once, and the results choose the forms.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from weft.common.errors import InvalidRequest
from weft.text.limits import MAX_SECONDS
from weft.text.marks import Marks
from weft.text.parsing.declaration import OutputFormat
from weft.text.template import TOO_EXPENSIVE, ChatTemplate

log = logging.getLogger(__name__)
ToolForm: TypeAlias = Literal["object", "text"]
"""A call's arguments: as an object, or as JSON text."""
Nothing: TypeAlias = Literal["null", "text", "left out"]
"""Missing content of a message: None, "", or no field."""
_NOTHINGS: tuple[Nothing, ...] = ("null", "text", "left out")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Field names of the reasoning, the most common first."""
SECONDS = 5 * MAX_SECONDS
_PROBE = "probe7f3c"
_OTHER = "probe9b0e"
_RESULT = "probe5d21"
_ASKED = "probe4e88"
_REPRS = ("{'type'", '{"type"')
"""Signs of a list of parts that a template printed instead of reading the parts."""
_EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


class TemplateForm(msgspec.Struct, frozen=True, kw_only=True):
    """The forms read by one template."""

    lists: frozenset[str] = frozenset()
    """Roles with content as a list of several parts."""
    texts: frozenset[str] = frozenset(("system", "user", "assistant", "tool"))
    """Roles with content as a string."""
    arguments: ToolForm = "object"
    nothing: Nothing = "null"
    """Missing content of an assistant message with calls."""
    keeps_empty: bool = True
    """True if the template shows calls beside the content ""."""
    one_call: bool = False
    """True if the template refuses a message with several calls, or shows only one of the calls."""
    result_names: bool = False
    """True if the template needs the function's name in a tool's result."""
    describes: bool = False
    """True if the template needs a description of each tool."""
    needs_parameters: bool = False
    """True if the template needs a schema of each tool."""
    reasoning: tuple[str, ...] = REASONING[:2]
    """Fields for the assistant's reasoning."""
    reasoning_alone: bool = False
    """True if the template refuses reasoning beside text and calls."""
    problem: str = ""
    """The reason why the template cannot show calls; "" if the template shows calls."""
    writes: OutputFormat | None = None
    """The format of calls in the content of a message, for a template that cannot show calls."""


def find_form(
    template: ChatTemplate,
    named: Mapping[str, Any],
    seconds: float = SECONDS,
    spelled: OutputFormat | None = None,
) -> TemplateForm:
    """Return the forms read by ``template``.

    ``named``: variables besides the conversation. ``seconds``: limit for all probes together. ``spelled``:
    the model's output format, for a template without calls. If no form of calls works, ``problem`` gives the
    reason. Raises InvalidRequest (``TOO_EXPENSIVE``) if the template's process was ended: a conversation
    would fail too.
    """
    return _Prober(template, named, seconds, spelled).form()


def find_ends(
    template: ChatTemplate,
    named: Mapping[str, Any],
    form: TemplateForm,
    added: Sequence[str],
    known: set[str],
) -> set[str]:
    """Return the added tokens behind a complete turn of the assistant: after an answer, and after calls.

    ``known``: end tokens named by the configuration. A mark *inside* a turn (between two messages or calls of
    the turn) is not an end. Raises InvalidRequest like ``find_form``.
    """
    prober = _Prober(template, named)
    return prober.ends(form, Marks(tuple(added)), known)


class _Prober:
    """Renders probes within one time limit."""

    def __init__(
        self,
        template: ChatTemplate,
        named: Mapping[str, Any],
        seconds: float = SECONDS,
        spelled: OutputFormat | None = None,
    ) -> None:
        self._spelled = spelled if spelled is not None and spelled.calls else None
        self._template = template
        self._named = named
        self._until = time.monotonic() + seconds
        self._error = ""

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Any = None, *, prompt: bool = False
    ) -> str | None:
        """Return the rendered text, or None if the template fails or the time limit of all probes has passed.

        The reason is kept for ``form``. Raises InvalidRequest if the template is too expensive.
        """
        variables = {
            **self._named,
            "messages": list(messages),
            "add_generation_prompt": prompt,
            "tools": tools,
            "documents": None,
        }
        left = min(MAX_SECONDS, self._until - time.monotonic())
        if left <= 0:
            self._error = "the test renderings of the template take too long"
            return None
        try:
            return self._template.render(variables, left)
        except InvalidRequest as error:
            if error.error_code == TOO_EXPENSIVE:
                raise
            self._error = error.message
            return None

    # -- forms

    def form(self) -> TemplateForm:
        """Return the forms found by probes."""
        found = TemplateForm()
        for role in ("user", "system", "assistant"):
            found = self._content(found, role)
        if self._template.uses_tools:
            found = self._tools(found)
        found = self._content(self._calls(found), "tool")
        return self._reasoning(found)

    def _content(self, form: TemplateForm, role: str) -> TemplateForm:
        """Return ``form`` with the found shapes for content of ``role``: a string, a list of parts, or
        either.

        ``form`` comes back unchanged if the template does not show the role.
        """
        text = self._around(form, role, _PROBE)
        parts = self._around(form, role, [_part(_PROBE), _part(_OTHER)])
        takes_text = text is not None and _PROBE in text
        takes_list = parts is not None and _PROBE in parts and _OTHER in parts
        if takes_list and parts is not None and any(shown in parts for shown in _REPRS):
            takes_list = False
        if not takes_text and not takes_list:
            single = self._around(form, role, [_part(_PROBE)])
            if single is None or _PROBE not in single or any(shown in single for shown in _REPRS):
                return form  # role not shown or refused: a request receives the template's own error
        return msgspec.structs.replace(
            form,
            texts=form.texts | {role} if takes_text else form.texts - {role},
            lists=form.lists | {role} if takes_list else form.lists - {role},
        )

    def _around(self, form: TemplateForm, role: str, content: Any) -> str | None:
        """Return a rendered conversation with ``content`` in the message of ``role``; None on failure."""
        user = {"role": "user", "content": _content(form, "user", "u")}
        message = {"role": role, "content": content}
        if role == "tool":
            turn = _called(form, [_call(form, 0, _RESULT)])
            if form.problem:
                turn = {"role": "assistant", "content": _content(form, "assistant", "a")}
            return self._render([user, turn, _result(form, content)], PROBE_TOOLS)
        if role == "assistant":
            return self._render([user, message, user])
        return self._render([message, user] if role == "system" else [message])

    def _tools(self, form: TemplateForm) -> TemplateForm:
        """Return ``form`` with the fields of a tool that the template needs.

        The first working combination wins.
        """
        user = [{"role": "user", "content": _content(form, "user", "u")}]
        for described, schema in itertools.product((False, True), repeat=2):
            function: dict[str, Any] = {"name": _PROBE}
            if described:
                function["description"] = ""
            if schema:
                function["parameters"] = _EMPTY_SCHEMA
            text = self._render(user, [{"type": "function", "function": function}])
            if text is not None:
                return msgspec.structs.replace(form, describes=described, needs_parameters=schema)
        return form

    def _calls(self, form: TemplateForm) -> TemplateForm:
        """Return ``form`` with the way the template reads calls and the content beside calls.

        Without a working way, set ``form.problem`` and ``form.writes``; log a warning if the template
        mentions ``tool_calls`` and the call format is unknown.
        """
        forms: tuple[ToolForm, ...] = ("object", "text")
        for named, arguments, nothing in itertools.product((False, True), forms, _NOTHINGS):
            # The order prefers the plainest form: no names in results, object arguments, null content.
            tried = msgspec.structs.replace(form, result_names=named, arguments=arguments, nothing=nothing)
            text = self._with_calls(tried)
            if text is None:
                continue
            empty = self._with_calls(msgspec.structs.replace(tried, nothing="text"))
            if nothing == "null" and empty is not None and _spelled(text) > _spelled(empty):
                continue  # the template writes "None" for null content
            # Some templates refuse a second call of a message, others drop the call silently.
            two = self._with_calls(tried, [_call(tried, 0, _PROBE), _call(tried, 1, _OTHER)])
            one_call = two is None or _OTHER not in two
            return msgspec.structs.replace(tried, keeps_empty=empty is not None, one_call=one_call)
        problem = self._error or "the rendered text has no calls"
        if "tool_calls" in self._template.source and self._spelled is None:
            log.warning("the chat template does not render the tool calls of earlier turns: %s", problem)
        nothing = self._plainest(form)
        return msgspec.structs.replace(form, problem=problem, nothing=nothing, writes=self._spelled)

    def _plainest(self, form: TemplateForm) -> Nothing:
        """Return the form of missing content with the fewest "None" and "null" in the text, for a template
        without calls.
        """
        user = {"role": "user", "content": _content(form, "user", "u")}
        written: dict[Nothing, int] = {}
        for nothing in _NOTHINGS:
            tried = msgspec.structs.replace(form, nothing=nothing)
            text = self._turns(tried) or self._render([user, _called(tried, [_call(tried, 0, _PROBE)])])
            if text is not None:
                written[nothing] = _spelled(text)
        return min(written, key=written.__getitem__, default=form.nothing)

    def _with_calls(self, form: TemplateForm, calls: Sequence[dict[str, Any]] = ()) -> str | None:
        """Return a rendered conversation with calls in two turns; None if the template fails or does not show
        the arguments correctly.
        """
        text = self._turns(form, calls)
        wrong = (f"{{'{_PROBE}'", f'\\"{_PROBE}')  # a Python repr, or JSON text encoded twice
        if text is None or _PROBE not in text or any(shown in text for shown in wrong):
            return None
        return text

    def _turns(self, form: TemplateForm, calls: Sequence[dict[str, Any]] = ()) -> str | None:
        """Return a rendered conversation with the calls in two turns, or None if the template fails."""
        user = {"role": "user", "content": _content(form, "user", "u")}
        answer = {"role": "assistant", "content": _content(form, "assistant", "a")}
        turn = _called(form, calls or [_call(form, 0, _PROBE)])
        results = [_result(form, _content(form, "tool", "t"), number) for number in range(len(calls) or 1)]
        return self._render([user, turn, *results, answer, user, turn, *results], PROBE_TOOLS, prompt=True)

    def _reasoning(self, form: TemplateForm) -> TemplateForm:
        """Return ``form`` with the field from which the template reads reasoning, and with
        ``reasoning_alone``.

        ``reasoning_alone`` is True if the template refuses reasoning beside calls and text.
        """
        user = {"role": "user", "content": _content(form, "user", "u")}
        spoken = {"role": "assistant", "content": _content(form, "assistant", "a")}
        called = _called(form, [_call(form, 0, _PROBE)])
        both = {**called, "content": spoken["content"]}
        for field, turn in itertools.product(REASONING, (called, spoken)):
            text = self._render([user, {**turn, field: _RESULT}], PROBE_TOOLS)
            if text is not None and _RESULT in text:
                # Blame the reasoning only if the same message renders without reasoning.
                refused = self._render([user, {**both, field: _RESULT}], PROBE_TOOLS) is None
                alone = refused and self._render([user, both], PROBE_TOOLS) is not None
                return msgspec.structs.replace(form, reasoning=(field,), reasoning_alone=alone)
        return form

    # -- ends

    def ends(self, form: TemplateForm, marks: Marks, known: set[str]) -> set[str]:
        """Return the end tokens found by probes: see ``find_ends``."""
        inner = self._inside(form, marks)
        user = {"role": "user", "content": _content(form, "user", _ASKED)}
        answer = {"role": "assistant", "content": _content(form, "assistant", _PROBE)}
        ends = set[str]()
        for messages in ([user, answer, user], [user, answer]):
            text = self._render(messages) or self._render(messages, PROBE_TOOLS)
            if text is not None:
                after = text.rpartition(_PROBE)[2].partition(_ASKED)[0]
                ends |= _first(after, marks, inner, anywhere=False)
        called = _called(form, [_call(form, 0, _PROBE)])
        text = self._render([user, called, _result(form, _content(form, "tool", _RESULT))], PROBE_TOOLS)
        if text is not None and _PROBE in text and _RESULT in text:
            after = text.partition(_RESULT)[0].rpartition(_PROBE)[2]
            # Only without a known end behind calls: then the first mark of the next role ends the turn.
            if not any(end in after for end in ends | known):
                ends |= _first(after, marks, inner, anywhere=True)
        return ends

    def _inside(self, form: TemplateForm, marks: Marks) -> set[str]:
        """Return the marks inside one turn: between reasoning, text and calls.

        Failed renderings are ignored.
        """
        user = {"role": "user", "content": _content(form, "user", _ASKED)}
        one = [_call(form, 0, _PROBE)]
        calls = one if form.one_call else [*one, _call(form, 1, _OTHER)]
        turn = _called(form, calls)
        reasoning = dict.fromkeys(form.reasoning, _RESULT)
        spoken = {**turn, "content": _content(form, "assistant", _RESULT)}
        found = set[str]()
        for message in (turn, {**turn, **reasoning}, spoken):
            text = self._render([user, message], PROBE_TOOLS)
            places = [text.rfind(each) for each in (_RESULT, _PROBE, _OTHER)] if text else []
            shown = [place for place in places if place >= 0]
            # some templates write text behind the end of the turn
            if text and shown and shown == sorted(shown):
                found |= {mark for mark, _ in marks.all_with_places(text[shown[0] : shown[-1]])}
        return found


PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": _EMPTY_SCHEMA},
    }
]


def content_of(form: TemplateForm, role: str, texts: Sequence[str]) -> Any:
    """Return content with ``texts`` in a form the template reads.

    The result is a list of parts if the template takes lists and there are several texts, or if the template
    takes no strings. Otherwise the result is one text, joined by line ends.
    """
    if role in form.lists and (len(texts) > 1 or role not in form.texts):
        return [_part(text) for text in texts]
    joined = "\n".join(texts)
    return joined if role in form.texts else [_part(joined)]


def _content(form: TemplateForm, role: str, text: str) -> Any:
    return content_of(form, role, [text])


def without_content(form: TemplateForm, message: dict[str, Any]) -> dict[str, Any]:
    """Return ``message``, an assistant message with calls, without content in the template's form."""
    if form.nothing == "left out":
        return {key: value for key, value in message.items() if key != "content"}
    return {**message, "content": "" if form.nothing == "text" else None}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _call(form: TemplateForm, number: int, key: str) -> dict[str, Any]:
    arguments: Any = {key: "x"} if form.arguments == "object" else json.dumps({key: "x"})
    function = {"name": "f", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def _called(form: TemplateForm, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return without_content(form, {"role": "assistant", "content": None, "tool_calls": list(calls)})


def _result(form: TemplateForm, content: Any, number: int = 0) -> dict[str, Any]:
    named = {"name": "f"} if form.result_names else {}
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{number}", **named}


def _spelled(text: str) -> int:
    return text.count("None") + text.count("null")


def _first(text: str, marks: Marks, inner: set[str], *, anywhere: bool) -> set[str]:
    """Return the first mark of ``text`` outside ``inner``, as a set. Unless ``anywhere``, only white space
    and marks may stand before the mark.
    """
    at = 0
    for found, start in marks.all_with_places(text):
        if not anywhere and text[at:start].strip():
            break
        if found not in inner:
            return {found}
        at = start + len(found)
    return set()
