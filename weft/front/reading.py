"""Reads a request's body: from bytes to the data that the engine and the answer need.

All work whose size a client chooses is here: parsing, templates, tokenization, limits. It is a pure function
of the body, so that the same code runs in a thread of the front (small bodies) and in a process of its own
(large ones, see ``readers``). No sockets and no event loop here, and nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from weft.common.errors import ContextLength, InvalidRequest, NotFound
from weft.front.protocol import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest, parse, printable
from weft.text.model import TextModel
from weft.text.submit import ModelLimits, max_tokens_for, prompt_bytes, resolve_params
from weft.text.tokenizer import TooManyTokens, check_text
from weft.types.sampling import SamplingParams, TokenParams

COLUMN_BYTES = 8
"""Bytes of one candidate at one position, as the head sends it."""
ECHO_BYTES = 28
"""Bytes of one candidate in the JSON of a completion, about."""
PROMPT_LOGPROB_BYTES = 64
"""Bytes of one candidate in the JSON of ``prompt_logprobs``, about."""
TOKEN_BYTES = 40
"""Bytes of one position in the JSON of a completion's logprobs, besides its candidates, about."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that fits the model."""

    data: bytes
    """Ids as a Submit carries them: int32, little-endian."""
    max_tokens: int
    """Output tokens: as asked for, and at most what the context leaves room for."""
    text: str = ""
    """The prompt's text as ``echo`` shows it."""

    @property
    def ids(self) -> list[int]:
        result: list[int] = np.frombuffer(self.data, "<i4").tolist()
        return result

    @property
    def count(self) -> int:
        """Tokens."""
        return len(self.data) // 4


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer that a request asks for."""

    model: str
    stream: bool
    usage_in_stream: bool
    return_token_ids: bool
    skip_special_tokens: bool
    top: int | None
    """Alternatives to show beside each output token; None without logprobs."""
    prompt_logprobs: bool = False
    """Whether the answer has the field of that name."""
    echo: bool = False
    prompt_only: bool = False
    """Whether no output is wanted. The engine makes at least one token: it is not shown."""

    @property
    def heavy(self) -> bool:
        """Whether an answer may be much larger than its text."""
        return self.top is not None or self.prompt_logprobs


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request after reading: everything is checked and resolved."""

    prompts: list[Prompt]
    params: SamplingParams
    """For the text side; lists that only the engine needs are left out."""
    token_params: TokenParams
    """For the engine, with ``max_tokens`` still to be taken from the prompt."""
    asked: AnswerOptions
    continues: bool
    """Whether the output goes on from the prompt's text."""
    param: str
    """The parameter that the prompt came in."""


