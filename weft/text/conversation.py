"""Checked messages and tools in the order and the form that a chat template reads: see ``forms.py``.

Templates differ in system messages. Most show only a first system message. Others refuse a later system
message, or drop a later message silently. Instructions of an application must reach the model, so messages
are rearranged where necessary:

* System (and developer) messages before all others become one message, joined by an empty line. If no user
  message follows, a developer message behind a system message is not joined: it takes the user's place.
* A later system message stays in place if the template shows such messages. Otherwise the message becomes a
  part of the user's turn, between ``<system-reminder>`` tags. A first system message is treated the same way
  if the template shows no system messages at all.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.text.chat_messages import ChatMessage, Part, Role, TextPart
from weft.text.echoes import CallMade
from weft.text.forms import TemplateForm, ToolForm, content_of, without_content
from weft.text.images import VideoPart
from weft.text.marks import Marks
from weft.text.parsing.declaration import OutputFormat
from weft.text.parsing.parser import Tool
from weft.text.parsing.write_calls import written_calls
from weft.text.template import TOO_EXPENSIVE, ChatTemplate

PROBE = "5d0e4b7a91"
SYSTEM: tuple[Role, ...] = ("system", "developer")
Render = Callable[[Sequence[ChatMessage]], str]
"""Return the template's text for messages. Raises InvalidRequest if the template refuses the messages."""
_LATE: tuple[tuple[Role, ...], ...] = (
    ("user", "assistant", "system", "user"),
    ("system", "user", "assistant", "system", "user"),
    ("user", "system", "user"),
    ("user", "system"),
)
"""Conversations with a system message behind other messages."""


class RoleOrder:
    """The order of roles shown by one template. Each fact is probed at first use and then cached."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[str, bool] = {}

    def first(self, role: Role) -> Role | None:
        """Return the role to use for a first message of ``role`` (system or developer); None if no role is
        shown.
        """
        return self._shown_as(role, "first", (("system", "user"),))

    def late(self, role: Role) -> Role | None:
        """Return the role to use for a system message behind other messages, at any place; None if no role is
        shown.
        """
        return self._shown_as(role, "late", _LATE)

    @property
    def takes_users_in_a_row(self) -> bool:
        """True if two consecutive user messages are shown."""
        return self._fact("users", (("user", "user"),))

    def _shown_as(self, role: Role, name: str, orders: Sequence[Sequence[Role]]) -> Role | None:
        """Return the first role, of ``role`` and the system roles, that the template shows in all ``orders``.

        Return None without such a role. ``name`` is the prefix of the cached facts.
        """
        for one in dict.fromkeys((role, *SYSTEM)):
            # The probe conversations name the role "system"; try each system role in that place.
            named: list[list[Role]] = [
                [one if each == "system" else each for each in order] for order in orders
            ]
            if self._fact(f"{name} {one}", named):
                return one
        return None

    def _fact(self, name: str, orders: Sequence[Sequence[Role]]) -> bool:
        if name not in self._known:
            self._known[name] = all(map(self._shows, orders))
        return self._known[name]

    def _shows(self, order: Sequence[Role]) -> bool:
        """Return True if the template shows every message.

        A later message may replace an earlier message. Return False if the template refuses the order. Raises
        InvalidRequest only if the template is too expensive.
        """
        texts = [f"{PROBE}{at}e" for at in range(len(order))]
        messages = [
            ChatMessage(role=role, content=(TextPart(text),)) for role, text in zip(order, texts, strict=True)
        ]
        try:
            shown = self._render(messages)
        except InvalidRequest as error:
            if error.error_code == TOO_EXPENSIVE:  # no statement about roles
                raise
            return False
        return all(text in shown for text in texts)


def arranged(messages: Sequence[ChatMessage], order: RoleOrder, one_call: bool = False) -> list[ChatMessage]:
    """Return ``messages`` in an order the template shows. No text is lost.

    ``one_call``: the template shows one call of a message. Each call then gets a message of its own.
    """
    made: list[ChatMessage] = []
    asked = any(message.role == "user" for message in messages)
    for message in messages:
        last = made[-1] if made else None
        if message.role not in SYSTEM:
            made.append(message)
            continue
        # Only system messages so far: all join the first.
        first = last is not None and last.role in SYSTEM and len(made) == 1
        if last is not None and first and (asked or message.role == "system"):
            made[0] = _joined(last, message)
            continue
        role = order.first(message.role) if last is None else order.late(message.role)
        if role is not None:
            made.append(msgspec.structs.replace(message, role=role))
        elif last is not None and last.role == "user":
            made[-1] = _together(last, _reminder(message))
        else:
            made.append(_reminder(message))
    if not _users_apart(made) and not order.takes_users_in_a_row:
        made = _users_joined(made)
    return list(_one_call_each(made)) if one_call else made


def _users_apart(messages: Sequence[ChatMessage]) -> bool:
    pairs = itertools.pairwise(messages)
    return not any(one.role == "user" == other.role for one, other in pairs)


def _users_joined(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return ``messages`` with each run of user messages joined into one message."""
    made: list[ChatMessage] = []
    for message in messages:
        if made and made[-1].role == "user" == message.role:
            made[-1] = _together(made[-1], message)
        else:
            made.append(message)
    return made


