"""Reader of each kind of body: one table for threads of the API server and for read workers."""

from __future__ import annotations

from collections.abc import Callable

from weft.front.protocol.messages.read_messages import read_count, read_messages
from weft.front.protocol.responses.read import read_response, read_tokens
from weft.front.requests.read_tokens import read_generate, render_chat, render_completions
from weft.front.requests.reading import Job, Reader
from weft.front.requests.tokenizing import detokenize, tokenize

KINDS: dict[str, Callable[[Reader, bytes], Job]] = {
    "chat": Reader.chat,
    "completions": Reader.completions,
    "embeddings": Reader.embeddings,
    "messages": read_messages,
    "count": read_count,
    "responses": read_response,
    "response_tokens": read_tokens,
    "generate": read_generate,
}
"""Kind, as passed to ``serving.handle`` -> reader."""

MADE: dict[str, Callable[[Reader, bytes], bytes]] = {
    "tokenize": tokenize,
    "detokenize": detokenize,
    "chat_render": render_chat,
    "completions_render": render_completions,
}
"""Kind -> function that returns the JSON of an answer made without the engine."""
