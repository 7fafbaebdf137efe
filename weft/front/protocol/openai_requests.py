"""Requests of OpenAI's completions, converted to the common form of all APIs."""

from __future__ import annotations

from weft.front.protocol.chat import ChatRequest
from weft.front.protocol.completions import CompletionRequest
from weft.front.protocol.conversation import AnswerOptions, Conversation
from weft.front.protocol.thoughts import Thoughts
from weft.types.sampling import SamplingParams


def conversation_of(asked: ChatRequest, thoughts: Thoughts, *, thinks: bool) -> Conversation:
    """Return the conversation of a chat request. ``thinks``: True if the server can detect the model's
    reasoning.

    Raises InvalidRequest.
    """
    params = asked.sampling()
    continues = bool(asked.continue_final_message)
    return Conversation(
        messages=asked.messages,
        params=params,
        form=form_of(asked, params, include_reasoning=thoughts.shown),
        tools=asked.tool_use(),
        constraint=asked.constraint(),
        effort=thoughts.effort,
        thinks=thoughts.switch,
        # Clients send some budgets to any model. A model without reasoning needs no budget.
        thinking_budget=None if thoughts.wish and not thinks else thoughts.budget,
        template=asked.chat_template_kwargs,
        opens=not continues if asked.add_generation_prompt is None else asked.add_generation_prompt,
        continues=continues,
        prompt_ids=asked.prompt_token_ids,
        sharing=asked.sharing(),
    )


def form_of(
    asked: ChatRequest | CompletionRequest,
    params: SamplingParams,
    *,
    echo: bool = False,
    prompt_only: bool = False,
    include_reasoning: bool = True,
) -> AnswerOptions:
    """Return the form of the answer. ``params``: sampling parameters of ``asked``, with logprobs in one
    form for both routes."""
    return AnswerOptions(
        model=asked.model or "",
        stream=bool(asked.stream),
        usage_in_stream=asked.usage_in_stream,
        usage_in_chunks=asked.usage_in_chunks,
        return_token_ids=bool(asked.return_token_ids),
        skip_special_tokens=asked.skip_special_tokens is not False,
        top=params.logprobs,
        prompt_logprobs=asked.prompt_logprobs is not None,
        echo=echo,
        prompt_only=prompt_only,
        include_reasoning=include_reasoning,
    )
