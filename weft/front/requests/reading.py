"""Reading of a request's body: from bytes to the data for the engine and the answer.

This module does all work whose size a client controls: parsing, templates, tokenization, limits, and the
choice of the output's parser and grammar. Reading is a pure function of the body. So the same code runs in a
thread of the API server (small bodies) and in a separate process (large bodies, see ``read_worker``). The
module uses no sockets, no event loop and nothing of the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from weft.common.errors import ContextLength, DeadlineExceeded, InvalidRequest
from weft.front.protocol.chat_request import ChatRequest, conversation_of
from weft.front.protocol.completions_request import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from weft.front.protocol.conversation import AnswerOptions, Conversation, Sharing
from weft.front.protocol.effort import effort_variables, switch_variables
from weft.front.protocol.enforceable_schemas import (
    all_strict,
    enforceable_form,
    enforceable_tools,
    open_tools,
    with_hint,
    with_tool_at_fault,
)
from weft.front.protocol.generate_request import form_of
from weft.front.protocol.named import Named
from weft.front.protocol.parse import parse, unknown_model
from weft.front.protocol.turns import renamed, shows_system_inside, shows_users_apart
from weft.front.requests.proofs import Grammars, NeedsProof
from weft.grammar.backends.checks import check_tree
from weft.media.pictures import Picture, Pictures
from weft.media.video_choice import choosing
from weft.media.video_header import Header
from weft.text.chat import ChatPrompt
from weft.text.image_tokens import expanded
from weft.text.model import TextModel
from weft.text.parsing.output import ModelOutput
from weft.text.parsing.parser import OutputSpec, Tool
from weft.text.scoring import Tasks
from weft.text.submit import ModelLimits, check_routed, max_tokens_for, prompt_bytes, resolve_params
from weft.text.tokenizer import TooManyTokens, check_text
from weft.types.grammar import Grammar, JsonSchema, OneOf
from weft.types.media_item import MediaItem
from weft.types.messages import Pooling
from weft.types.sampling import SamplingParams, TokenParams

R = TypeVar("R", bound=Named)
COLUMN_BYTES = 8
"""Bytes of one candidate at one position, as sent by the engine process."""
ECHO_BYTES = 28
"""Approximate bytes of one candidate in the JSON of a completion."""
PROMPT_LOGPROB_BYTES = 64
"""Approximate bytes of one candidate in the JSON of ``prompt_logprobs``."""
TAIL_TOKENS = 64
"""Number of tokens at the end of a prompt of token ids that are decoded to detect open reasoning."""
TOKEN_BYTES = 40
"""Approximate bytes of one position in the JSON of a completion's logprobs, without the candidates."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt within the model's limits."""

    data: bytes
    """Token ids in the form of a Submit: int32, little-endian."""
    max_tokens: int
    """Maximum output tokens: the requested number, limited by the free context."""
    text: str = ""
    """Text of the prompt for ``echo``."""

    @property
    def ids(self) -> list[int]:
        result: list[int] = np.frombuffer(self.data, "<i4").tolist()
        return result

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.data) // 4


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request after reading: checked and resolved."""

    prompts: list[Prompt]
    params: SamplingParams
    """Parameters for the text side, without the lists for the engine only."""
    token_params: TokenParams
    """Parameters for the engine; ``max_tokens`` is still to be taken from each prompt."""
    asked: AnswerOptions
    continues: bool
    """True if the output continues the prompt's text."""
    param: str
    """Request field of the prompt."""
    output: OutputSpec = OutputSpec()
    """Settings of the output parser."""
    grammar: Grammar | None = None
    """Grammar of each choice's whole output; None without a constraint."""
    sharing: Sharing = Sharing()
    thinking_budget: int | None = None
    pooling: Pooling = ""
    """Pooling in place of output tokens; "" for a request with output."""
    facts: bytes = b""
    """Facts of the request for the shape of the answer, encoded by the API's own code."""
    pictures: tuple[Picture, ...] = ()
    """Images of the prompt, still to be decoded. A request with images has exactly one prompt."""
    media: tuple[MediaItem, ...] = ()
    """Decoded images of the prompt."""


