"""What a parser finds in a model's output, in order. Every generated character is in exactly one event, or
is markup.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class Content(_Event, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(_Event, frozen=True):
    """Text of a thought."""

    text: str


class CallBegin(_Event, frozen=True, kw_only=True):
    """A tool call begins. Its name is complete; calls of an output are numbered from 0."""

    call: int
    name: str
    id: str = ""
    """Where the model itself writes one; the answer's maker mints one otherwise."""


class CallArguments(_Event, frozen=True, kw_only=True):
    """The next piece of a call's arguments; all pieces together are JSON text, where the call is whole."""

    call: int
    text: str


class CallEnd(_Event, frozen=True, kw_only=True):
    """The call is whole. One that the output's end cut short has no such event."""

    call: int


OutputEvent: TypeAlias = Content | Reasoning | CallBegin | CallArguments | CallEnd