class Reader:
    """Reads requests for one server. Thread-safe."""

    def __init__(
        self, text: TextModel, names: Sequence[str], limits: ModelLimits, max_response_bytes: int
    ) -> None:
        """``names``: of the served model. ``max_response_bytes``: what the part of an answer that repeats
        the prompt may take."""
        self.text = text
        self.limits = limits
        self._names = names
        self._max_response_bytes = max_response_bytes

    def chat(self, body: bytes) -> Job:
        """Reads a chat request. Raises WeftError."""
        asked = parse(body, ChatRequest)
        check_model(asked.model, self._names)
        params = asked.sampling()
        continues = bool(asked.continue_final_message)
        opens = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
        try:
            rendered = self.text.chat.encode(
                asked.messages,
                add_generation_prompt=opens,
                continue_final_message=continues,
                kwargs=asked.chat_template_kwargs,
                limit=self.limits.max_model_len,
            )
        except RecursionError:
            message = "chat_template_kwargs are nested too deeply"
            raise InvalidRequest(message, param="chat_template_kwargs") from None
        except TooManyTokens as error:
            raise self._too_long(error, "messages") from None
        form = _form(asked, params)
        return self._job([(rendered.ids, "")], params, form, continues, "messages")

    def completions(self, body: bytes) -> Job:
        """Reads a completions request. Raises WeftError."""
        asked = parse(body, CompletionRequest)
        check_model(asked.model, self._names)
        params = asked.sampling()
        form = _form(asked, params, echo=bool(asked.echo), prompt_only=asked.prompt_only)
        prompts = [self._prompt(prompt, form.echo) for prompt in asked.prompts()]
        if params.max_tokens is None:  # OpenAI's default length, cut to what the longest prompt leaves
            room = self.limits.max_model_len - max(len(ids) for ids, _ in prompts)
            least = min(DEFAULT_COMPLETION_TOKENS, max(room, 1))
            params = msgspec.structs.replace(params, max_tokens=least)
        return self._job(prompts, params, form, True, "prompt")

    def _prompt(self, prompt: str | list[int], echo: bool) -> tuple[list[int], str]:
        """(ids, text as ``echo`` shows it)."""
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            try:
                return self.text.tokenizer.encode(prompt, limit=self.limits.max_model_len), prompt
            except TooManyTokens as error:
                raise self._too_long(error, "prompt") from None
        if len(prompt) > self.limits.max_model_len:
            raise self._too_long(TooManyTokens(len(prompt)), "prompt")
        return prompt, self.text.tokenizer.decode(prompt) if echo else ""

    def _too_long(self, error: TooManyTokens, param: str) -> ContextLength:
        return ContextLength(
            f"the model's context is {self.limits.max_model_len} tokens, but the prompt has at least "
            f"{error.least}; shorten it",
            param=param,
        )

    def _job(
        self,
        prompts: Sequence[tuple[list[int], str]],
        params: SamplingParams,
        asked: AnswerOptions,
        continues: bool,
        param: str,
    ) -> Job:
        limits = self.limits
        made = [
            Prompt(
                data=prompt_bytes(ids, limits, param),
                max_tokens=max_tokens_for(len(ids), params, limits, param),
                text=text if asked.echo else "",
            )
            for ids, text in prompts
        ]
        token_params = resolve_params(params, limits, self.text.tokenizer)
        self._check_answer(made, params, asked, param)
        rest = msgspec.structs.replace(params, bad_words=(), logit_bias=None, allowed_token_ids=None)
        return Job(
            prompts=made,
            params=rest,
            token_params=token_params,
            asked=asked,
            continues=continues,
            param=param,
        )

    def _check_answer(
        self, prompts: Sequence[Prompt], params: SamplingParams, asked: AnswerOptions, param: str
    ) -> None:
        """Bounds the part of the answer that repeats the prompts, before anything is computed."""
        width = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
        tokens = sum(prompt.count for prompt in prompts)
        size = tokens * COLUMN_BYTES * width  # held until the last choice that shows it has ended
        if not asked.stream:
            shown = 4 * tokens if asked.return_token_ids else 0
            shown += tokens * PROMPT_LOGPROB_BYTES * width if asked.prompt_logprobs else 0
            if asked.echo:
                shown += sum(len(prompt.text.encode()) for prompt in prompts)
                shown += tokens * (TOKEN_BYTES + ECHO_BYTES * width) if width else 0
            # Every choice of a completion shows its prompt's part; a chat's answer has one.
            size = max(size, shown * (params.n if param == "prompt" else 1))
        if size > self._max_response_bytes:
            wanted = {
                "prompt_logprobs": asked.prompt_logprobs,
                "logprobs": bool(width),
                "return_token_ids": asked.return_token_ids,
            }
            raise InvalidRequest(
                f"the answer would repeat about {size} bytes of prompts and their logprobs; this server's "
                f"limit is {self._max_response_bytes} (--max-response-bytes): ask for fewer prompts, choices "
                "or logprobs a request" + ("" if asked.stream else ", or stream the answer"),
                param=next((name for name, asks in wanted.items() if asks), "echo"),
                code="response_too_large",
            )


def _form(
    asked: ChatRequest | CompletionRequest,
    params: SamplingParams,
    echo: bool = False,
    prompt_only: bool = False,
) -> AnswerOptions:
    """The form of the answer. ``params`` are those of ``asked``: they have logprobs in one shape for both."""
    return AnswerOptions(
        model=asked.model,
        stream=bool(asked.stream),
        usage_in_stream=asked.usage_in_stream,
        return_token_ids=bool(asked.return_token_ids),
        skip_special_tokens=asked.skip_special_tokens is not False,
        top=params.logprobs,
        prompt_logprobs=asked.prompt_logprobs is not None,
        echo=echo,
        prompt_only=prompt_only,
    )


KINDS: dict[str, Callable[[Reader, bytes], Job]] = {"chat": Reader.chat, "completions": Reader.completions}
"""How each kind of body is read."""


def check_model(name: str, names: Sequence[str]) -> None:
    """Raises NotFound unless ``name`` is served."""
    if name not in names:
        shown = printable(name, 64)
        raise NotFound(f"the model {shown} does not exist here", param="model", code="model_not_found")