class Reader:
    """Reads requests of one server. Thread-safe."""

    def __init__(
        self,
        text: TextModel,
        names: Sequence[str],
        limits: ModelLimits,
        max_response_bytes: int,
        *,
        keep_attribution: bool = False,
        pictures: Pictures | None = None,
        tasks: Tasks = Tasks(),
    ) -> None:
        """``names``: of the served model. ``max_response_bytes``: maximum size of the repeated prompts in an
        answer. ``keep_attribution``: see ``messages_conversion``. ``pictures``: None without images.
        ``tasks``: embeddings and classes of the model."""
        self.tasks = tasks
        self.text = text
        self.limits = limits
        self._names = names
        self.max_response_bytes = max_response_bytes
        self._grammars: Grammars | None = None
        self.keep_attribution = keep_attribution
        self._pictures = pictures
        self._files: Mapping[str, Header] = {}
        self._client = 0

    def knowing(
        self,
        files: Mapping[str, Header],
        client: int = 0,
        grammars: Grammars | None = None,
        names: Sequence[str] = (),
    ) -> Reader:
        """Return a copy of the reader for one request, or the reader itself if nothing is given. ``files``:
        headers of the request's files; reading raises NeedsFiles while one is missing. ``client``: number of
        the API key. ``grammars``: compiles each grammar; reading raises NeedsProof instead of a wait. None:
        grammars are not compiled. ``names``: further accepted names of models."""
        if not files and not client and grammars is None and not names:
            return self
        made = copy.copy(self)
        made._files = files
        made._client = client
        made._grammars = grammars
        made._names = (*self._names, *names)
        return made

    @property
    def system_inside(self) -> bool:
        """True if the chat template shows system messages after the first message."""
        return shows_system_inside(self.text.chat)

    @property
    def users_apart(self) -> bool:
        """True if the chat template takes two user messages in a row."""
        return shows_users_apart(self.text.chat)

    def check_model(self, name: str) -> None:
        """Raise NotFound unless ``name`` is served."""
        check_model(name, self._names)

    def named(self, asked: R) -> R:
        """Return ``asked`` with a model, by default the server's own, and with the model's sampling
        defaults. Raises NotFound for an unknown model."""
        # Requests without sampling, such as embeddings, lack these fields: 0 is not None, so nothing is set.
        defaults = self.limits.defaults.items()
        given: dict[str, Any] = {name: one for name, one in defaults if getattr(asked, name, 0) is None}
        if asked.model is None:
            given["model"] = self._names[0]
        else:
            check_model(asked.model, self._names)
        return msgspec.structs.replace(asked, **given) if given else asked

    def serves(self, name: str) -> bool:
        """Return True for a name that requests may use."""
        return name in self._names

    def chat(self, body: bytes, *, clip: bool = False) -> Job:
        """Return the job of a chat request. ``clip``: see ``converse``. Raises WeftError, NeedsFiles and
        NeedsProof."""
        asked = self.named(parse(body, ChatRequest))
        reasoning_request = asked.reasoning_request()
        try:
            thinks = bool(self.text.output.reasoning_end)
            return self.converse(conversation_of(asked, reasoning_request, thinks=thinks), clip=clip)
        except InvalidRequest as error:
            raise renamed(error, reasoning_request.names) from None

    def converse(self, asked: Conversation, *, clip: bool = False) -> Job:
        """Return the job of a conversation of any API. ``clip``: reduce ``max_tokens`` to the free context
        instead of an error. Raises the errors of ``chat``."""
        param = "messages" if asked.prompt_ids is None else "prompt_token_ids"
        pictures: tuple[Picture, ...] = ()
        if asked.prompt_ids is None:
            prompt, pictures = self.prompted(asked)
        else:
            prompt = self._given(asked.prompt_ids)
        output = output_of(asked, prompt)
        self._check_budget(asked)
        params = asked.params
        # `clip` needs room for one token; without room, the usual context error is right.
        room = self.limits.max_model_len - len(prompt.ids)
        if clip and params.max_tokens is not None and params.max_tokens > room >= 1:
            params = msgspec.structs.replace(params, max_tokens=room)
        return self._job(
            [(prompt.ids, "")],
            params,
            asked.form,
            continues=asked.continues,
            param=param,
            output=output,
            grammar=grammar_of(self.text.output, asked, output, self.check_grammar),
            sharing=asked.sharing,
            thinking_budget=asked.thinking_budget,
            pictures=pictures,
        )

    def _check_budget(self, asked: Conversation) -> None:
        """Raise InvalidRequest for a reasoning budget with logprobs, or without a known reasoning end."""
        name = "thinking_token_budget"
        if asked.thinking_budget is None:
            return
        if not self.text.output.reasoning_end:
            raise InvalidRequest(
                "the server does not know the reasoning format of this model; start the server with "
                "--reasoning-parser",
                param=name,
            )
        if asked.params.logprobs is not None:
            raise InvalidRequest(
                f"{name} cannot be combined with logprobs; send only one of the two", param=name
            )

    def _given(self, ids: list[int]) -> ChatPrompt:
        """Return the prompt for token ids rendered by the client. Only the last ``TAIL_TOKENS`` ids are
        decoded, to detect open reasoning. Raises ContextLength, and InvalidRequest for invalid ids."""
        self._prompt(ids, "prompt_token_ids", echo=False)
        prompt_bytes(ids, self.limits, "prompt_token_ids")  # raises for ids outside the vocabulary
        known = [token for token in ids[-TAIL_TOKENS:] if token < self.text.tokenizer.vocab_size]
        end = self.text.tokenizer.decode(known, skip_special_tokens=False)
        return ChatPrompt(ids, end, self.text.output.in_reasoning(end, ""))

    def prompted(self, asked: Conversation) -> tuple[ChatPrompt, tuple[Picture, ...]]:
        """Return (the final prompt, with one placeholder per image token; the images with their places). A
        model without images, or a prompt without images, gives an empty tuple. Raises WeftError, NeedsFiles
        for images without a known header, and ContextLength for a prompt that is too long with its
        images."""
        prompt = self._rendered(asked)
        if not prompt.shown or self._pictures is None:
            return prompt, ()
        found = self._pictures.measured(prompt.shown, self._files)
        # Each image has one placeholder so far: check the length before the expansion.
        least = len(prompt.ids) + sum(picture.more for picture in found)
        if least > self.limits.max_model_len:
            raise self.too_long(TooManyTokens(least), "messages")
        ids, starts = expanded(prompt.ids, self._pictures.facts, found)
        placed = [msgspec.structs.replace(p, start=at) for p, at in zip(found, starts, strict=True)]
        return msgspec.structs.replace(prompt, ids=ids), tuple(placed)

    def _rendered(self, asked: Conversation) -> ChatPrompt:
        """Return the prompt rendered by the chat template, with one placeholder per image. Raises NeedsFiles,
        ContextLength, and InvalidRequest for messages, tools or template variables that the template refuses
        or that are nested too deeply."""
        try:
            return self.text.chat.encode(
                asked.messages,
                add_generation_prompt=asked.opens,
                continue_final_message=asked.continues,
                tools=asked.tools.shown,
                kwargs=variables_of(asked, self.text),
                limit=self.limits.max_model_len,
                choose=choosing(self._pictures, self._files),
            )
        except RecursionError:
            param = "chat_template_kwargs" if asked.template else "tools" if asked.tools.shown else "messages"
            raise InvalidRequest(f"{param} is nested too deeply", param=param) from None
        except TooManyTokens as error:
            raise self.too_long(error, "messages") from None

    def completions(self, body: bytes, *, clip: bool = False) -> Job:
        """Return the job of a completions request. Without ``max_tokens``, the length is
        ``DEFAULT_COMPLETION_TOKENS`` or the free context, if smaller. ``clip``: reduce ``max_tokens`` to the
        free context instead of an error. Raises WeftError, and NeedsProof for a grammar without a verdict."""
        asked = self.named(parse(body, CompletionRequest))
        params = asked.sampling()
        form = form_of(asked, params, echo=bool(asked.echo), prompt_only=asked.prompt_only)
        constraint = asked.constraint()
        grammar = None if constraint is None else constraint.grammar
        if constraint is not None:
            self.check_grammar(constraint.grammar, constraint.param)
        prompts = [self._prompt(prompt, "prompt", form.echo) for prompt in asked.prompts()]
        # OpenAI's default length, limited by the free context of the longest prompt
        wanted = DEFAULT_COMPLETION_TOKENS if params.max_tokens is None else params.max_tokens
        if params.max_tokens is None or clip:
            room = self.limits.max_model_len - max(len(ids) for ids, _ in prompts)
            params = msgspec.structs.replace(params, max_tokens=min(wanted, max(room, 1)))
        return self._job(
            prompts, params, form, continues=True, param="prompt", grammar=grammar, sharing=asked.sharing()
        )

    def ids_of(self, prompt: str | list[int], param: str) -> list[int]:
        """Return the token ids of a prompt. Raises the errors of ``_prompt``."""
        return self._prompt(prompt, param, echo=False)[0]

    def _prompt(self, prompt: str | list[int], param: str, echo: bool) -> tuple[list[int], str]:
        """Return (token ids, text for ``echo``). A string is tokenized. Token ids are unchecked except for
        their number, and decoded only for ``echo``. Raises InvalidRequest and ContextLength."""
        if isinstance(prompt, str):
            check_text(prompt, param)
            try:
                return self.text.tokenizer.encode(prompt, limit=self.limits.max_model_len), prompt
            except TooManyTokens as error:
                raise self.too_long(error, param) from None
        if len(prompt) > self.limits.max_model_len:
            raise self.too_long(TooManyTokens(len(prompt)), param)
        return prompt, self.text.tokenizer.decode(prompt) if echo else ""

    def too_long(self, error: TooManyTokens, param: str) -> ContextLength:
        """Return the error for a prompt longer than the model's context."""
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
        *,
        continues: bool,
        param: str,
        output: OutputSpec = OutputSpec(),
        grammar: Grammar | None = None,
        sharing: Sharing = Sharing(),
        thinking_budget: int | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Job:
        """Return the job of checked prompts, each (token ids, text for ``echo``). Each prompt gets its
        output limit. Lists for the engine only are moved from the text side's parameters to the resolved
        ones. Raises InvalidRequest or ContextLength."""
        limits = self.limits
        made = [
            Prompt(
                data=prompt_bytes(ids, limits, param),
                max_tokens=max_tokens_for(len(ids), params, limits, param),
                text=text if asked.echo else "",
            )
            for ids, text in prompts
        ]
        for prompt in made:
            check_routed(params, prompt.count, limits)
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
            output=output,
            grammar=grammar,
            sharing=sharing,
            thinking_budget=thinking_budget,
            pictures=pictures,
        )

    def scored(
        self, prompts: Sequence[list[int]], params: SamplingParams, form: AnswerOptions, param: str
    ) -> Job:
        """Return the job of prompts of token ids whose logprobs are the answer. Raises InvalidRequest or
        ContextLength."""
        made = [self._prompt(ids, param, echo=False) for ids in prompts]
        return self._job(made, params, form, continues=True, param=param)

    def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Raise InvalidRequest, with ``param``, for a grammar that fails or takes too long to compile, and
        NeedsProof for a compile under way or without a verdict. A reader without ``grammars`` does nothing.
        Starts the compile; never waits."""
        if self._grammars is None:
            return
        try:
            check_tree(grammar)  # so no large grammar waits in the queue
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param, code=error.error_code) from None
        task = self._grammars.submit(grammar, self._client)
        if not task.done():
            raise NeedsProof(grammar, param)
        try:
            task.wait()
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param, code=error.error_code) from None
        except DeadlineExceeded:
            raise takes_too_long(param) from None

    def _check_answer(
        self, prompts: Sequence[Prompt], params: SamplingParams, asked: AnswerOptions, param: str
    ) -> None:
        """Raise InvalidRequest if the repeated prompts in the answer, with their logprobs, would exceed the
        limit. Runs before any computation."""
        width = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
        tokens = sum(prompt.count for prompt in prompts)
        size = (
            tokens * COLUMN_BYTES * width
        )  # in memory until the last choice that shows the prompt has ended
        if params.prompt_logprobs == -1:  # the whole vocabulary: values without ids
            size = tokens * 4 * (1 + self.limits.vocab_size)
        routes = self.limits.routes
        if params.return_routed_experts and routes is not None:  # every choice shows the prompt's
            first = params.routed_experts_prompt_start
            size += sum(prompt.count - first for prompt in prompts) * routes.nbytes * params.n
        if not asked.stream and not asked.binary:
            shown = 4 * tokens if asked.return_token_ids else 0
            shown += tokens * PROMPT_LOGPROB_BYTES * width if asked.prompt_logprobs else 0
            if asked.echo:
                shown += sum(len(prompt.text.encode()) for prompt in prompts)
                shown += tokens * (TOKEN_BYTES + ECHO_BYTES * width) if width else 0
            # Every choice of a completion repeats the prompt; a chat answer shows the prompt once.
            size = max(size, shown * (params.n if param == "prompt" else 1))
        if size > self.max_response_bytes:
            wanted = {
                "return_routed_experts": params.return_routed_experts and params.prompt_logprobs is None,
                "prompt_logprobs": asked.prompt_logprobs,
                "logprobs": bool(width),
                "return_token_ids": asked.return_token_ids,
            }
            raise InvalidRequest(
                f"the answer would have about {size} bytes of prompts, their logprobs and experts; this "
                f"server's limit is {self.max_response_bytes} (--max-response-bytes): request fewer prompts, "
                "choices or logprobs" + ("" if asked.stream else ", or stream the answer"),
                param=next((name for name, asks in wanted.items() if asks), "echo"),
                code="response_too_large",
            )


def takes_too_long(param: str) -> InvalidRequest:
    """Return the error for a compile time-out of a grammar."""
    return InvalidRequest(
        f"{param} takes too long to compile; make the schema, pattern or grammar simpler",
        param=param,
        code="grammar_timeout",
    )


def check_model(name: str, names: Sequence[str]) -> None:
    """Raise NotFound unless ``name`` is served."""
    if name not in names:
        raise unknown_model(name)


Check = Callable[[Grammar, str], None]
"""Raises InvalidRequest, with the parameter's name, for a grammar that does not compile."""


