"""POST /v1/rerank, /v1/score and /v1/classify."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import Sharing
from weft.front.protocol.embeddings_request import MAX_INPUTS, inputs_of
from weft.front.protocol.fields import is_one_of
from weft.front.protocol.generate_request import sharing_of
from weft.front.protocol.parse import Body, missing, short

Truncation = Annotated[int, Meta(ge=-1)]


class _Pooling(Body, frozen=True, kw_only=True):
    """Fields common to the three requests."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "user": is_one_of(""),
        "cache_salt": is_one_of(""),
        "add_special_tokens": is_one_of(True),
    }
    unsupported: ClassVar[frozenset[str]] = frozenset({"add_special_tokens", "mm_processor_kwargs"})

    model: str | None = None
    """Model name; default: the server's model."""
    truncate_prompt_tokens: Truncation | None = None
    """Maximum tokens of each prompt; longer prompts are cut at the end. -1: the model's context. Without the
    field, a prompt that is too long is an error."""
    use_activation: bool | None = None
    """False: return the model's numbers without softmax or sigmoid."""
    user: str | None = None
    """Label of the caller's user, without effect."""
    priority: int | None = None
    """Lower values go first."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of the same salt."""

    def sharing(self) -> Sharing:
        """Return the sharing settings. Raises InvalidRequest."""
        return sharing_of(self.priority, self.cache_salt)

    def check(self) -> None:
        """Raise InvalidRequest for an invalid parameter."""
        for name in ("model", "user"):
            if getattr(self, name) is not None:
                short(name, getattr(self, name))
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be at least 1, or -1 for the model's context",
                param="truncate_prompt_tokens",
            )
        self.sharing()


class RerankRequest(_Pooling, frozen=True, kw_only=True):
    """POST /v1/rerank: order documents by their relevance for a query."""

    instead: ClassVar[Mapping[str, str]] = {
        "max_tokens_per_doc": "truncate_prompt_tokens limits the query and the document together"
    }
    unsupported: ClassVar[frozenset[str]] = _Pooling.unsupported | {"max_tokens_per_doc", "rank_fields"}

    query: str
    documents: list[str | dict[str, Any]]
    """Texts, or objects with the field text."""
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of results; default, and 0: all documents."""
    return_documents: bool | None = None
    """False: results without the text of the document."""
    instruction: str | None = None
    """Instruction in the prompt, for a model whose prompt form has an instruction."""

    def check(self) -> None:
        """Raise InvalidRequest for an invalid parameter, query or document."""
        _Pooling.check(self)
        texts_of("query", [self.query])
        self.texts()

    def texts(self) -> list[str]:
        """Return the text of each document. Raises InvalidRequest."""
        return texts_of("documents", self.documents)


class ScoreRequest(_Pooling, frozen=True, kw_only=True):
    """POST /v1/score: the score of each pair of texts."""

    text_1: str | list[str] | None = None
    """One text, or a list of texts."""
    text_2: str | list[str] | None = None
    """A text, or as many texts as ``text_1`` has; any number of texts if ``text_1`` is one text."""
    queries: str | list[str] | None = None
    """Other name of ``text_1``."""
    documents: str | list[str] | None = None
    """Other name of ``text_2``."""
    instruction: str | None = None
    """Instruction in the prompt, for a model whose prompt form has an instruction."""

    def check(self) -> None:
        """Raise InvalidRequest for an invalid parameter or text."""
        _Pooling.check(self)
        self.pairs()

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return (first texts, second texts), both of the same length. Raises InvalidRequest."""
        first = self._side("text_1", "queries")
        second = self._side("text_2", "documents")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}: send one text in text_1, or "
                "equal numbers",
                param="text_2",
            )
        return first, second

    def _side(self, name: str, alias: str) -> list[str]:
        """Return the texts of one side. Raises InvalidRequest."""
        given = [one for one in (name, alias) if getattr(self, one) is not None]
        if not given:
            raise missing(name)
        if len(given) > 1:
            raise InvalidRequest(f"send {name} or {alias}, not both", param=alias)
        value = getattr(self, given[0])
        return texts_of(given[0], [value] if isinstance(value, str) else value)


class ClassifyRequest(_Pooling, frozen=True, kw_only=True):
    """POST /v1/classify: the label of each input, with the probability of each label."""

    input: str | list[Any]
    """A text, token ids, a list of texts or a list of lists of token ids."""

    def check(self) -> None:
        """Raise InvalidRequest for an invalid parameter or input."""
        _Pooling.check(self)
        self.prompts()

    def prompts(self) -> list[str | list[int]]:
        """Return every input, as text or as token ids. Raises InvalidRequest."""
        return inputs_of(self.input)


def texts_of(param: str, values: Sequence[Any]) -> list[str]:
    """Return ``values`` as texts; an object gives its field ``text``. Raises InvalidRequest."""
    if not 1 <= len(values) <= MAX_INPUTS:
        raise InvalidRequest(f"{param} must hold 1 to {MAX_INPUTS} texts", param=param)
    given = [
        value.get("text")
        if isinstance(value, dict) and {name for name in value if value[name] is not None} == {"text"}
        else value
        for value in values
    ]
    texts = [text for text in given if isinstance(text, str) and text]
    if len(texts) < len(given):
        raise InvalidRequest(
            f"{param} must hold non-empty texts, or objects with the field text", param=param
        )
    return texts
