"""Turns of other APIs, converted to the messages of ``Conversation``.

The Responses and Messages APIs have items and blocks in place of chat messages. Here both become messages,
in order. All later steps (templates, tools, grammars, limits) are the same for all APIs.
"""

from __future__ import annotations

from typing import Any

from weft.common.errors import InvalidRequest
from weft.front.protocol.effort import effort_variables
from weft.text.chat import ChatFormat
from weft.text.images import ImagePart

Parts = list[dict[str, Any] | ImagePart]
"""Typed content parts, as in the chat API."""


class _Pieces(list[str]):
    """Growing text. Joined once, because a body may have very many pieces."""


class Turns:
    """List of messages, built turn by turn.

    System texts at the start become one message, because most templates allow only one, and only first. A
    later system text stays a message if the template shows such messages (``system_inside``). Otherwise the
    text becomes part of the user's turn, between ``<system-reminder>`` tags. All text, reasoning and calls
    of an assistant between two other messages form one message.
    """

    def __init__(self, *, system_inside: bool, join_users: bool) -> None:
        """``join_users``: join consecutive user messages."""
        self._messages: list[dict[str, Any]] = []
        self._system_inside = system_inside
        self._join_users = join_users

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, in chat form. Returns a new list."""
        return [
            {name: "".join(value) if isinstance(value, _Pieces) else value for name, value in message.items()}
            for message in self._messages
        ]

    def system(self, text: str) -> None:
        """Add an instruction of the application: to the system message, as a message, or as a reminder."""
        # Still at the start: at most one message exists, the system message.
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
        """Add a message of the user."""
        self._user(parts, join=self._join_users)

    def _user(self, parts: Parts, *, join: bool) -> None:
        """Add a user's message; with ``join``, extend the last message if the last message is the user's."""
        last = self._messages[-1] if self._messages else None
        if join and last is not None and last["role"] == "user":
            last["content"] += parts
        else:
            self._messages.append({"role": "user", "content": parts})

    def says(self, text: str) -> None:
        """Add text of the assistant."""
        turn = self._turn()
        if turn["content"] is None:
            turn["content"] = _Pieces()
        turn["content"].append(text)

    def thinks(self, text: str) -> None:
        """Add reasoning of the assistant."""
        self._turn().setdefault("reasoning_content", _Pieces()).append(text)

    def calls(self, id: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant. ``arguments``: JSON text."""
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def result(self, id: str, content: str | Parts) -> None:
        """Add the result of a call."""
        self._messages.append({"role": "tool", "tool_call_id": id, "content": content})

    def _turn(self) -> dict[str, Any]:
        """Return the assistant's message under construction."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": None})
        return self._messages[-1]


def shows_system_inside(chat: ChatFormat) -> bool:
    """Return True if the chat template shows system messages after the first message."""
    return chat.order is not None and chat.order.late("system") is not None


def shows_users_apart(chat: ChatFormat) -> bool:
    """Return True if the chat template takes two user messages in a row."""
    return chat.order is not None and chat.order.takes_users_in_a_row


def effort_shown(effort: str | None, chat: ChatFormat) -> str | None:
    """Return ``effort`` if the model's template has a variable for the effort; else None.

    Agents send an effort to every model, so for models without efforts the field is only a hint.
    """
    if effort is None:
        return None
    try:
        effort_variables(effort, chat.source or "")
    except InvalidRequest:
        return None
    return effort


def renamed(error: InvalidRequest, names: dict[str, str]) -> InvalidRequest:
    """Return ``error`` with the parameter's name in the request's API.

    ``names``: conversation parameter -> API parameter, where the names differ.
    """
    if error.param is None:
        return error
    root = error.param.partition("[")[0].partition(".")[0]
    if not names.get(root):
        return error
    message = error.message.replace(error.param, names[root])
    return type(error)(message, param=names[root], code=error.error_code)
