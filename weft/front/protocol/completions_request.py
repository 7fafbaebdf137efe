"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from weft.common.errors import InvalidRequest
from weft.front.protocol.fields import CHAT_ONLY, NEUTRAL, NO_TOOLS, UNSUPPORTED
from weft.front.protocol.generate_request import Generate
from weft.front.protocol.parse import between
from weft.types.sampling import MAX_N, MAX_TOP_LOGPROBS, SamplingParams

MAX_PROMPTS = 256
"""Maximum prompts of one completions request."""
MAX_SEQUENCES = 1024
"""Maximum of prompts times ``n`` of one request."""
DEFAULT_COMPLETION_TOKENS = 16


class CompletionRequest(Generate, frozen=True, kw_only=True):
    """POST /v1/completions."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {**NEUTRAL, **NO_TOOLS}
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED | CHAT_ONLY

    prompt: str | list[Any]
    """A text, token ids, a list of texts or a list of lists of token ids."""
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def prompt_only(self) -> bool:
        """True if the request wants the prompt with logprobs, and no output."""
        return self.max_tokens == 0

    def check(self) -> None:
        """Raise InvalidRequest for parameters that are out of range or exclude each other."""
        super().check()
        # `max_tokens` 0 asks for the prompt only, which makes sense only with `echo`.
        if self.prompt_only and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1, unless echo is true", param="max_tokens")
        if self.prompt_only and self.min_tokens:
            raise InvalidRequest("min_tokens must not be greater than max_tokens", param="min_tokens")
        if self.logprobs is not None:
            between("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None and self.echo:
            raise InvalidRequest(
                "prompt_logprobs cannot be combined with echo; leave prompt_logprobs out and set logprobs",
                param="prompt_logprobs",
            )
        prompts = self.prompts()
        if self.n is not None:
            between("n", self.n, 1, MAX_N)
        if len(prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise InvalidRequest(f"the number of prompts times n must be at most {MAX_SEQUENCES}", param="n")

    def prompts(self) -> list[str] | list[list[int]]:
        """Return every prompt, as text or as token ids.

        Raises InvalidRequest for an empty or invalid prompt, and for too many prompts.
        """
        if isinstance(self.prompt, str):
            return [_prompt_text(self.prompt)]
        items = self.prompt
        if not items:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if type(items[0]) is int:
            return [_prompt_ids(items)]
        if len(items) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt must hold at most {MAX_PROMPTS} prompts", param="prompt")
        if isinstance(items[0], str):
            return [_prompt_text(item) for item in items]
        return [_prompt_ids(item) for item in items]

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters.

        With ``echo``, logprobs cover the prompt too. Raises InvalidRequest.
        """
        more: dict[str, Any] = {}
        if self.logprobs is not None:
            more["logprobs"] = self.logprobs
            if self.echo:
                more["prompt_logprobs"] = self.logprobs
        if self.prompt_only:
            more["max_tokens"] = 1  # the engine makes at least one token, which prompt_only.py hides
        return self.sampling_with(**more)


def _prompt_text(text: Any) -> str:
    """Return the text of one prompt. Raises InvalidRequest."""
    if not isinstance(text, str) or not text:
        raise InvalidRequest(
            "prompt must be a non-empty string, a list of token ids, or a list of either", param="prompt"
        )
    return text


def _prompt_ids(ids: Any) -> list[int]:
    """Return the token ids of one prompt. The vocabulary is checked at submission. Raises InvalidRequest."""
    if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i < 1 << 31 for i in ids):
        raise InvalidRequest(
            "prompt must hold token ids: integers from 0 to the vocabulary size minus 1", param="prompt"
        )
    return ids
