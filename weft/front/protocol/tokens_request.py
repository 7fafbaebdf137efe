"""POST /inference/v1/generate: token ids in, token ids out. Names and meanings follow vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import AnswerOptions, Conversation, OutputConstraint, Sharing
from weft.front.protocol.fields import INSTEAD, NEUTRAL, UNSUPPORTED, asks_no_transfer, is_one_of
from weft.front.protocol.generate_request import Generate, StreamOptions, sharing_of
from weft.front.protocol.npy import from_npy
from weft.front.protocol.parse import Body, between, make, short
from weft.types.routes import Routes
from weft.types.sampling import MAX_TOP_LOGPROBS, MOST_TOP_LOGPROBS, SamplingParams, StopIn

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_OUTSIDE = (
    "model",
    "stream",
    "stream_options",
    "return_token_ids",
    "priority",
    "cache_salt",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields of ``Generate`` that have no place among sampling parameters."""
MAX_BUDGET = 1 << 31


class TokenSampling(Generate, frozen=True, kw_only=True):
    """``sampling_params`` of a request with token ids."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        **NEUTRAL,
        "extra_args": is_one_of({}),
        "flat_logprobs": is_one_of(False),
        "skip_reading_prefix_cache": is_one_of(False),
        "thinking_token_budget": is_one_of(-1),
    }
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED | {
        *("extra_args", "flat_logprobs", "skip_reading_prefix_cache"),
        *("prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "stream_interval"),
        *("repetition_detection", "trace_decode_token_ids"),
    }
    hints: ClassVar[Mapping[str, Any]] = {
        "output_kind": Literal[0, 1, 2],
        "skip_clone": bool,
        "output_text_buffer_length": int,
        "_all_stop_token_ids": list[int],
        "_eos_token_id": int,
    }
    """Parts of vLLM's own parameters that follow from other fields."""

    prompt_logprobs_range: ClassVar[tuple[int, int]] = (-1, MOST_TOP_LOGPROBS)

    logprobs: int | None = None
    detokenize: bool | None = None
    """False: no text is needed, so no stop strings."""
    thinking_token_budget: int | None = None
    """Maximum tokens of reasoning; then the reasoning is ended."""
    return_routed_experts: bool | None = None
    """True to return the experts of each token."""
    routed_experts_prompt_start: int | None = None
    """First prompt token with returned experts."""
    force_routed_experts: str | None = None
    """Experts to use for the first tokens: base64 of a .npy file of integers [tokens, layers, experts per
    token]."""
    stop_in: StopIn | None = None
    """Scope of stop strings: the whole output (the default), or content only."""

    def check(self) -> None:
        """Raise InvalidRequest for fields in the wrong place, or that exclude each other."""
        super().check()
        for name in _OUTSIDE:
            if getattr(self, name) is not None:
                raise InvalidRequest(
                    f"{name} is not supported in sampling_params; send {name} as a field of the request",
                    param=name,
                )
        if self.detokenize is False and self.stop:
            raise InvalidRequest("stop needs detokenize to be true", param="stop")
        if self.thinking_token_budget is not None:
            between("thinking_token_budget", self.thinking_token_budget, 0, MAX_BUDGET)
            if self.return_routed_experts:
                raise InvalidRequest(
                    "return_routed_experts cannot be combined with thinking_token_budget; send only one of "
                    "the two",
                    param="return_routed_experts",
                )

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidRequest for a value out of range."""
        more: dict[str, Any] = {"stop_in": self.stop_in or "everything"}
        for name in ("logprobs", "return_routed_experts", "routed_experts_prompt_start"):
            if getattr(self, name) is not None:
                more[name] = getattr(self, name)
        if self.force_routed_experts is not None:
            name = "force_routed_experts"
            more[name] = Routes.of(from_npy(self.force_routed_experts, name))
        return self.sampling_with(**more)

    def check_form(self, *, binary: bool, stream: bool) -> None:
        """Raise InvalidRequest for output that the form of the answer cannot have."""
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and not (binary or 0 <= wanted <= MAX_TOP_LOGPROBS):
                raise InvalidRequest(
                    f"{name} must be 0 to {MAX_TOP_LOGPROBS} in JSON; for more, or -1 for the whole "
                    "vocabulary, set return_binary to float32 or float16",
                    param=name,
                )
        whole = {
            "prompt_logprobs": self.prompt_logprobs is not None,
            "return_routed_experts": bool(self.return_routed_experts),
            "return_binary": binary,
        }
        for name, asks in whole.items():
            if asks and stream:
                raise InvalidRequest(f"{name} cannot be streamed; set stream to false", param=name)


class GenerateRequest(Body, frozen=True, kw_only=True):
    """POST /inference/v1/generate."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "content_parts": is_one_of([]),
        "ec_transfer_params": is_one_of({}),
        "kv_transfer_params": asks_no_transfer,
        "cache_salt": is_one_of(""),
    }
    unsupported: ClassVar[frozenset[str]] = frozenset(
        ("features", "content_parts", "ec_transfer_params", "kv_transfer_params")
    )
    instead: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        "features": "send conversations with images to /v1/chat/completions",
        "content_parts": "send conversations with images to /v1/chat/completions",
    }
    hints: ClassVar[Mapping[str, Any]] = {
        "token_offsets": list[Any],
        "assistant_tokens_mask": list[int],
        "reasoning_parser_kwargs": dict[str, Any],
    }

    token_ids: list[int]
    sampling_params: dict[str, Any]
    """Fields of ``TokenSampling``."""
    model: str | None = None
    request_id: str | None = None
    """Id to repeat in the answer. Default: a random id."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """True to repeat the prompt's token ids in the answer."""
    output_mode: Literal["tokens", "text"] | None = None
    """text: the answer also has the text."""
    return_binary: Literal["float32", "float16"] | None = None
    """Return logprobs as arrays (``BinaryLogprobs``), in this dtype."""
    reasoning_ended: bool | None = None
    """True: an output format applies from the first token. Otherwise the format applies after the reasoning,
    and the prompt's end decides whether the output begins inside reasoning."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of the same salt."""
    priority: int | None = None
    """Lower values go first."""

    def check(self) -> None:
        """Raise InvalidRequest for parameters that are out of range or exclude each other."""
        if not self.token_ids:
            raise InvalidRequest("token_ids must not be empty", param="token_ids")
        if self.model is not None:
            short("model", self.model)
        if self.request_id is not None and not _REQUEST_ID.fullmatch(self.request_id):
            raise InvalidRequest(
                "request_id must have 1 to 128 of the characters A-Z a-z 0-9 _ . : -", param="request_id"
            )
        if self.stream_options is not None:
            self.stream_options.check()
            if not self.stream:
                raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        # Errors of nested fields come here, before any work on the prompt.
        sampling = self.sampling()
        sampling.check_form(binary=self.return_binary is not None, stream=bool(self.stream))
        if self.output_mode == "text" and sampling.detokenize is False:
            raise InvalidRequest("output_mode text needs detokenize to be true", param="output_mode")
        self.sharing()

    def sampling(self) -> TokenSampling:
        """Return the checked sampling parameters. Raises InvalidRequest."""
        given = dict(self.sampling_params)
        # vLLM writes every switch of a format, set or not.
        if isinstance(form := given.get("structured_outputs"), dict):
            given["structured_outputs"] = {
                name: value for name, value in form.items() if value is not None and value is not False
            }
        return make(given, TokenSampling)

    def sharing(self) -> Sharing:
        """Return the sharing settings. Raises InvalidRequest."""
        return sharing_of(self.priority, self.cache_salt)


