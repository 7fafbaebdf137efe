"""Requests from a caller's prompts: ``Submit`` messages, and choices that collect the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from weft.api.request_outputs import RequestOutput, completion_of
from weft.common.errors import ContextLength, ErrorInfo, InvalidRequest, WeftError
from weft.config.resolved import MediaLimits
from weft.media.local import LocalPictures, placed
from weft.scheduler.images.media_book import check_media
from weft.text.choice import Choice, routed_experts
from weft.text.detokenizer import Stops
from weft.text.image_tokens import expanded
from weft.text.logprobs import PositionLogprobs
from weft.text.model import TextModel
from weft.text.submit import IdMint, ModelLimits, SeedMint, build_submits, prompt_bytes, submits_of
from weft.text.tokenizer import Tokenizer
from weft.types.grammar import Grammar
from weft.types.media_item import MediaItem
from weft.types.messages import Pooling, Submit
from weft.types.routes import RouteShape
from weft.types.sampling import SamplingParams, TokenParams

_FORMS = 'a string, {"prompt": "..."}, or {"prompt_token_ids": [...]} with or without "media": [MediaItem...]'


class Request:
    """One prompt: the messages to the engine, and the choices that collect the output."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        submits: list[Submit],
        choices: list[Choice],
    ) -> None:
        """``prompt``: text; None for a prompt of token ids. ``ids``: token ids of the prompt. ``submits``,
        ``choices``: one per choice."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = ids
        self.submits = submits
        self.choices = choices
        self.routes: RouteShape | None = None
        """Size of the model's routes; None without routed experts."""

    def prioritise(self, priority: int) -> None:
        """Set the priority in ``submits``, before the request is submitted.

        A smaller priority runs first. Raise InvalidRequest for anything except an integer of 64 bits.
        """
        if isinstance(priority, np.integer):
            priority = int(priority)
        if type(priority) is not int or not -(1 << 63) < priority < 1 << 63:
            raise InvalidRequest(
                "priority must be an integer of 64 bits; smaller comes first", param="priority"
            )
        self.submits = [msgspec.structs.replace(submit, priority=priority) for submit in self.submits]

    def adapt(self, digest: str) -> None:
        """Set the LoRA adapter in ``submits``, before the request is submitted. ``digest``: "" for none."""
        if digest:
            self.submits = [msgspec.structs.replace(submit, adapter=digest) for submit in self.submits]

    def show(self, media: tuple[MediaItem, ...]) -> None:
        """Attach the checked images of the prompt, before the request is submitted."""
        if media:
            self.submits = [msgspec.structs.replace(submit, media=media) for submit in self.submits]

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def output(self) -> RequestOutput:
        """Return the accumulated output, with copied lists. May be called while the request runs."""
        first = self.choices[0]
        logprobs: list[PositionLogprobs | None] | None = None
        wanted = self.submits[0].params.prompt_logprobs >= 0
        # A prompt with one token has no logprobs beyond the first entry, which is None.
        found = first.prompt_logprobs
        every = found if found is not None and found.every else None
        if wanted and every is None and (found is not None or first.token_ids):
            logprobs = [None, *([] if found is None else found.read())]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            prompt_logprobs=logprobs,
            outputs=[completion_of(choice, self._routed(choice)) for choice in self.choices],
            finished=self.finished,
            num_cached_tokens=first.num_cached,
            all_prompt_logprobs=None if every is None else every.rows(),
        )

    def _routed(self, choice: Choice) -> np.ndarray | None:
        """Return the experts of a choice's tokens, as in ``CompletionOutput.routed_experts``."""
        if self.routes is None:
            return None
        return routed_experts(self.choices[0], choice, len(self.prompt_ids), self.routes)


