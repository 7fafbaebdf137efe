"""How each kind of body is read: the one table that a front's threads and read workers share."""

from __future__ import annotations

from collections.abc import Callable

from weft.front.messages.read import read_count, read_messages
from weft.front.reading import Job, Reader
from weft.front.responses.read import read_response, read_tokens
from weft.front.tokenizing import detokenize, tokenize

KINDS: dict[str, Callable[[Reader, bytes], Job]] = {
    "chat": Reader.chat,
    "completions": Reader.completions,
    "embeddings": Reader.embeddings,
    "messages": read_messages,
    "count": read_count,
    "responses": read_response,
    "response_tokens": read_tokens,
}
"""By the name that ``serving.handle`` is called with."""

MADE: dict[str, Callable[[Reader, bytes], bytes]] = {"tokenize": tokenize, "detokenize": detokenize}
"""Likewise what is answered without the engine: the answer's JSON."""
