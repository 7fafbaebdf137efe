"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from weft.common.errors import InvalidRequest
from weft.front.protocol.fields import UNSUPPORTED
from weft.front.protocol.generate import Generate
from weft.front.protocol.parse import MAX_NAME, between, missing
from weft.front.protocol.tools import FunctionTool, ToolChoice, tool_use
from weft.front.tool_use import ToolUse
from weft.types.sampling import MAX_TOP_LOGPROBS, SamplingParams, StopIn

MAX_METADATA = 16
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(Generate, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED | {"echo"}

    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    """The prompt itself, in place of ``messages``."""
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    """How much to think: what the model's chat template makes of it."""
    include_reasoning: bool | None = None
    """Whether the answer shows thoughts."""
    thinking_token_budget: int | None = None
    """Tokens of a thought after which it is ended."""
    max_completion_tokens: int | None = None
    stop_in: StopIn | None = None
    """Whether stop strings are looked for in content alone, as is the default, or everywhere."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer goes on from the last message, the assistant's."""
    metadata: dict[str, str] | None = None
    """Labels for stored completions; Weft stores none."""

    def check(self) -> None:
        super().check()
        self._check_prompt()
        if self.thinking_token_budget is not None:
            between("thinking_token_budget", self.thinking_token_budget, 0, 1 << 31)
        if self.top_logprobs is not None:
            between("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
            if not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.max_completion_tokens is not None:
            between("max_completion_tokens", self.max_completion_tokens, 1, 1 << 31)
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest(
                    "max_tokens and max_completion_tokens differ; send one", param="max_tokens"
                )
        check_metadata(self.metadata)

    def _check_prompt(self) -> None:
        if self.prompt_token_ids is None:
            if self.messages is None:
                raise missing("messages")
            if not self.messages:
                raise InvalidRequest("messages must not be empty", param="messages")
            return
        if not self.prompt_token_ids:
            raise InvalidRequest("prompt_token_ids must not be empty", param="prompt_token_ids")
        for name in ("messages", "tools", "chat_template_kwargs", "reasoning_effort"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{name} has no place in a prompt of token ids; send prompt_token_ids or {name}",
                    param="prompt_token_ids",
                )

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequest."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def sampling(self) -> SamplingParams:
        more: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            more["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        if self.stop_in is not None:
            more["stop_in"] = self.stop_in
        return self.sampling_with(**more)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises InvalidRequest for labels that are too many or too long."""
    items = [text for pair in (metadata or {}).items() for text in pair]
    if len(items) > 2 * MAX_METADATA or any(len(text) > MAX_NAME for text in items):
        raise InvalidRequest(
            f"metadata must hold at most {MAX_METADATA} pairs of at most {MAX_NAME} characters",
            param="metadata",
        )