class RequestMaker:
    """Make requests from prompts. Thread-safe."""

    def __init__(
        self,
        text: TextModel,
        limits: ModelLimits,
        seed: int | None,
        images: MediaLimits | None = None,
        pictures: LocalPictures | None = None,
    ) -> None:
        """Bind to a model.

        ``seed``: base of minted seeds. ``images`` and ``pictures``: image limits and loader, or None.
        """
        self._pictures = pictures
        self._text = text
        self._limits = limits
        self._images = images
        self.ids = IdMint()
        self.seeds = SeedMint(seed)

    def from_prompt(
        self,
        prompt: Any,
        params: SamplingParams,
        seed: int,
        request_id: str | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """Return the request for a prompt in any form: a string, ``{"prompt": ...}``, or
        ``{"prompt_token_ids": [...]}`` with or without ``media``. Takes ids until ``release``.

        ``seed``: used if ``params`` has no seed. Raise InvalidRequest or ContextLength; no id is taken
        then.
        """
        text, ids, media = self._read(prompt)
        param = "prompt_token_ids" if text is None else "prompt"
        self._check(media, ids)
        made = self._make(text, ids, params, seed, request_id, continues=True, param=param, grammar=grammar)
        made.show(media)
        return made

    def from_messages(
        self,
        messages: Any,
        params: SamplingParams,
        seed: int,
        request_id: str | None = None,
        grammar: Grammar | None = None,
        **options: Any,
    ) -> Request:
        """Return the request for a conversation. ``options``: keywords of ``ChatFormat.encode``. May fetch
        and decode images, and block meanwhile. Takes ids until ``release``.

        Raise InvalidRequest or ContextLength; no id is taken then.
        """
        videos = None if self._pictures is None else self._pictures.videos()
        choose = None if videos is None else videos.choose
        made = self._text.chat.encode(messages, choose=choose, **options)
        continues = bool(options.get("continue_final_message"))
        ids = made.ids
        media: tuple[MediaItem, ...] = ()
        if made.shown and self._pictures is not None:
            found, items = self._pictures.measured(made.shown, videos)
            # One placeholder per image becomes as many placeholders as the image has embedding rows.
            ids, starts = expanded(ids, self._pictures.facts, found)
            media = placed(items, starts)
            self._check(media, ids)
        request = self._make(
            made.text,
            ids,
            params,
            seed,
            request_id,
            continues=continues,
            param="messages",
            grammar=grammar,
        )
        request.show(media)
        return request

    def to_embed(self, prompt: Any, pooling: Pooling, seed: int) -> Request:
        """Return the embedding request for a prompt, with a single choice. Takes ids until ``release``.
        Raise the errors of ``from_prompt``."""
        text, ids, media = self._read(prompt)
        param = "prompt_token_ids" if text is None else "prompt"
        data = prompt_bytes(ids, self._limits, param)
        most = self._limits.max_model_len
        if len(ids) > most:
            message = (
                f"the model's context is {most} tokens, but the prompt has {len(ids)}; shorten the prompt"
            )
            raise ContextLength(message, param=param)
        self._check(media, ids)
        # An embedding ends with the prompt; the parameters are placeholders.
        params = SamplingParams(max_tokens=1)
        submits = submits_of(data, TokenParams(max_tokens=1), 1, ids=self.ids, seed=seed, pooling=pooling)
        choice = Choice(self._text.tokenizer, params, sequence=submits[0].sequence)
        made = Request(f"{submits[0].request:016x}", text, ids, submits, [choice])
        made.show(media)
        return made

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self._text.tokenizer

    def release(self, request: Request) -> None:
        """Release the ids of a request, which then may be used again. Call once, after the end of the
        request."""
        for submit in request.submits:
            self.ids.release(submit.sequence)
        self.ids.release(request.submits[0].request)

    def _check(self, media: tuple[MediaItem, ...], ids: list[int]) -> None:
        """Check the images against the model's limits. Raise InvalidRequest."""
        if media:
            check_media(media, len(ids), self._images, computes=True)

    def _read(self, prompt: Any) -> tuple[str | None, list[int], tuple[MediaItem, ...]]:
        """Return (text, ids, images) of a prompt in any form. Text is None for a prompt of token ids, and
        ids are unchecked then. Raise InvalidRequest."""
        if isinstance(prompt, str):
            return prompt, self._text.tokenizer.encode(prompt), ()
        # Extra keys are refused, not ignored.
        if isinstance(prompt, Mapping) and len(prompt) == 1 and isinstance(text := prompt.get("prompt"), str):
            return text, self._text.tokenizer.encode(text), ()
        if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt_token_ids", "media"}:
            ids, media = prompt.get("prompt_token_ids"), prompt.get("media", ())
            # Checks further on expect Python ints. Arrays of numpy and tensors of torch have tolist.
            if (to_list := getattr(ids, "tolist", None)) is not None:
                ids = to_list()
            if not isinstance(media, list | tuple) or not all(isinstance(item, MediaItem) for item in media):
                raise InvalidRequest("media must be a list of weft.types.media_item.MediaItem", param="media")
            if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
                made = [token.item() if isinstance(token, np.integer) else token for token in ids]
                return None, made, tuple(media)
        raise InvalidRequest(f"a prompt must be {_FORMS}", param="prompt")

    def _make(
        self,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        seed: int,
        request_id: str | None,
        *,
        continues: bool,
        param: str,
        grammar: Grammar | None,
    ) -> Request:
        """Return a request with new ids. Raise InvalidRequest or ContextLength.

        ``request_id``: None for an id made from the engine's. ``continues``: the output continues text of
        the prompt. ``param``: field to name in errors.
        """
        if grammar is not None and not isinstance(grammar, Grammar):
            raise InvalidRequest("grammar must be an object of weft.types.grammar", param="grammar")
        tokenizer = self._text.tokenizer
        submits = build_submits(
            ids, params, self._limits, tokenizer, ids=self.ids, seed=seed, prompt_param=param
        )
        stops = Stops(params.stop)
        if grammar is not None:
            submits = [msgspec.structs.replace(submit, grammar=grammar) for submit in submits]
        choices = [
            Choice(
                tokenizer,
                params,
                sequence=submit.sequence,
                index=submit.choice,
                continues=continues,
                stops=stops,
            )
            for submit in submits
        ]
        made = Request(request_id or f"{submits[0].request:016x}", prompt, ids, submits, choices)
        made.routes = self._limits.routes
        return made


def client_error(error: ErrorInfo) -> WeftError | None:
    """Return the exception for an error with blame "client", else None."""
    if error.blame != "client":
        return None
    return InvalidRequest(error.message, param=error.param, code=error.code)


def spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """Return one SamplingParams per prompt. Raise InvalidRequest for a wrong type or length."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(own, SamplingParams) for own in params):
        raise InvalidRequest(
            "sampling_params must be a SamplingParams or a list of them", param="sampling_params"
        )
    if len(params) != count:
        raise InvalidRequest(
            f"there are {count} prompts but {len(params)} sampling_params", param="sampling_params"
        )
    return params


def spread_grammars(
    grammar: Grammar | Sequence[Grammar | None] | None, count: int
) -> Sequence[Grammar | None]:
    """Return one grammar or None per prompt. Raise InvalidRequest for a wrong length."""
    if not isinstance(grammar, list | tuple):
        return [grammar] * count  # type: ignore[list-item]
    if len(grammar) != count:
        raise InvalidRequest(f"there are {count} prompts but {len(grammar)} grammars", param="grammar")
    return grammar
