"""Turns of other APIs as the messages that ``Conversation`` has.

The Responses and Messages APIs have items and blocks where chat has messages. Here they become messages, in
order; everything after that (templates, tools, grammars, limits) is the same for all of them.
"""

from __future__ import annotations

from typing import Any

from weft.common.errors import InvalidRequest
from weft.front.effort import effort_variables
from weft.text.chat import ChatFormat
from weft.text.messages import ImagePart

Parts = list[dict[str, Any] | ImagePart]
"""Typed content parts, as chat takes them."""


class _Pieces(list[str]):
    """A text that grows: joined once, since a body may bring very many pieces of it."""


class Turns:
    """Messages, as they are added.

    System texts before anything else are one message, because most templates take one, and only first. A
    later one is a message in its place where the template shows such messages (``system_inside``); else it is
    a part of the user's turn, between ``<system-reminder>`` tags. All that an assistant says, thinks and
    calls between two other messages is one message.
    """

    def __init__(self, *, system_inside: bool, join_users: bool) -> None:
        """``join_users``: consecutive messages of the user are one."""
        self._messages: list[dict[str, Any]] = []
        self._system_inside = system_inside
        self._join_users = join_users

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All of them, as chat takes them. A list of the caller's own."""
        return [
            {name: "".join(value) if isinstance(value, _Pieces) else value for name, value in message.items()}
            for message in self._messages
        ]

    def system(self, text: str) -> None:
        """An instruction of the application."""
        if all(message["role"] == "system" for message in self._messages):
            if self._messages:
                self._messages[0]["content"] += ("\n\n", text)
            else:
                self._messages.append({"role": "system", "content": _Pieces((text,))})
        elif self._system_inside:
            self._messages.append({"role": "system", "content": text})
        else:
            reminder = f"<system-reminder>\n{text}\n</system-reminder>"
            self._user([{"type": "text", "text": reminder}], join=True)

    def user(self, parts: Parts) -> None:
        """What the user says."""
        self._user(parts, join=self._join_users)

    def _user(self, parts: Parts, *, join: bool) -> None:
        last = self._messages[-1] if self._messages else None
        if join and last is not None and last["role"] == "user":
            last["content"] += parts
        else:
            self._messages.append({"role": "user", "content": parts})

    def says(self, text: str) -> None:
        """Text of the assistant."""
        turn = self._turn()
        if turn["content"] is None:
            turn["content"] = _Pieces()
        turn["content"].append(text)

    def thinks(self, text: str) -> None:
        """A thought of the assistant."""
        self._turn().setdefault("reasoning_content", _Pieces()).append(text)

    def calls(self, id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant. ``arguments``: JSON text."""
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def result(self, id: str, content: str | Parts) -> None:
        """What a call returned."""
        self._messages.append({"role": "tool", "tool_call_id": id, "content": content})

    def _turn(self) -> dict[str, Any]:
        """The assistant's message that goes on."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": None})
        return self._messages[-1]


def shows_system_inside(chat: ChatFormat) -> bool:
    """Whether a conversation's template shows a system message that is not the first one."""
    return chat.order is not None and chat.order.late("system") is not None


def shows_users_apart(chat: ChatFormat) -> bool:
    """Whether a conversation's template takes two messages of the user in a row."""
    return chat.order is not None and chat.order.takes_users_in_a_row


def effort_shown(effort: str | None, chat: ChatFormat) -> str | None:
    """``effort`` where the model's template has a variable for it; else None.

    Agents send an effort to whatever model they have, so that there it is a wish.
    """
    if effort is None:
        return None
    try:
        effort_variables(effort, chat.source or "")
    except InvalidRequest:
        return None
    return effort


def renamed(error: InvalidRequest, names: dict[str, str]) -> InvalidRequest:
    """An error that names a parameter of a conversation, with its name in the API that the request came by.

    ``names``: where they differ.
    """
    if error.param is None:
        return error
    root = error.param.partition("[")[0].partition(".")[0]
    if not names.get(root):
        return error
    message = error.message.replace(error.param, names[root])
    return type(error)(message, param=names[root], code=error.error_code)
