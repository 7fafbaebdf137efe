"""Scores and classes of prompts: prompts of (query, document), and numbers in the form clients receive."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from weft.common.errors import InvalidRequest
from weft.config.spec import ModelSpec
from weft.text.pooled import normalized
from weft.text.tokenizer import Tokenizer
from weft.types.pooled import ClassifySpec, PooledSpec

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction of Qwen3-Reranker, as published, for requests without an instruction."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEFORE = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings and classes of a served model."""

    pooled: PooledSpec = PooledSpec()
    classify: ClassifySpec | None = None
    hidden: int = 0
    """Elements of an embedding."""

    @classmethod
    def of(cls, spec: ModelSpec, pooling: Literal["auto", "last", "mean", "cls"]) -> Tasks:
        """Return the tasks of a model. ``pooling``: value of --pooling; a set value wins over the layout of
        the checkpoint."""
        pooled = spec.pooled
        if pooling != "auto":
            pooled = msgspec.structs.replace(pooled, mode=pooling, normalize=True, refused="")
        return cls(pooled=pooled, classify=spec.classify, hidden=spec.hidden)


class Prompts:
    """Makes the prompts of one model from texts. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, classify: ClassifySpec | None) -> None:
        self._tokenizer = tokenizer
        self._instructed = classify is not None and classify.instructed
        self._before: list[int] = []
        self._after: list[int] = []
        if self._instructed:
            self._before = tokenizer.encode(_BEFORE, add_special_tokens=False, parse_special=True)
            self._after = tokenizer.encode(_AFTER, add_special_tokens=False, parse_special=True)

    def check_instruction(self, instruction: str | None) -> None:
        """Raise InvalidRequest for an instruction that the model's prompt form cannot hold."""
        if instruction is not None and not self._instructed:
            raise InvalidRequest(
                "this model's prompts have no instruction: leave instruction out, or write the instruction "
                "into the query",
                param="instruction",
            )

    def pair(self, query: str, document: str, instruction: str | None, limit: int | None = None) -> list[int]:
        """Return the token ids of a query with a document.

        Qwen3-Reranker: the published form, in three parts. Other models: the pair form of the tokenizer.
        ``limit``: keep at most so many tokens; the text is cut at its end, never the frame around the text.
        Raises InvalidRequest for invalid text.
        """
        if not self._instructed:
            return self._tokenizer.encode_cut(query, document, limit)
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        if limit is not None:
            text = self._tokenizer.shortened(text, limit)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        room = len(ids) if limit is None else max(limit - len(self._before) - len(self._after), 0)
        return [*self._before, *ids[:room], *self._after]


def probabilities(numbers: np.ndarray, classify: ClassifySpec, activate: bool = True) -> np.ndarray:
    """Return the numbers of one prompt as probabilities, float64 [labels].

    Regression: the numbers as they are. One of several labels: a softmax. Any of the labels, or a single
    number: a sigmoid of each. ``activate``: False returns the numbers as they are.
    """
    numbers = numbers.astype(np.float64)
    if not activate or classify.problem == "regression":
        return numbers
    several = len(numbers) > 1 if classify.problem == "" else classify.problem == "single"
    if several:
        powers = np.exp(numbers - numbers.max())
        return np.asarray(powers / powers.sum())
    return np.asarray(0.5 * (1 + np.tanh(numbers / 2)))


def cosine(one: bytes, other: bytes) -> float:
    """Return the cosine of two embeddings, as sent by the engine."""
    return float(normalized(one).astype(np.float64) @ normalized(other).astype(np.float64))


def check_dimensions(dimensions: int | None, pooled: PooledSpec, hidden: int) -> None:
    """Raise InvalidRequest for a dimension that the checkpoint does not allow."""
    if dimensions is None or dimensions == hidden:
        return
    if pooled.any_dimension and 1 <= dimensions < hidden:
        return
    if dimensions in pooled.dimensions and dimensions < hidden:
        return
    allowed = f"1 to {hidden}" if pooled.any_dimension else ", ".join(map(str, (*pooled.dimensions, hidden)))
    raise InvalidRequest(
        f"dimensions must be one of: {allowed}; the checkpoint's config.json (is_matryoshka, "
        "matryoshka_dimensions) or --hf-overrides allows more",
        param="dimensions",
    )


def shown(embedding: bytes, dimensions: int | None, normalize: bool) -> np.ndarray:
    """Return an embedding as float32 [dimensions]: cut first, then scaled to length 1 if ``normalize``."""
    vector = np.frombuffer(embedding, "<f4")[:dimensions]
    return normalized(vector.tobytes()) if normalize else vector