class TokensFacts(msgspec.Struct, frozen=True):
    """Facts of a request for the shape of the answer."""

    request_id: str = ""
    text: bool = False
    """True if the answer has the text."""


def facts_of(asked: GenerateRequest) -> TokensFacts:
    """Return the facts for the shape of the answer."""
    return TokensFacts(asked.request_id or "", asked.output_mode == "text")


def conversation_of(
    asked: GenerateRequest, sampling: TokenSampling, constraint: OutputConstraint | None
) -> Conversation:
    """Return the conversation of a request: a prompt of token ids. Raises InvalidRequest."""
    params = sampling.sampling()
    options = asked.stream_options
    form = AnswerOptions(
        model=asked.model or "",
        stream=bool(asked.stream),
        usage_in_stream=options is not None and bool(options.include_usage),
        usage_in_chunks=options is not None and bool(options.continuous_usage_stats),
        return_token_ids=bool(asked.return_token_ids),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        top=params.logprobs,
        prompt_logprobs=sampling.prompt_logprobs is not None,
        binary=asked.return_binary or "",
    )
    return Conversation(
        messages=None,
        params=params,
        form=form,
        constraint=constraint,
        thinking_budget=sampling.thinking_token_budget,
        continues=True,
        prompt_ids=asked.token_ids,
        sharing=asked.sharing(),
    )
