"""Reads a request's body: from bytes to the data that the engine and the answer need.

All work whose size a client chooses is here: parsing, templates, tokenization, limits. It is a pure function
of the body, so that the same code runs in a thread of the front (small bodies) and in a process of its own
(large ones, see ``readers``). No sockets and no event loop here, and nothing of the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from weft.common.errors import ContextLength, DeadlineExceeded, InvalidRequest, NotFound
from weft.front.asked_output import grammar_of, output_of, variables_of
from weft.front.conversation import AnswerOptions, Conversation, Sharing
from weft.front.messages.protocol import CountRequest
from weft.front.openai_requests import conversation_of, form_of
from weft.front.proofs import Compiling, Grammars
from weft.front.protocol.chat import ChatRequest
from weft.front.protocol.completions import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from weft.front.protocol.embeddings import EmbeddingRequest
from weft.front.protocol.parse import parse, printable
from weft.front.responses.protocol import TokensRequest
from weft.front.turns import renamed, shows_system_inside, shows_users_apart
from weft.grammar.checks import check_tree
from weft.grammar.service import Compile
from weft.media.headers import ImageHeader
from weft.media.pictures import Picture, Pictures
from weft.text.chat import ChatPrompt, expanded
from weft.text.model import TextModel
from weft.text.parsing.parser import OutputSpec
from weft.text.submit import ModelLimits, max_tokens_for, prompt_bytes, resolve_params
from weft.text.tokenizer import TooManyTokens, check_text
from weft.types.grammar import Grammar
from weft.types.media import MediaItem
from weft.types.sampling import SamplingParams, TokenParams

R = TypeVar("R", bound=ChatRequest | CompletionRequest | EmbeddingRequest | CountRequest | TokensRequest)
COLUMN_BYTES = 8
"""Bytes of one candidate at one position, as the head sends it."""
ECHO_BYTES = 28
"""Bytes of one candidate in the JSON of a completion, about."""
PROMPT_LOGPROB_BYTES = 64
"""Bytes of one candidate in the JSON of ``prompt_logprobs``, about."""
TAIL_TOKENS = 64
"""At the end of a prompt of token ids, by which is seen whether it ends inside a thought."""
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
    output: OutputSpec = OutputSpec()
    """How each choice's text is read."""
    grammar: Grammar | None = None
    """What each choice's whole output may be."""
    sharing: Sharing = Sharing()
    thinking_budget: int | None = None
    facts: bytes = b""
    """What the answer's shape needs to know of the request, as its API writes it down."""
    pictures: tuple[Picture, ...] = ()
    """The images of the prompt, of which there is one then, still to be decoded."""
    media: tuple[MediaItem, ...] = ()
    """The same, decoded."""


