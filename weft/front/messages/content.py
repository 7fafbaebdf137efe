"""The content blocks of a message, built as its output comes."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from weft.front.messages import events as e
from weft.front.thoughts import sealed
from weft.text.parsing.events import CallArguments, CallBegin, Content, OutputEvent, Reasoning


class Blocks:
    """Blocks in the order in which their text comes, and the events that tell of them."""

    def __init__(self, *, omit_thoughts: bool = False) -> None:
        self.done: list[e.ContentBlock] = []
        """Those that have ended."""
        self._omit_thoughts = omit_thoughts
        self._open: e.ContentBlock | None = None
        self._pieces: list[str] = []
        """Of the open block's text, thought or input."""

    def take(self, found: OutputEvent) -> list[Any]:
        """The events of what the parser found."""
        if isinstance(found, Content):
            opened = self._enter(e.TextBlock(text=""))
            return [*opened, self._piece(found.text, e.TextPiece(text=found.text))]
        if isinstance(found, Reasoning):
            opened = self._enter(e.ThinkingBlock(thinking="", signature=""))
            if self._omit_thoughts:
                self._pieces.append(found.text)
                return opened
            return [*opened, self._piece(found.text, e.ThinkingPiece(thinking=found.text))]
        if isinstance(found, CallBegin):
            return [*self.close(), *self._enter(e.ToolUseBlock(id=found.id, name=found.name, input={}))]
        if isinstance(found, CallArguments):
            return [self._piece(found.text, e.InputPiece(partial_json=found.text))] if found.text else []
        return self.close()

    def close(self) -> list[Any]:
        """The events of the open block's end, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        text = "".join(self._pieces)
        self._pieces = []
        index = len(self.done)
        last: list[Any] = []
        if isinstance(block, e.TextBlock):
            block.text = text
        elif isinstance(block, e.ThinkingBlock):
            block.thinking = "" if self._omit_thoughts else text
            block.signature = sealed(text) if self._omit_thoughts else _digest(text)
            last.append(e.BlockDelta(index=index, delta=e.SignaturePiece(signature=block.signature)))
        else:
            block.input = _input(text)
        self.done.append(block)
        return [*last, e.BlockStop(index=index)]

    def _enter(self, block: e.ContentBlock) -> list[Any]:
        """The events that lead to a block of this kind: none where one is open already."""
        if type(self._open) is type(block):
            return []
        ended = self.close()
        self._open = block
        # The event is encoded later, when the block may have been filled.
        shown = msgspec.structs.replace(block)
        return [*ended, e.BlockStart(index=len(self.done), content_block=shown)]

    def _piece(self, text: str, delta: Any) -> e.BlockDelta:
        self._pieces.append(text)
        return e.BlockDelta(index=len(self.done), delta=delta)


def _digest(thought: str) -> str:
    """A signature for clients that want one. Nothing depends on it."""
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()


def _input(text: str) -> Any:
    """The arguments of a call as an object. What is none (the output was cut short) is kept as it is, under
    ``partial_json``.
    """
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = None
    return msgspec.Raw(text.encode()) if isinstance(value, dict) else {"partial_json": text}
