"""POST /v1/chat/completions: the request, its reasoning settings, and the conversion to a conversation.

Chat clients spell reasoning settings in many ways. All spellings become one ``ReasoningRequest``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import Conversation
from weft.front.protocol.fields import CHAT_NEUTRAL, UNSUPPORTED
from weft.front.protocol.generate_request import Generate, form_of
from weft.front.protocol.parse import MAX_NAME, between, missing
from weft.front.protocol.tools import FunctionTool, ToolChoice, ToolUse, tool_use
from weft.types.sampling import MAX_TOP_LOGPROBS, SEED_MASK, SamplingParams, StopIn

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
V = TypeVar("V", str, int, bool)


class ThinkingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``thinking`` as written by clients of Anthropic, DeepSeek, GLM and Kimi."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None
    display: str | None = None
    """No effect, like the two fields below: chat shows reasoning in one form only."""
    clear_thinking: bool | None = None
    """No effect: the chat template decides which earlier reasoning the model sees."""
    keep: Any = None

    @property
    def switch(self) -> bool | None:
        """Reasoning on or off; None leaves the decision to the model."""
        return {"enabled": True, "disabled": False}.get(self.type)


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``reasoning`` as written by clients of OpenRouter."""

    effort: Effort | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """True to leave reasoning out of the answer."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: OpenAI's summary form. Here reasoning is shown unchanged."""


class ReasoningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning settings of a request."""

    effort: str | None = None
    switch: bool | None = None
    """Reasoning on or off; None leaves the decision to the model."""
    budget: int | None = None
    """Maximum tokens of reasoning; then the reasoning is ended."""
    wish: bool = False
    """True if a model without reasoning accepts the budget, too."""
    shown: bool = True
    names: dict[str, str] = {}
    """Conversation parameter -> parameter name in the request."""


def one_of(asked: Sequence[tuple[str, V | None]]) -> tuple[str, V | None]:
    """Return the value given under several names, with its first name; ("", None) if none is given. Raises
    InvalidRequest for two different values."""
    given = [(name, value) for name, value in asked if value is not None]
    if not given:
        return "", None
    first, value = given[0]
    for name, other in given[1:]:
        if other != value:
            raise InvalidRequest(
                f"{first} and {name} have different values; send only one of the two", param=name
            )
    return first, value


MAX_METADATA = 16
MAX_BUDGET = 1 << 31


_FOR_TEMPLATE = ("reasoning_effort", "enable_thinking", "thinking", "reasoning")
_BUDGETS = ("thinking_token_budget", "max_thinking_tokens", "thinking_budget", "thinking_budget_tokens")


class ChatRequest(Generate, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = CHAT_NEUTRAL
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED | {"echo"}

    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt, in place of ``messages``."""
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    """Reasoning effort, passed to the model's chat template."""
    include_reasoning: bool | None = None
    """True to show reasoning in the answer."""
    thinking_token_budget: int | None = None
    """Maximum tokens of reasoning; then the reasoning is ended."""
    max_thinking_tokens: int | None = None
    """Alias of ``thinking_token_budget`` in other servers, like the two fields below."""
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    enable_thinking: bool | None = None
    """Variable of the chat template: reasoning on or off."""
    thinking: bool | ThinkingOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_completion_tokens: int | None = None
    stop_in: StopIn | None = None
    """Scope of stop strings: content only (the default), or the whole output."""
    random_seed: int | None = None
    """Alias of ``seed`` in Mistral's API."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """True to continue the last message, the assistant's."""
    metadata: dict[str, str] | None = None
    """Labels for stored completions. Weft stores no completions."""

    def check(self) -> None:
        """Raise InvalidRequest for parameters that are out of range, exclude each other, or lack another
        parameter.
        """
        super().check()
        self._check_prompt()
        self.reasoning_request()
        if self.top_logprobs is not None:
            between("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
            if not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.max_completion_tokens is not None:
            between("max_completion_tokens", self.max_completion_tokens, 1, 1 << 31)
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest(
                    "max_tokens and max_completion_tokens are different; send only one of the two",
                    param="max_tokens",
                )
        if self.random_seed is not None:
            between("random_seed", self.random_seed, -(1 << 63), SEED_MASK)
            if self.seed not in (None, self.random_seed):
                raise InvalidRequest("seed and random_seed are different; send only one", param="random_seed")
        check_metadata(self.metadata)

    def _check_prompt(self) -> None:
        """Raise InvalidRequest without a prompt, and for parameters without effect on token ids."""
        if self.prompt_token_ids is None:
            if self.messages is None:
                raise missing("messages")
            if not self.messages:
                raise InvalidRequest("messages must not be empty", param="messages")
            return
        if not self.prompt_token_ids:
            raise InvalidRequest("prompt_token_ids must not be empty", param="prompt_token_ids")
        for name in ("messages", "tools", "chat_template_kwargs", *_FOR_TEMPLATE):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{name} has no effect with prompt_token_ids; send either prompt_token_ids or {name}",
                    param="prompt_token_ids",
                )

    def reasoning_request(self) -> ReasoningRequest:
        """Return the reasoning settings of all aliases. Raises InvalidRequest for two different values of
        one setting."""
        options = self.thinking if isinstance(self.thinking, ThinkingOptions) else None
        routed = self.reasoning or ReasoningOptions()
        # Each setting has several aliases: collect (name, value) pairs, and let `one_of` find conflicts.
        _, effort = one_of([("reasoning_effort", self.reasoning_effort), ("reasoning", routed.effort)])
        switch_name, switch = one_of(
            [
                ("enable_thinking", self.enable_thinking),
                ("thinking", self.thinking if isinstance(self.thinking, bool) else None),
                ("thinking", None if options is None else options.switch),
                ("reasoning", routed.enabled),
            ]
        )
        budget_name, budget = one_of(
            [
                *((name, getattr(self, name)) for name in _BUDGETS),
                ("thinking", None if options is None else options.budget_tokens),
                ("reasoning", routed.max_tokens),
            ]
        )
        if budget is not None:
            between(budget_name, budget, 0, MAX_BUDGET)
        return ReasoningRequest(
            effort=effort,
            switch=switch,
            budget=budget,
            wish=budget_name in ("thinking", "reasoning"),
            shown=self.include_reasoning is not False and not routed.exclude,
            names={"enable_thinking": switch_name, "thinking_token_budget": budget_name},
        )

    def tool_use(self) -> ToolUse:
        """Return the tools and the choice. Raises InvalidRequest."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidRequest for a value out of range."""
        more: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            more["max_tokens"] = self.max_completion_tokens
        if self.random_seed is not None:
            more["seed"] = self.random_seed
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        if self.stop_in is not None:
            more["stop_in"] = self.stop_in
        return self.sampling_with(**more)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise InvalidRequest for too many or too long labels."""
    items = [text for pair in (metadata or {}).items() for text in pair]
    if len(items) > 2 * MAX_METADATA or any(len(text) > MAX_NAME for text in items):
        raise InvalidRequest(
            f"metadata must hold at most {MAX_METADATA} pairs of at most {MAX_NAME} characters",
            param="metadata",
        )


def conversation_of(asked: ChatRequest, reasoning_request: ReasoningRequest, *, thinks: bool) -> Conversation:
    """Return the conversation of a chat request. ``thinks``: True if the server can detect the model's
    reasoning.

    Raises InvalidRequest.
    """
    params = asked.sampling()
    continues = bool(asked.continue_final_message)
    return Conversation(
        messages=asked.messages,
        params=params,
        form=form_of(asked, params, include_reasoning=reasoning_request.shown),
        tools=asked.tool_use(),
        constraint=asked.constraint(),
        effort=reasoning_request.effort,
        thinks=reasoning_request.switch,
        # Clients send some budgets to any model. A model without reasoning needs no budget.
        thinking_budget=None if reasoning_request.wish and not thinks else reasoning_request.budget,
        template=asked.chat_template_kwargs,
        opens=not continues if asked.add_generation_prompt is None else asked.add_generation_prompt,
        continues=continues,
        prompt_ids=asked.prompt_token_ids,
        sharing=asked.sharing(),
    )
