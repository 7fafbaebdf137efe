"""POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import Sharing
from weft.front.protocol.fields import is_one_of
from weft.front.protocol.generate_request import sharing_of
from weft.front.protocol.parse import Body, short

MAX_INPUTS = 2048
"""Maximum inputs of one request, equal to OpenAI's limit."""


class EmbeddingRequest(Body, frozen=True, kw_only=True):
    """POST /v1/embeddings. The dimension of the vectors is the model's hidden size, or ``dimensions``."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "user": is_one_of(""),
        "cache_salt": is_one_of(""),
        "add_special_tokens": is_one_of(True),
    }
    unsupported: ClassVar[frozenset[str]] = frozenset({"add_special_tokens", "pooling"})

    model: str | None = None
    """Model name; default: the server's model."""
    input: str | list[Any]
    """A text, token ids, a list of texts or a list of lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """Number of leading elements of each vector, for a checkpoint that allows shorter vectors."""
    normalize: bool | None = None
    """True: vectors of length 1. Default: as the checkpoint says, else true."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Maximum tokens of each input; longer inputs are cut at the end. -1: the model's context."""
    user: str | None = None
    """Label of the caller's user, without effect."""
    priority: int | None = None
    """Lower values go first."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of the same salt."""

    def check(self) -> None:
        """Raise InvalidRequest for an invalid parameter or input."""
        if self.model is not None:
            short("model", self.model)
        if self.user is not None:
            short("user", self.user)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be at least 1, or -1 for the model's context",
                param="truncate_prompt_tokens",
            )
        self.sharing()
        self.prompts()

    def sharing(self) -> Sharing:
        """Return the sharing settings. Raises InvalidRequest."""
        return sharing_of(self.priority, self.cache_salt)

    def prompts(self) -> list[str | list[int]]:
        """Return every input, as text or as token ids.

        Raises InvalidRequest for an empty or invalid input, and for too many.
        """
        return inputs_of(self.input)


def inputs_of(given: str | list[Any]) -> list[str | list[int]]:
    """Return every input of the field ``input``. Raises InvalidRequest."""
    if isinstance(given, str):
        return [_one(given)]
    if given and type(given[0]) is int:
        return [_one(given)]
    if not 1 <= len(given) <= MAX_INPUTS:
        raise InvalidRequest(f"input must hold 1 to {MAX_INPUTS} inputs", param="input")
    return [_one(item) for item in given]


def _one(item: Any) -> str | list[int]:
    """Return one input. Raises InvalidRequest for an empty or invalid input."""
    if isinstance(item, str) and item:
        return item
    if isinstance(item, list) and item and all(type(i) is int and 0 <= i < 1 << 31 for i in item):
        return item
    raise InvalidRequest(
        "input must be a non-empty string, a list of token ids, or a list of either", param="input"
    )