class Reader:
    """Reads requests for one server. Thread-safe."""

    def __init__(
        self,
        text: TextModel,
        names: Sequence[str],
        limits: ModelLimits,
        max_response_bytes: int,
        *,
        grammars: Grammars | None = None,
        keep_attribution: bool = False,
        pictures: Pictures | None = None,
        waits: bool = True,
    ) -> None:
        """``names``: of the served model. ``max_response_bytes``: what the part of an answer that repeats
        the prompt may take. ``grammars``: proves that grammars compile, before any is sent to a head.
        ``keep_attribution``: see ``weft.front.messages.conversion``. ``pictures``: None where the model takes
        no images. ``waits``: whether a grammar that takes long is waited for; else every method that reads
        raises Compiling where there is one.
        """
        self.text = text
        self.limits = limits
        self._names = names
        self._max_response_bytes = max_response_bytes
        self._grammars = grammars
        self.keep_attribution = keep_attribution
        self._pictures = pictures
        self._files: Mapping[str, ImageHeader] = {}
        self._client = 0
        self._waits = waits

    def knowing(
        self, files: Mapping[str, ImageHeader], client: int = 0, grammars: Grammars | None = None
    ) -> Reader:
        """The same reader for one request of ``client``, of whose images ``files`` were fetched, by their
        URLs. Until all are, reading it raises NeedsFiles. ``grammars`` replaces that of the reader.
        """
        if not files and not client and grammars is None:
            return self
        made = copy.copy(self)
        made._files = files
        made._client = client
        made._grammars = grammars or self._grammars
        return made

    @property
    def system_inside(self) -> bool:
        """True when the chat template shows a system message that is not the first one."""
        return shows_system_inside(self.text.chat)

    @property
    def users_apart(self) -> bool:
        """True when the chat template takes two messages of the user in a row."""
        return shows_users_apart(self.text.chat)

    def check_model(self, name: str) -> None:
        """Raises NotFound unless ``name`` is served."""
        check_model(name, self._names)

    def named(self, asked: R) -> R:
        """``asked`` with a model: the server's own where the request names none. Raises NotFound."""
        if asked.model is None:
            return msgspec.structs.replace(asked, model=self._names[0])
        check_model(asked.model, self._names)
        return asked

    def chat(self, body: bytes) -> Job:
        """Reads a chat request. Raises WeftError."""
        asked = self.named(parse(body, ChatRequest))
        thoughts = asked.thoughts()
        try:
            thinks = bool(self.text.output.thought_end)
            return self.converse(conversation_of(asked, thoughts, thinks=thinks))
        except InvalidRequest as error:
            raise renamed(error, thoughts.names) from None

    def converse(self, asked: Conversation, *, clip: bool = False) -> Job:
        """Reads what any API for conversations asks. ``clip``: more output than the context leaves room for
        may be asked for. Raises WeftError."""
        param = "messages" if asked.prompt_ids is None else "prompt_token_ids"
        pictures: tuple[Picture, ...] = ()
        if asked.prompt_ids is None:
            prompt, pictures = self.prompted(asked)
        else:
            prompt = self._given(asked.prompt_ids)
        output = output_of(asked, prompt)
        self._check_budget(asked)
        params = asked.params
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
            grammar=grammar_of(self.text.output, asked, output, self._check_grammar),
            sharing=asked.sharing,
            thinking_budget=asked.thinking_budget,
            pictures=pictures,
        )

    def _check_budget(self, asked: Conversation) -> None:
        name = "thinking_token_budget"
        if asked.thinking_budget is None:
            return
        if not self.text.output.thought_end:
            raise InvalidRequest(
                "this model has no thoughts that the server knows; name their format with --reasoning-parser",
                param=name,
            )
        if asked.params.logprobs is not None:
            raise InvalidRequest(
                "the tokens that end a thought for its budget have no logprobs; send either", param=name
            )

    def _given(self, ids: list[int]) -> ChatPrompt:
        """A prompt that the client has rendered itself."""
        self._prompt(ids, "prompt_token_ids", echo=False)
        prompt_bytes(ids, self.limits, "prompt_token_ids")  # they are ids of the model
        known = [token for token in ids[-TAIL_TOKENS:] if token < self.text.tokenizer.vocab_size]
        end = self.text.tokenizer.decode(known, skip_special_tokens=False)
        return ChatPrompt(ids, end, self.text.output.in_thought(end, ""))

    def prompted(self, asked: Conversation) -> tuple[ChatPrompt, tuple[Picture, ...]]:
        """The prompt as the model gets it: as many placeholders for each image as it has tokens. Raises
        WeftError, or NeedsFiles.
        """
        prompt = self._rendered(asked)
        if not prompt.shown or self._pictures is None:
            return prompt, ()
        found = self._pictures.measured(prompt.shown, self._files)
        least = len(prompt.ids) + sum(picture.count - 1 for picture in found)
        if least > self.limits.max_model_len:
            raise self._too_long(TooManyTokens(least), "messages")
        ids, starts = expanded(
            prompt.ids, self._pictures.facts.placeholders, [picture.count for picture in found]
        )
        placed = [msgspec.structs.replace(p, start=at) for p, at in zip(found, starts, strict=True)]
        return msgspec.structs.replace(prompt, ids=ids), tuple(placed)

    def _rendered(self, asked: Conversation) -> ChatPrompt:
        """The prompt that the chat template makes. Raises WeftError."""
        try:
            return self.text.chat.encode(
                asked.messages,
                add_generation_prompt=asked.opens,
                continue_final_message=asked.continues,
                tools=asked.tools.told,
                kwargs=variables_of(asked, self.text),
                limit=self.limits.max_model_len,
            )
        except RecursionError:
            param = "chat_template_kwargs" if asked.template else "tools" if asked.tools.told else "messages"
            raise InvalidRequest(f"{param} holds what is nested too deeply", param=param) from None
        except TooManyTokens as error:
            raise self._too_long(error, "messages") from None

    def completions(self, body: bytes) -> Job:
        """Reads a completions request. Raises WeftError."""
        asked = self.named(parse(body, CompletionRequest))
        params = asked.sampling()
        form = form_of(asked, params, echo=bool(asked.echo), prompt_only=asked.prompt_only)
        constraint = asked.constraint()
        grammar = None if constraint is None else constraint.grammar
        if constraint is not None:
            self._check_grammar(constraint.grammar, constraint.param)
        prompts = [self._prompt(prompt, "prompt", form.echo) for prompt in asked.prompts()]
        if params.max_tokens is None:  # OpenAI's default length, cut to what the longest prompt leaves
            room = self.limits.max_model_len - max(len(ids) for ids, _ in prompts)
            least = min(DEFAULT_COMPLETION_TOKENS, max(room, 1))
            params = msgspec.structs.replace(params, max_tokens=least)
        return self._job(
            prompts, params, form, continues=True, param="prompt", grammar=grammar, sharing=asked.sharing()
        )

    def embeddings(self, body: bytes) -> Job:
        """Reads an embeddings request. Raises WeftError."""
        asked = self.named(parse(body, EmbeddingRequest))
        prompts = [self._prompt(prompt, "input", echo=False)[0] for prompt in asked.prompts()]
        return Job(
            prompts=[Prompt(data=prompt_bytes(ids, self.limits, "input"), max_tokens=1) for ids in prompts],
            params=SamplingParams(max_tokens=1),
            token_params=TokenParams(max_tokens=1),
            asked=AnswerOptions(
                model=asked.model or "", stream=False, encoding=asked.encoding_format or "float"
            ),
            continues=True,
            param="input",
            sharing=asked.sharing(),
        )

    def _prompt(self, prompt: str | list[int], param: str, echo: bool) -> tuple[list[int], str]:
        """(ids, text as ``echo`` shows it)."""
        if isinstance(prompt, str):
            check_text(prompt, param)
            try:
                return self.text.tokenizer.encode(prompt, limit=self.limits.max_model_len), prompt
            except TooManyTokens as error:
                raise self._too_long(error, param) from None
        if len(prompt) > self.limits.max_model_len:
            raise self._too_long(TooManyTokens(len(prompt)), param)
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
        *,
        continues: bool,
        param: str,
        output: OutputSpec = OutputSpec(),
        grammar: Grammar | None = None,
        sharing: Sharing = Sharing(),
        thinking_budget: int | None = None,
        pictures: tuple[Picture, ...] = (),
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
            output=output,
            grammar=grammar,
            sharing=sharing,
            thinking_budget=thinking_budget,
            pictures=pictures,
        )

    def _check_grammar(self, grammar: Grammar, param: str) -> None:
        """Raises InvalidRequest, naming ``param``, for a grammar that does not compile in time, Compiling."""
        if self._grammars is None:
            return
        try:
            check_tree(grammar)  # what waits for its turn is small
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param, code=error.error_code) from None
        task = self._grammars.submit(grammar, self._client)
        if not (self._waits or task.done()):
            assert isinstance(task, Compile)
            raise Compiling(task, param)
        try:
            task.wait()
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param, code=error.error_code) from None
        except DeadlineExceeded:
            raise takes_too_long(param) from None

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


def takes_too_long(param: str) -> InvalidRequest:
    """The error of a grammar that was not compiled in time."""
    return InvalidRequest(
        f"{param} takes too long to compile; ask for something simpler", param=param, code="grammar_timeout"
    )


def check_model(name: str, names: Sequence[str]) -> None:
    """Raises NotFound unless ``name`` is served."""
    if name not in names:
        shown = printable(name, 64)
        raise NotFound(f"the model {shown} does not exist here", param="model", code="model_not_found")
