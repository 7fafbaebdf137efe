"""/tokenize and /detokenize: text to ids and back, as for the model's own requests."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.http.answers import to_json
from weft.front.protocol.conversation import AnswerOptions, Conversation
from weft.front.protocol.parse import Body, missing, parse
from weft.front.protocol.tools import FunctionTool, tool_use
from weft.front.requests.answer_logprobs import json_array
from weft.front.requests.reading import Reader
from weft.text.tokenizer import TooManyTokens, check_text
from weft.types.sampling import SamplingParams

MAX_TOKENS = 1 << 20
"""Maximum tokens of one text: more than any context."""


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """For a text: True, the default, to add the tokenizer's special tokens, such as the beginning of
    sequence."""
    messages: list[dict[str, Any]] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest unless exactly one of ``prompt`` and ``messages`` is set."""
        if self.prompt is None and self.messages is None:
            raise missing("prompt")
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("send prompt or messages, not both", param="prompt")


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class Tokenized(msgspec.Struct, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    """Text of token ids, special tokens included."""

    prompt: str


def tokenize(reader: Reader, body: bytes) -> bytes:
    """Return the JSON answer to a TokenizeRequest. A text may have up to ``MAX_TOKENS`` tokens, also beyond
    the model's context. Raises WeftError for an invalid request, and NeedsFiles for unfetched images."""
    asked = parse(body, TokenizeRequest)
    if asked.model is not None:
        reader.check_model(asked.model)
    if asked.prompt is None:
        ids = _conversation(reader, asked)
    else:
        check_text(asked.prompt, "prompt")
        special = asked.add_special_tokens is not False
        try:
            ids = reader.text.tokenizer.encode(asked.prompt, add_special_tokens=special, limit=MAX_TOKENS)
        except TooManyTokens as error:
            raise InvalidRequest(
                f"prompt has at least {error.least} tokens; the limit is {MAX_TOKENS}", param="prompt"
            ) from None
    answer = Tokenized(count=len(ids), max_model_len=reader.limits.max_model_len, tokens=ids)
    if asked.return_token_strs:
        answer.token_strs = json_array(map(reader.text.tokenizer.token_text, ids))
    return to_json(answer)


def _conversation(reader: Reader, asked: TokenizeRequest) -> list[int]:
    """Return the token ids of the conversation's prompt.

    Raises InvalidRequest for an invalid conversation, tool or image, ContextLength for too long a prompt, and
    NeedsFiles for images without a known header.
    """
    continues = bool(asked.continue_final_message)
    opens = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
    conversation = Conversation(
        messages=asked.messages,
        params=SamplingParams(),
        form=AnswerOptions(model="", stream=False),
        tools=tool_use(asked.tools, None, None),
        template=asked.chat_template_kwargs,
        opens=opens,
        continues=continues,
    )
    return reader.prompted(conversation)[0].ids


def detokenize(reader: Reader, body: bytes) -> bytes:
    """Return the JSON answer to a DetokenizeRequest. Raises InvalidRequest for ids outside the vocabulary,
    and NotFound for an unknown model."""
    asked = parse(body, DetokenizeRequest)
    if asked.model is not None:
        reader.check_model(asked.model)
    width = reader.limits.vocab_size
    if any(not 0 <= token < width for token in asked.tokens):
        raise InvalidRequest(f"tokens must hold token ids from 0 to {width - 1}", param="tokens")
    text = reader.text.tokenizer.decode(asked.tokens, skip_special_tokens=False)
    return to_json(Detokenized(prompt=text))
