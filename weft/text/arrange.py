"""Find the order of roles that a chat template can show, and rearrange messages to fit.

Templates differ in system messages. Most show only a first system message. Others refuse a later system
message, or drop a later message silently. Instructions of an application must reach the model, so messages
are rearranged where necessary:

* System (and developer) messages before all others become one message, joined by an empty line.
* A later system message stays in place if the template shows such messages. Otherwise the message becomes a
  part of the user's turn, between ``<system-reminder>`` tags. A first system message is treated the same way
  if the template shows no system messages at all.
* Consecutive user messages become one message if the template refuses consecutive user messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from weft.common.errors import InvalidRequest
from weft.text.messages import Message, Part, Role, TextPart
from weft.text.template import TOO_EXPENSIVE

PROBE = "5d0e4b7a91"
SYSTEM: tuple[Role, ...] = ("system", "developer")
Render = Callable[[Sequence[Message]], str]
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
            Message(role=role, content=(TextPart(text),)) for role, text in zip(order, texts, strict=True)
        ]
        try:
            shown = self._render(messages)
        except InvalidRequest as error:
            if error.error_code == TOO_EXPENSIVE:  # no statement about roles
                raise
            return False
        return all(text in shown for text in texts)


def arranged(messages: Sequence[Message], order: RoleOrder) -> list[Message]:
    """Return ``messages`` in an order the template shows. No text is lost."""
    made: list[Message] = []
    for message in messages:
        last = made[-1] if made else None
        if message.role not in SYSTEM:
            made.append(message)
            continue
        # Only system messages so far: all join the first.
        if last is not None and last.role in SYSTEM and len(made) == 1:
            made[0] = _joined(last, message)
            continue
        role = order.first(message.role) if last is None else order.late(message.role)
        if role is not None:
            made.append(msgspec.structs.replace(message, role=role))
        elif last is not None and last.role == "user":
            made[-1] = _together(last, _reminder(message))
        else:
            made.append(_reminder(message))
    return made if _users_apart(made) or order.takes_users_in_a_row else _users_joined(made)


def _users_apart(messages: Sequence[Message]) -> bool:
    pairs = itertools.pairwise(messages)
    return not any(one.role == "user" == other.role for one, other in pairs)


def _users_joined(messages: Sequence[Message]) -> list[Message]:
    """Return ``messages`` with each run of user messages joined into one message."""
    made: list[Message] = []
    for message in messages:
        if made and made[-1].role == "user" == message.role:
            made[-1] = _together(made[-1], message)
        else:
            made.append(message)
    return made


def _together(one: Message, other: Message) -> Message:
    content: tuple[Part, ...] = (*(one.content or ()), *(other.content or ()))
    return msgspec.structs.replace(one, content=content)


def _joined(one: Message, other: Message) -> Message:
    """Return two system messages as one text."""
    texts = (text for text in (one.text(), other.text()) if text)
    return msgspec.structs.replace(one, content=(TextPart("\n\n".join(texts)),))


def _reminder(message: Message) -> Message:
    """Return a system message as a part of the user's turn."""
    text = f"<system-reminder>\n{message.text()}\n</system-reminder>"
    return Message(role="user", content=(TextPart(text),))