def _together(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    content: tuple[Part, ...] = (*(one.content or ()), *(other.content or ()))
    return msgspec.structs.replace(one, content=content)


def _joined(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    """Return two system messages as one text."""
    texts = (text for text in (one.text(), other.text()) if text)
    return msgspec.structs.replace(one, content=(TextPart("\n\n".join(texts)),))


def _reminder(message: ChatMessage) -> ChatMessage:
    """Return a system message as a part of the user's turn."""
    text = f"<system-reminder>\n{message.text()}\n</system-reminder>"
    return ChatMessage(role="user", content=(TextPart(text),))


def tool_objects(tools: Sequence[Tool], form: TemplateForm) -> list[dict[str, Any]]:
    """Return tools in OpenAI's format, the usual format for templates. Missing fields are filled in if the
    template needs the fields.
    """
    made: list[dict[str, Any]] = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description or form.describes:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = tool.parameters
        elif form.needs_parameters:
            function["parameters"] = {"type": "object", "properties": {}}
        made.append({"type": "function", "function": function})
    return made


def conversation_of(
    messages: Sequence[ChatMessage], template: ChatTemplate, form: TemplateForm, marks: Marks, mark: str
) -> list[dict[str, Any]]:
    """Return messages in the template's form, with marks in all strings.

    A result gets the name of its function if the template needs the name.
    """
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        # A result names only the id of the call; some templates need the function's name too.
        names.update((call.id, call.name) for call in message.calls)
        one = _for_template(message, template, form, marks, mark)
        if message.role == "tool" and form.result_names:
            one.setdefault("name", marks.around(names.get(message.tool_call_id or "", ""), mark))
        made.append(one)
    return made


def _one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield messages with at most one call each, every call directly followed by its result.

    Adjacent messages with calls, and the results behind these messages, are arranged together: a template of
    this kind writes a result as the result of the last call.
    """
    groups = itertools.groupby(messages, key=lambda message: "call" if message.calls else message.role)
    calling: list[ChatMessage] = []
    for kind, group in groups:
        if kind == "call":
            calling = list(group)
            continue
        if kind == "tool":
            yield from _each_with_its_result(calling, group)
        else:
            yield from _each_with_its_result(calling, ())
            yield from group
        calling = []
    yield from _each_with_its_result(calling, ())


def _each_with_its_result(
    messages: Iterable[ChatMessage], results: Iterable[ChatMessage]
) -> Iterator[ChatMessage]:
    """Yield one message per call, each directly followed by its result.

    Calls of the same id get the results of that id in order; the last of these calls gets all further
    results. Results of other ids stand at the end.
    """
    by_id: dict[str, deque[ChatMessage]] = {}
    for result in results:
        by_id.setdefault(result.tool_call_id or "", deque()).append(result)
    bare: dict[str, Any] = {"content": None, "reasoning": None}  # text and reasoning stand before the calls
    made = [
        msgspec.structs.replace(message, calls=(call,), **(bare if at else {}))
        for message in messages
        for at, call in enumerate(message.calls)
    ]
    left = Counter(one.calls[0].id for one in made)
    for one in made:
        yield one
        ident = one.calls[0].id
        left[ident] -= 1
        found = by_id.get(ident, deque())
        for _ in range(min(len(found), 1) if left[ident] else len(found)):
            yield found.popleft()
    yield from itertools.chain.from_iterable(by_id.values())


def _for_template(
    message: ChatMessage, template: ChatTemplate, form: TemplateForm, marks: Marks, mark: str
) -> dict[str, Any]:
    """Return one message as the dict for the template, in its form and with marks in all strings.

    Reasoning is left out where the template refuses reasoning beside calls.
    """
    role: str = message.role
    if role == "developer" and not template.names_developer:
        role = "system"  # the template's name for the same role
    result: dict[str, Any] = {"role": role, "content": _content(message, role, form, marks, mark)}
    if message.calls and form.writes is not None:
        return {**result, "content": _with_calls(message, role, form, form.writes, marks, mark)}
    if message.calls and (message.content is None or (_is_empty(message) and not form.keeps_empty)):
        result = without_content(form, result)
    if message.name is not None:
        result["name"] = marks.around(message.name, mark)
    if message.tool_call_id is not None:
        result["tool_call_id"] = marks.around(message.tool_call_id, mark)
    if message.calls:
        result["tool_calls"] = [_call(call, form.arguments, marks, mark) for call in message.calls]
    if message.reasoning is not None and not (
        form.reasoning_alone and message.calls and not _is_empty(message)
    ):
        reasoning = marks.around(message.reasoning, mark)
        result.update(dict.fromkeys(form.reasoning, reasoning))
    return result


def _is_empty(message: ChatMessage) -> bool:
    return not message.shown and not message.text()


def _content(message: ChatMessage, role: str, form: TemplateForm, marks: Marks, mark: str) -> Any:
    """Return the content for the template: None, a string, or a list of parts, with marks in all texts."""
    if message.content is None:
        return None
    if message.shown:
        return [
            {"type": "text", "text": marks.around(part.text, mark)}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
            for part in message.content
        ]
    # Without images, the form decides between a string and a list of parts.
    texts = [part.text for part in message.content if isinstance(part, TextPart)]
    # Templates read a developer message in the form of a system message.
    content = content_of(form, "system" if role == "developer" else role, texts)
    return (
        marks.around(content, mark)
        if isinstance(content, str)
        else [{**part, "text": marks.around(part["text"], mark)} for part in content]
    )


def _with_calls(
    message: ChatMessage, role: str, form: TemplateForm, spelled: OutputFormat, marks: Marks, mark: str
) -> Any:
    """Return the content of a message followed by its calls, in the spelling of the model."""
    pieces = written_calls(spelled, [(call.name, call.shown()) for call in message.calls])
    # Only the texts of the format may become special tokens.
    calls = "".join(text if markup else f"{marks.around(text, mark)}" for text, markup in pieces)
    content = None if _is_empty(message) else _content(message, role, form, marks, mark)
    if isinstance(content, list):
        return [*content, {"type": "text", "text": calls}]
    if content is None:
        return content_of(form, role, [calls])
    return f"{content}\n{calls}"


def _call(call: CallMade, form: ToolForm, marks: Marks, mark: str) -> dict[str, Any]:
    """Return one call as the dict for the template, with marks in all strings."""
    arguments: Any = call.shown() if form == "object" else call.shown_text()
    return {
        "id": marks.around(call.id, mark),
        "type": "function",
        "function": {
            "name": marks.around(call.name, mark),
            "arguments": marks.everywhere(arguments, mark),
        },
    }


# fmt: off
_RESERVED = frozenset((
    "messages", "tokenize", "chat_template", "template", "add_generation_prompt", "continue_final_message",
    "tools", "documents", "return_dict", "return_tensors", "conversation", "raise_exception",
    "strftime_now", "range", "dict", "namespace", "cycler", "joiner", "loop", "self", "context",
    "environment",
))


def check_kwargs(kwargs: Any) -> dict[str, Any]:
    """Return a copy of the template variables of a request as plain JSON values.

    None becomes {}. Raises InvalidRequest for invalid or reserved names (of Weft or Jinja), and for values
    outside JSON.
    """
    name = "chat_template_kwargs"
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidRequest(f"{name} must be an object", param=name)
    for key in kwargs:
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise InvalidRequest(
                f"the keys of {name} must be identifiers that do not start with an underscore", param=name
            )
        # Names such as ``eos_token`` are special tokens, which only the server sets.
        if key in _RESERVED or key.endswith("_token") or key.endswith("_tokens"):
            raise InvalidRequest(
                f"{name} cannot set {key}, which the server sets; leave {key} out", param=name
            )
    try:
        checked: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(kwargs)))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(f"{name} must have JSON values only", param=name) from None
    return checked
