"""The events of a parser, in order. Every generated character is in exactly one event or is markup."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class Content(_Event, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(_Event, frozen=True):
    """Text of the model's reasoning."""

    text: str


class CallBegin(_Event, frozen=True, kw_only=True):
    """A tool call begins. The name is complete. Calls of an output are numbered from 0."""

    call: int
    name: str
    id: str = ""
    """The id written by the model. If empty, the API layer creates an id."""


class CallArguments(_Event, frozen=True, kw_only=True):
    """The next piece of a call's arguments. All pieces together are JSON text if the call is complete."""

    call: int
    text: str


class CallEnd(_Event, frozen=True, kw_only=True):
    """The call is complete. A call cut off by the end of the output has no such event."""

    call: int


OutputEvent: TypeAlias = Content | Reasoning | CallBegin | CallArguments | CallEnd
