"""What a conversation's request asks, whatever the API that it came by."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.front.tool_use import ToolUse
from weft.types.grammar import Grammar
from weft.types.sampling import SamplingParams


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer that a request asks for."""

    model: str
    stream: bool
    usage_in_stream: bool = False
    usage_in_chunks: bool = False
    """Whether every chunk has the usage so far."""
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    top: int | None = None
    """Alternatives to show beside each output token; None without logprobs."""
    prompt_logprobs: bool = False
    """Whether the answer has the field of that name."""
    echo: bool = False
    prompt_only: bool = False
    """Whether no output is wanted. The engine makes at least one token: it is not shown."""
    include_reasoning: bool = True
    """Whether thoughts are shown."""
    encoding: Literal["", "float", "base64"] = ""
    """Of embeddings: no output is wanted, but a vector for each prompt."""

    @property
    def heavy(self) -> bool:
        """Whether an answer may be much larger than its text."""
        return self.top is not None or self.prompt_logprobs or bool(self.encoding)


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The form that the answer behind its thought must have, and the parameter that asks for it."""

    grammar: Grammar
    param: str
    strict: bool = True
    """Whether a schema is refused that a grammar cannot hold to in all. Else it loses what cannot be held."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """How a request shares the server with others."""

    priority: int = 0
    """Lower ones go first."""
    salt: str = ""
    """Prefixes are shared only with requests of the same salt."""
    session: str = ""
    """The body's name of the conversation that this is a turn of, if it has one."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``Reader.converse`` needs; what can be checked without the model is."""

    messages: Any
    """As OpenAI's chat API has them: ``ChatFormat.encode`` checks them."""
    params: SamplingParams
    form: AnswerOptions
    tools: ToolUse = ToolUse()
    constraint: Constraint | None = None
    effort: str | None = None
    """``reasoning_effort``."""
    thinks: bool | None = None
    """Thinking switched on or off; None leaves it to the model."""
    thinking_budget: int | None = None
    """Tokens of a thought after which it is ended."""
    template: dict[str, Any] | None = None
    """Variables for the chat template."""
    opens: bool = True
    """Whether the prompt opens the assistant's turn."""
    continues: bool = False
    """Whether the answer goes on from the last message, the assistant's."""
    prompt_ids: list[int] | None = None
    """The prompt itself, in place of ``messages``."""
    sharing: Sharing = Sharing()
