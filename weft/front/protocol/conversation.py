"""A conversation request in the common form of all APIs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.front.protocol.tools import ToolUse
from weft.types.grammar import Grammar
from weft.types.sampling import SamplingParams


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the answer, as requested."""

    model: str
    stream: bool
    usage_in_stream: bool = False
    usage_in_chunks: bool = False
    """True if every chunk includes the usage so far."""
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    top: int | None = None
    """Alternatives shown with each output token; None without logprobs."""
    prompt_logprobs: bool = False
    """True if the answer has the field of the same name."""
    echo: bool = False
    prompt_only: bool = False
    """True for no output. The engine makes at least one token, which is not shown."""
    include_reasoning: bool = True
    """True if reasoning is shown."""
    encoding: Literal["", "float", "base64"] = ""
    """For embeddings: encoding of the vectors. No output; one vector per prompt."""

    binary: Literal["", "float32", "float16"] = ""
    """Dtype of logprobs as arrays; "" for logprobs in JSON."""

    @property
    def heavy(self) -> bool:
        """True if an answer may be much larger than its text."""
        return self.top is not None or self.prompt_logprobs or bool(self.encoding)


class OutputConstraint(msgspec.Struct, frozen=True, kw_only=True):
    """Required form of the answer after the reasoning, and the request field that requires the form."""

    grammar: Grammar
    param: str
    strict: bool = True
    """True: a schema beyond the grammar's means is refused. False: the schema loses the unsupported
    keywords."""
    may_loosen: bool = False
    """True if the request has a field ``strict`` for this form, so an error may advise its use."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for sharing the server with other requests."""

    priority: int = 0
    """Lower values go first."""
    salt: str = ""
    """Prefixes are shared only among requests of the same salt."""
    session: str = ""
    """Session name from the body; "" without a session."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Input of ``Reader.converse``. Everything is checked, as far as possible without the model."""

    messages: Any
    """Messages of OpenAI's chat API, checked later by ``ChatFormat.encode``."""
    params: SamplingParams
    form: AnswerOptions
    tools: ToolUse = ToolUse()
    constraint: OutputConstraint | None = None
    effort: str | None = None
    """Value of ``reasoning_effort``."""
    thinks: bool | None = None
    """Reasoning switched on or off; None leaves the decision to the model."""
    thinking_budget: int | None = None
    """Maximum tokens of reasoning; then the reasoning is ended."""
    template: dict[str, Any] | None = None
    """Variables for the chat template."""
    opens: bool = True
    """True if the prompt opens the assistant's turn."""
    continues: bool = False
    """True if the answer continues the last message, the assistant's."""
    prompt_ids: list[int] | None = None
    """Token ids of the prompt, in place of ``messages``."""
    sharing: Sharing = Sharing()