def output_of(asked: Conversation, prompt: ChatPrompt) -> OutputSpec:
    """Return the parser settings for the output."""
    return OutputSpec(
        tools=asked.tools.callable,
        tool_calls=bool(asked.tools.callable),
        reasoning=True,
        in_reasoning=prompt.in_reasoning,
        parallel=asked.tools.parallel,
    )


def grammar_of(model: ModelOutput, asked: Conversation, spec: OutputSpec, check: Check) -> Grammar | None:
    """Return the grammar of the whole output, reasoning included; None for unconstrained output.

    Calls follow the tools' schemas if calls are required, or if a tool is strict. An answer follows its
    format. With tools and a format, the output is either calls, or an answer in the format. Required calls
    win over a format, because then the output is no answer. Raises InvalidRequest for a constraint that
    cannot be enforced.
    """
    calling = bool(spec.tools) and asked.tools.mode == "required"
    # Without a format, or with required calls: the grammar of calls alone.
    if calling or asked.constraint is None:
        if not calling and not any(tool.strict for tool in spec.tools):
            return None
        return _calls(model, spec, "required" if calling else "auto", check)
    param = asked.constraint.param

    def answered(form: Grammar) -> Grammar:
        """Return the grammar of an answer in ``form``, reasoning included. Raises InvalidRequest for a
        grammar that does not compile."""
        grammar = model.answer_grammar(form, in_reasoning=spec.in_reasoning)
        check(grammar, param)
        return grammar

    form = asked.constraint.grammar
    try:
        answer = answered(form)
    except InvalidRequest as error:
        if asked.constraint.strict or not isinstance(form, JsonSchema):
            raise with_hint(error, form, asked.constraint.may_loosen) from None
        # A loose schema gets a second attempt, without the keywords that a grammar cannot enforce.
        answer = answered(enforceable_form(form, param, error))
    if not spec.tools:
        return answer
    calls = _calls(model, spec, "required", check)
    assert calls is not None
    both = OneOf((calls, answer))
    check(both, param)
    return both


