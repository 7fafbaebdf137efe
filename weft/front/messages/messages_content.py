"""Content blocks of a message, built while the output arrives."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from weft.front.messages import messages_events as e
from weft.front.sealed_reasoning import sealed
from weft.text.parsing.events import CallArguments, CallBegin, Content, OutputEvent, Reasoning


class ContentBlocks:
    """Content blocks in output order, and the events for the stream."""

    def __init__(self, *, omit_reasoning: bool = False) -> None:
        """``omit_reasoning``: leave the reasoning text out; only the signature has the reasoning, in opaque
        form."""
        self.done: list[e.ContentBlock] = []
        """Ended blocks."""
        self._omit_reasoning = omit_reasoning
        self._open: e.ContentBlock | None = None
        self._pieces: list[str] = []
        """Pieces of the open block's text, reasoning or input."""

    def take(self, found: OutputEvent) -> list[Any]:
        """Add one parsed output event to the blocks, and return the events for the stream; [] if there is
        nothing to send. A change of type ends the open block."""
        if isinstance(found, Content):
            opened = self._enter(e.OpenTextBlock(text=""))
            return [*opened, self._piece(found.text, e.BlockText(text=found.text))]
        if isinstance(found, Reasoning):
            # Omitted reasoning goes out only in the signature, at the end of the block.
            opened = self._enter(e.OpenThinkingBlock(thinking="", signature=""))
            if self._omit_reasoning:
                self._pieces.append(found.text)
                return opened
            return [*opened, self._piece(found.text, e.ThinkingPiece(thinking=found.text))]
        if isinstance(found, CallBegin):
            return [*self.close(), *self._enter(e.OpenToolUseBlock(id=found.id, name=found.name, input={}))]
        if isinstance(found, CallArguments):
            return [self._piece(found.text, e.InputPiece(partial_json=found.text))] if found.text else []
        return self.close()

    def close(self) -> list[Any]:
        """End the open block, fill in its content, and append the block to ``done``. Return the events; []
        without an open block."""
        block, self._open = self._open, None
        if block is None:
            return []
        text = "".join(self._pieces)
        self._pieces = []
        index = len(self.done)
        last: list[Any] = []
        if isinstance(block, e.OpenTextBlock):
            block.text = text
        elif isinstance(block, e.OpenThinkingBlock):
            block.thinking = "" if self._omit_reasoning else text
            block.signature = sealed(text) if self._omit_reasoning else _digest(text)
            last.append(e.BlockDelta(index=index, delta=e.SignaturePiece(signature=block.signature)))
        else:
            block.input = _input(text)
        self.done.append(block)
        return [*last, e.BlockStop(index=index)]

    def _enter(self, block: e.ContentBlock) -> list[Any]:
        """Open ``block``, after the end of any other open block, and return the events. Without effect if a
        block of the same type is open already."""
        if type(self._open) is type(block):
            return []
        ended = self.close()
        self._open = block
        # Events are encoded later, and the block may be filled by then: send a copy.
        shown = msgspec.structs.replace(block)
        return [*ended, e.BlockStart(index=len(self.done), content_block=shown)]

    def _piece(self, text: str, delta: Any) -> e.BlockDelta:
        self._pieces.append(text)
        return e.BlockDelta(index=len(self.done), delta=delta)


def _digest(reasoning: str) -> str:
    """Return a signature for clients that expect a signature. The server never checks the signature."""
    return hashlib.sha256(reasoning.encode("utf-8", "replace")).hexdigest()


def _input(text: str) -> Any:
    """Return the arguments of a call as an object. Invalid arguments (of a cut output) are kept as text
    under ``partial_json``."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = None
    return msgspec.Raw(text.encode()) if isinstance(value, dict) else {"partial_json": text}