def _calls(
    model: ModelOutput, spec: OutputSpec, choice: Literal["auto", "required"], check: Check
) -> Grammar | None:
    """Return the grammar of calls; None for unconstrained calls. Up to three attempts are made: full
    schemas, schemas without unsupported keywords, and any object as arguments. A tool that is strict keeps
    its schema in every attempt. Raises InvalidRequest that names the tools at fault if no attempt
    compiles."""

    def made(tools: Sequence[Tool]) -> Grammar | None:
        """Return the checked grammar of calls of ``tools``; None for unconstrained calls. Raises
        InvalidRequest."""
        grammar = model.call_grammar(tools, choice, parallel=spec.parallel, in_reasoning=spec.in_reasoning)
        if grammar is not None:
            check(grammar, "tools")
        return grammar

    # Three attempts: full schemas, schemas without unsupported keywords, any object as arguments.
    for relaxed in (tuple, enforceable_tools, open_tools):
        try:
            return made(relaxed(spec.tools))
        except InvalidRequest as error:
            refusal = error
            if all_strict(spec.tools):
                break
    raise with_tool_at_fault(refusal, spec.tools) from None


def variables_of(asked: Conversation, text: TextModel) -> dict[str, Any] | None:
    """Return the chat template's variables: from the effort, from the reasoning switch, and from the
    request. The request's own variables win. Return None if the request has no variables, no effort and no
    reasoning switch."""
    source, thinks = text.chat.source or "", text.output.tells_reasoning
    made = {} if asked.effort is None else effort_variables(asked.effort, source, thinks)
    if asked.thinks is not None:
        made |= switch_variables(asked.thinks, source, thinks)
    return {**made, **(asked.template or {})} if made else asked.template
